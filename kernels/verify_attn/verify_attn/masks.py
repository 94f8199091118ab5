"""Tree masks in every layout callers have, and from one to another.

The q×q mask of a stream says which draft rows (columns) a draft row sees; the prefix is always visible. Layouts:

* bool: [streams, q, q], True = visible; of a stream with fewer queries the first rows and columns.
* bits: int32 [tokens, words]; bit j % 32 of word j // 32 in row t says whether t sees draft row j of its stream.
* QLEN: uint8 or bool, the streams' [q, q] one after another, flat (SGLang on the CPU).
* FULL: uint8 or bool, the streams' [q, prefix + q] one after another, flat, with `mask_indptr` (SGLang on the GPU).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verify_attn.bits import pack_rows
from verify_attn.errors import InputError
from verify_attn.problem import Mask, Problem


def pack_bits(masks: Sequence[Tensor], tokens: int | None = None, words: int | None = None) -> Tensor:
    """Bits of the streams' masks.

    Args:
        masks: bool or uint8 [q_b, q_b] per stream, in order.
        tokens: rows of the result; more than the sum of q_b leaves zero rows for padding.
        words: words a row; default just enough for the widest stream.

    Returns:
        int32 [tokens, words] on the masks' device.

    Raises:
        InputError: a mask is not square, or tokens or words are too few.
    """
    for b, mask in enumerate(masks):
        if mask.dim() != 2 or mask.shape[0] != mask.shape[1]:
            raise InputError(f"mask of stream {b} has shape {tuple(mask.shape)}; give [q, q]")
    widest = max((m.shape[0] for m in masks), default=0)
    need = sum(m.shape[0] for m in masks)
    tokens = need if tokens is None else tokens
    words = max(1, -(-widest // 32)) if words is None else words
    if tokens < need or words * 32 < widest:
        raise InputError(f"{tokens} rows of {words} words do not hold masks with {need} rows, the widest of {widest}")
    device = masks[0].device if masks else "cpu"
    seen = torch.zeros(tokens, words * 32, dtype=torch.bool, device=device)
    row = 0
    for mask in masks:
        q = mask.shape[0]
        seen[row:row + q, :q] = mask.ne(0)
        row += q
    return pack_rows(seen)


def unpack_bits(bits: Tensor, q: int) -> Tensor:
    """Bool [rows, q] of int32 or uint32 words [rows, words]."""
    words = bits.view(torch.int32).to(torch.int64)
    column = torch.arange(q, device=bits.device)
    return (words[:, column // 32] >> (column % 32) & 1).bool()


def qlen_mask(masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The QLEN layout: uint8 flat, and mask_indptr int64 [streams + 1]."""
    sizes = torch.tensor([0] + [m.numel() for m in masks], dtype=torch.int64)
    flat = torch.cat([m.reshape(-1).to(torch.uint8) for m in masks]) if masks else torch.zeros(0, dtype=torch.uint8)
    return flat, sizes.cumsum(0).to(flat.device)


def full_mask(masks: Sequence[Tensor], prefix_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """SGLang's FULL layout: uint8 flat with ones over the prefix, and mask_indptr int64 [streams + 1]."""
    if len(masks) != len(prefix_lens):
        raise InputError(f"{len(masks)} masks for {len(prefix_lens)} prefix lengths; give one a stream")
    parts = [torch.cat([m.new_ones(m.shape[0], n, dtype=torch.uint8), m.to(torch.uint8)], 1).reshape(-1)
             for m, n in zip(masks, prefix_lens)]
    sizes = torch.tensor([0] + [p.numel() for p in parts], dtype=torch.int64)
    flat = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)
    return flat, sizes.cumsum(0).to(flat.device)


def full_indptr(qo_indptr: Tensor, prefix_lens: Tensor) -> Tensor:
    """mask_indptr (int64 [streams + 1]) that belongs to a FULL mask of these streams."""
    q = (qo_indptr[1:] - qo_indptr[:-1]).to(torch.int64)
    sizes = q * (prefix_lens.to(torch.int64) + q)
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def dense(p: Problem, stream: int) -> Tensor:
    """Bool [q, q] of one stream of a problem, from whichever layout it has. Reads index tensors, so it waits for a GPU."""
    first, q = int(p.qo_indptr[stream]), int(p.qo_indptr[stream + 1] - p.qo_indptr[stream])
    if p.mask_kind is Mask.CAUSAL:
        return torch.ones(q, q, dtype=torch.bool, device=p.q.device).tril()
    if p.mask_kind is Mask.BITS:
        return unpack_bits(p.mask[first:first + q], q)
    start = int(p.mask_indptr[stream])
    if p.mask_kind is Mask.QLEN:
        return p.mask[start:start + q * q].view(q, q).bool()
    prefix = int(p.prefix_lens[stream])
    return p.mask[start:start + q * (prefix + q)].view(q, prefix + q)[:, prefix:].bool()
