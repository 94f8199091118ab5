"""The `sgl_kernel` functions that SGLang's CPU engine imports at start, in plain torch.

The compiled `sgl_kernel` needs CUDA, yet SGLang 0.5.23 imports nine of its functions on the CPU engine (and one more for
NGRAM speculation, see `speculative`). Provisioning copies this package into the serving environment under the name
`sgl_kernel`. Each function keeps the documented meaning of its GPU twin in `sglang.kernels.ops`: ragged copies between
the request-to-token table and slot lists, the draft tree of EAGLE (Li et al. 2024, EAGLE-2), and its greedy verification.

Names and argument order are SGLang's. Integer tensors may be int32 or int64; outputs are written in place.
"""

from __future__ import annotations

import ctypes

import torch

from .tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "0.0.1+cpu"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move KV rows `src_loc` to rows `tgt_loc` in every buffer, as if all were read before any is written.

    Args:
        data_ptrs: [buffers] addresses of row-major buffers.
        strides: [buffers] bytes of one row of each.
        tgt_loc, src_loc: [rows] row numbers; the two sets may overlap.
    """
    rows = tgt_loc.numel()
    if not rows:
        return
    target, source = tgt_loc.long(), src_loc.long()
    extent = int(torch.maximum(target.max(), source.max())) + 1
    for address, width in zip(data_ptrs.tolist(), strides.tolist()):
        raw = (ctypes.c_uint8 * (extent * width)).from_address(address)
        buffer = torch.frombuffer(raw, dtype=torch.uint8).view(extent, width)
        buffer[target] = buffer[source]  # the right side is a copy


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the slots of new tokens into the table: req_to_token[r, start:end] = the next end-start of `out_cache_loc`."""
    rows, columns = _ragged(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The inverse: read req_to_token[r, start:end] of every request into `out_cache_loc`, one after another."""
    rows, columns = _ragged(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Read the topk * steps draft slots that follow each request's `seq_lens` tokens."""
    width = topk * speculative_num_steps
    columns = seq_lens.long()[:, None] + torch.arange(width)
    slots = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc.view(-1)[: slots.numel()] = slots.reshape(-1).to(out_cache_loc.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request: accept_tokens[b * stride + accept_lens[b] - 1]."""
    requests = accept_lens.numel()
    index = torch.arange(requests) * accept_stride + accept_lens.reshape(-1).long() - 1
    bonus_tokens[:requests] = accept_tokens.reshape(-1)[index].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Slots of the accepted draft rows, packed to the front: entries of `accept_index` that are -1 are skipped."""
    index = accept_index.reshape(-1)
    index = index[index >= 0].long()
    accept_out_cache_loc[: index.numel()] = out_cache_loc[index]


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one and put its new token last (or at `select_index`)."""
    new_tokens = topk_index.reshape(-1)
    for row, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist())):
        if length <= 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index[row])
        input_ids[last] = new_tokens[row].to(input_ids.dtype)


def _ragged(requests: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every table entry in the requests' [start, end) ranges, request after request."""
    start, lengths = start.long(), (end - start).long()
    first = lengths.cumsum(0) - lengths
    rows = torch.repeat_interleave(requests.long(), lengths)
    columns = torch.arange(rows.numel()) + torch.repeat_interleave(start - first, lengths)
    return rows, columns
