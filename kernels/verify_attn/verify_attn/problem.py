"""One verify-attention problem: the tensors of a call, checked once, in the layouts of csrc/verify_attn.h.

Everything that runs (the torch variants, the CPU kernel, the CUDA kernels) starts from a `Problem`, so that what is
refused, and the words it is refused with, are the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from verify_attn.bits import bits_of_squares
from verify_attn.errors import InputError

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INTS = (torch.int32, torch.int64)


class Mask(IntEnum):
    """Layout of the tree mask (enum verify_attn_mask of the C ABI)."""

    CAUSAL = 0
    BITS = 1
    QLEN = 2
    FULL = 3


@dataclass(frozen=True)
class Problem:
    """Checked tensors of one call; shapes and meanings as in csrc/verify_attn.h.

    `draft_kv` is None when the draft rows are in the pool, at `draft_slots`. `mask` is None only for Mask.CAUSAL.
    All index tensors have one dtype, int32 or int64. `max_q` and `max_prefix` are bounds known on the host.
    """

    q: Tensor  # [tokens, heads, latent + rope]
    kv_pool: Tensor  # [slots, latent + rope], rows may be strided
    qo_indptr: Tensor  # [streams + 1]
    kv_indptr: Tensor  # [streams + 1], counts pages
    kv_indices: Tensor  # page numbers
    prefix_lens: Tensor  # [streams], int32
    page_size: int
    draft_kv: Tensor | None  # [tokens, latent + rope], rows may be strided
    draft_slots: Tensor | None  # [tokens]
    mask_kind: Mask
    mask: Tensor | None
    mask_indptr: Tensor | None  # [streams + 1]
    scale: float
    latent_dim: int
    max_q: int
    max_prefix: int
    out: Tensor  # [tokens, heads, latent]
    lse: Tensor  # [tokens, heads], float32
    chunk: int = 0  # batch-invariant mode: keys a split, fixed; 0 = off

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def rope_dim(self) -> int:
        return self.q.shape[2] - self.latent_dim

    @property
    def streams(self) -> int:
        return self.prefix_lens.shape[0]

    @property
    def mask_words(self) -> int:
        return self.mask.shape[1] if self.mask_kind is Mask.BITS else 0


def make_problem(
    q: Tensor,
    kv_pool: Tensor,
    *,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    prefix_lens: Tensor,
    scale: float,
    page_size: int = 1,
    draft_kv: Tensor | None = None,
    draft_slots: Tensor | None = None,
    mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    mask_layout: str = "auto",
    latent_dim: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_q: int | None = None,
    max_prefix: int | None = None,
    chunk: int = 0,
    check_values: bool | None = None,
) -> Problem:
    """Checks the arguments of `verify_attention` and completes them.

    Args:
        latent_dim: leading elements of a KV row that are also the value; default 512 for 576-element rows, else
            from `out`, else the row less 16.
        mask_layout: `auto`, `bits`, `qlen` or `full`; auto takes 2-D int32/uint32 as bits, 3-D (or 2-D square, one
            stream) bool/uint8 as q×q, padded where a stream has fewer queries. A flat mask needs `qlen` or `full`: nothing else tells.
        check_values: look inside the index tensors too (order, lengths, ranges). Default: on the CPU yes, on a GPU
            no, since looking waits for the device.

    Raises:
        InputError: naming the tensor and what to change.
    """
    _check_q_and_pool(q, kv_pool, page_size)
    latent = _latent(q, out, latent_dim)
    kv_pool = _rows(kv_pool, q, "kv_pool")
    streams = _check_indices(q, qo_indptr, kv_indptr, kv_indices, prefix_lens)
    draft_kv, draft_slots = _draft(q, draft_kv, draft_slots)
    kind = _mask_kind(q, mask, mask_indptr, mask_layout)
    max_q = _bound("max_q", max_q, lambda: int((qo_indptr[1:] - qo_indptr[:-1]).max()) if streams else 0, q)
    max_prefix = _bound("max_prefix", max_prefix, lambda: int(prefix_lens.max()) if streams else 0, q)
    if kind in (Mask.QLEN, Mask.FULL) and mask.dim() == 1:
        _check_index("mask_indptr", mask_indptr, mask)
        if mask_indptr.shape[0] != streams + 1:
            raise InputError(f"mask_indptr has {mask_indptr.shape[0]} elements; it needs {streams + 1}")
        mask = mask.view(torch.uint8)
    elif kind is Mask.QLEN:
        kind, mask = Mask.BITS, bits_of_squares(_squares(mask, streams, max_q), qo_indptr, q.shape[0])
    if kind is Mask.BITS and mask.shape[1] * 32 < max_q:
        raise InputError(f"mask has {mask.shape[1]} words a row, enough for {mask.shape[1] * 32} draft rows, but a "
                         f"stream has {max_q}; give [tokens, {-(-max_q // 32)}] (see masks.pack_bits)")
    if not 0 <= chunk < 1 << 31:
        raise InputError(f"chunk is {chunk}; give 0 (off) or the number of keys a split")
    index64, (qo_indptr, kv_indptr, kv_indices, draft_slots, mask_indptr) = _one_width(
        qo_indptr, kv_indptr, kv_indices, draft_slots, mask_indptr)
    out, lse = _outputs(q, latent, out, lse)
    problem = Problem(
        q=q, kv_pool=kv_pool, qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices,
        prefix_lens=prefix_lens.to(torch.int32), page_size=page_size, draft_kv=draft_kv, draft_slots=draft_slots,
        mask_kind=kind, mask=mask, mask_indptr=mask_indptr, scale=float(scale), latent_dim=latent, max_q=max_q,
        max_prefix=max_prefix, out=out, lse=lse, chunk=chunk)
    if check_values if check_values is not None else q.device.type == "cpu":
        check_problem_values(problem)
    return problem


def check_problem_values(p: Problem) -> None:
    """Looks inside the index tensors: order, lengths, ranges. Waits for the device when they are on one.

    Raises:
        InputError: naming the tensor, the stream and the value.
    """
    qo, kv, prefix = (t.tolist() for t in (p.qo_indptr, p.kv_indptr, p.prefix_lens))
    masks = p.mask_indptr.tolist() if p.mask_indptr is not None else None
    if qo[0] < 0 or qo[-1] > p.tokens:
        raise InputError(f"qo_indptr runs from {qo[0]} to {qo[-1]}, but q has {p.tokens} rows; it must stay within them")
    slots = p.kv_pool.shape[0]
    for b in range(p.streams):
        rows, pages = qo[b + 1] - qo[b], -(-prefix[b] // p.page_size)
        if rows < 0:
            raise InputError(f"qo_indptr falls from {qo[b]} to {qo[b + 1]} at stream {b}; it must not decrease")
        if prefix[b] < 0:
            raise InputError(f"prefix_lens[{b}] is {prefix[b]}; an empty prefix is 0")
        if rows > p.max_q:
            raise InputError(f"stream {b} has {rows} queries, over max_q={p.max_q}; raise max_q")
        if prefix[b] > p.max_prefix:
            raise InputError(f"prefix_lens[{b}] is {prefix[b]}, over max_prefix={p.max_prefix}; raise max_prefix")
        if rows == 0:
            continue
        if pages and (kv[b] < 0 or kv[b] + pages > min(kv[b + 1], p.kv_indices.shape[0])):
            raise InputError(f"stream {b} needs {pages} pages of {p.page_size} for its prefix of {prefix[b]}, but "
                             f"kv_indptr gives it {kv[b]}..{kv[b + 1]} of {p.kv_indices.shape[0]} kv_indices")
        _check_slots(f"kv_indices of stream {b}", p.kv_indices[kv[b]:kv[b] + pages], slots // p.page_size,
                     prefix[b] % p.page_size, slots, p.page_size)
        if masks is not None:
            need = rows * (rows + (prefix[b] if p.mask_kind is Mask.FULL else 0))
            if masks[b] < 0 or masks[b] + need > p.mask.numel() or (masks[b + 1] - masks[b] != need):
                raise InputError(f"stream {b} needs {need} mask elements ({p.mask_kind.name} layout), but mask_indptr gives "
                                 f"{masks[b]}..{masks[b + 1]} of {p.mask.numel()}; see masks.full_indptr")
    if p.draft_slots is not None and qo[-1] > qo[0]:
        _check_slots("draft_slots", p.draft_slots[qo[0]:qo[-1]], slots, 0, slots, 1)


def _check_slots(what: str, pages: Tensor, whole: int, tail: int, slots: int, page_size: int) -> None:
    if pages.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(pages))
    partial_last = tail and int(pages[-1]) == whole and whole * page_size + tail <= slots
    if low < 0 or (high >= whole and not (partial_last and int((pages >= whole).sum()) == 1)):
        raise InputError(f"{what} run from {low} to {high}, but kv_pool has {slots} rows, pages 0..{whole - 1} of "
                         f"{page_size}; entries that are read must be within them")


def _check_q_and_pool(q: Tensor, kv_pool: Tensor, page_size: int) -> None:
    if q.dim() != 3:
        raise InputError(f"q has shape {tuple(q.shape)}; give [tokens, heads, latent + rope]")
    if q.dtype not in DTYPES:
        raise InputError(f"q is {q.dtype}; give float32, bfloat16 or float16")
    if not q.is_contiguous():
        raise InputError("q is not contiguous; call q.contiguous()")
    if kv_pool.dim() == 3 and kv_pool.shape[1] != 1:
        raise InputError(f"kv_pool has {kv_pool.shape[1]} KV heads; MLA has one: give [slots, row] or [slots, 1, row]")
    if page_size < 1:
        raise InputError(f"page_size is {page_size}; it must be at least 1")


def _latent(q: Tensor, out: Tensor | None, latent_dim: int | None) -> int:
    row = q.shape[2]
    if latent_dim is None:
        latent_dim = out.shape[-1] if out is not None else 512 if row == 576 else row - 16
    if not 1 <= latent_dim <= row:
        raise InputError(f"latent_dim is {latent_dim} for KV rows of {row}; give 1..{row}")
    return latent_dim


def _rows(tensor: Tensor, q: Tensor, name: str) -> Tensor:
    """The tensor as [rows, row] with unit stride along a row, or an error that says what to change."""
    if tensor.dim() == 3 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.dim() != 2 or tensor.shape[1] != q.shape[2]:
        raise InputError(f"{name} has shape {tuple(tensor.shape)}; rows must have q's {q.shape[2]} elements")
    if tensor.dtype != q.dtype:
        raise InputError(f"{name} is {tensor.dtype} but q is {q.dtype}; convert one of them")
    if tensor.device != q.device:
        raise InputError(f"{name} is on {tensor.device} but q on {q.device}; move one of them")
    if tensor.stride(1) != 1 or (tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]):
        raise InputError(f"{name} has strides {tensor.stride()}; the elements of a row must be adjacent and rows must not overlap")
    return tensor


def _check_indices(q: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, prefix_lens: Tensor) -> int:
    streams = prefix_lens.shape[0] if prefix_lens.dim() == 1 else -1
    named = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "prefix_lens": prefix_lens}
    for name, tensor in named.items():
        _check_index(name, tensor, q)
    for name in ("qo_indptr", "kv_indptr"):
        if named[name].shape[0] != streams + 1:
            raise InputError(f"{name} has {named[name].shape[0]} elements, prefix_lens {streams}; {name} needs {streams + 1}")
    return streams


def _check_index(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.dim() != 1:
        raise InputError(f"{name} has shape {tuple(tensor.shape)}; it must have one dimension")
    if tensor.dtype not in _INTS:
        raise InputError(f"{name} is {tensor.dtype}; give int32 or int64")
    if tensor.device != q.device:
        raise InputError(f"{name} is on {tensor.device} but q on {q.device}; move it")
    if not tensor.is_contiguous():
        raise InputError(f"{name} is not contiguous; call {name}.contiguous()")


def _draft(q: Tensor, draft_kv: Tensor | None, draft_slots: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if (draft_kv is None) == (draft_slots is None):
        raise InputError("give exactly one of draft_kv (rows beside the pool) and draft_slots (rows in the pool)")
    if draft_kv is not None:
        draft_kv = _rows(draft_kv, q, "draft_kv")
        if draft_kv.shape[0] < q.shape[0]:
            raise InputError(f"draft_kv has {draft_kv.shape[0]} rows, q {q.shape[0]}; there is one draft row a query")
        return draft_kv, None
    _check_index("draft_slots", draft_slots, q)
    if draft_slots.shape[0] < q.shape[0]:
        raise InputError(f"draft_slots has {draft_slots.shape[0]} elements, q {q.shape[0]} rows; there is one draft row a query")
    return None, draft_slots


def _mask_kind(q: Tensor, mask: Tensor | None, mask_indptr: Tensor | None, layout: str) -> Mask:
    layouts = ("auto", "bits", "qlen", "full")
    if layout not in layouts:
        raise InputError(f"mask_layout is {layout!r}; give one of {', '.join(layouts)}")
    if mask is None:
        if layout != "auto" or mask_indptr is not None:
            raise InputError("mask is missing though mask_layout or mask_indptr is given; give it, or neither for a chain")
        return Mask.CAUSAL
    if mask.device != q.device:
        raise InputError(f"mask is on {mask.device} but q on {q.device}; move it")
    if not mask.is_contiguous():
        raise InputError("mask is not contiguous; call mask.contiguous()")
    if mask.dtype in (torch.int32, torch.uint32):
        if layout not in ("auto", "bits") or mask.dim() != 2 or mask.shape[0] < q.shape[0]:
            raise InputError(f"mask is {mask.dtype} {tuple(mask.shape)}: as bits it must be [{q.shape[0]}, words]; "
                             "a byte mask must be bool or uint8")
        if mask_indptr is not None:
            raise InputError("mask is int32 bits, which need no mask_indptr; leave it out, or give a flat bool or uint8 mask")
        return Mask.BITS
    if mask.dtype not in (torch.bool, torch.uint8):
        raise InputError(f"mask is {mask.dtype}; give bool or uint8, or int32 words of bits (see masks.pack_bits)")
    if layout == "bits":
        raise InputError(f"mask is {mask.dtype} but mask_layout says bits; give int32 words (see masks.pack_bits)")
    if mask.dim() != 1:
        if layout == "full" or mask_indptr is not None:
            raise InputError(f"mask of shape {tuple(mask.shape)} is q×q; mask_layout='full' and mask_indptr belong to a flat mask: flatten it, "
                             "or give [streams, q, q] alone")
        return Mask.QLEN
    if layout == "auto":
        raise InputError(f"a flat mask of {mask.shape[0]} can be read in several ways; say mask_layout='qlen' (q×q a stream) or 'full' "
                         "(q×(prefix + q) a stream)")
    if mask_indptr is None:
        raise InputError(f"a flat mask in {layout.upper()} layout needs mask_indptr (see masks.{'qlen_mask' if layout == 'qlen' else 'full_indptr'})")
    return Mask.FULL if layout == "full" else Mask.QLEN


def _squares(mask: Tensor, streams: int, max_q: int) -> Tensor:
    """A q×q mask as [streams, n, n] with n at least max_q, or an error that says what to change."""
    if mask.dim() == 2 and streams == 1:
        mask = mask[None]
    if mask.dim() != 3 or mask.shape[0] != streams or mask.shape[1] != mask.shape[2]:
        raise InputError(f"mask has shape {tuple(mask.shape)}; as q×q it must be [{streams}, q, q], padded where a stream has fewer queries")
    if mask.shape[1] < max_q:
        raise InputError(f"mask has shape {tuple(mask.shape)}, but a stream has up to {max_q} queries; give [{streams}, {max_q}, {max_q}]")
    return mask


def _bound(name: str, given: int | None, look, q: Tensor) -> int:
    """The bound as given or found, also where the values of the index tensors are not checked: kernels plan on the host by it, as an int32."""
    if given is None and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InputError(f"{name} must be given while a CUDA graph is captured: finding it would wait for the device")
    bound = int(look() if given is None else given)
    if not 0 <= bound < 1 << 31:
        raise InputError(f"{name} is {bound}; it must not be negative nor 2^31 or more" + ("" if given is not None else ": check the index tensors"))
    return bound


def _one_width(*tensors: Tensor | None) -> tuple[int, list[Tensor | None]]:
    """All index tensors in one dtype: int64 as soon as one is (converting copies; callers that care pass one dtype)."""
    wide = any(t is not None and t.dtype == torch.int64 for t in tensors)
    dtype = torch.int64 if wide else torch.int32
    return int(wide), [t if t is None else t.to(dtype) for t in tensors]


def _outputs(q: Tensor, latent: int, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Given outputs checked, missing ones made; made ones start as zeros and -inf, which padding rows keep."""
    shapes = {"out": ((q.shape[0], q.shape[1], latent), q.dtype), "lse": ((q.shape[0], q.shape[1]), torch.float32)}
    for name, tensor in (("out", out), ("lse", lse)):
        shape, dtype = shapes[name]
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != q.device):
            raise InputError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; give {dtype} {shape} on {q.device}")
        if tensor is not None and not tensor.is_contiguous():
            raise InputError(f"{name} is not contiguous; give a contiguous tensor")
    if out is None:
        out = q.new_zeros(shapes["out"][0])
    if lse is None:
        lse = torch.full(shapes["lse"][0], float("-inf"), dtype=torch.float32, device=q.device)
    return out, lse
