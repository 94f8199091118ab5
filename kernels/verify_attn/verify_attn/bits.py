"""Tree masks as bits: bit j % 32 of word j // 32 in row t says whether t sees draft row j of its stream."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_rows(seen: Tensor) -> Tensor:
    """int32 [rows, words] of bool or uint8 [rows, columns]; at least one word a row."""
    rows, columns = seen.shape
    words = max(1, -(-columns // 32))
    dense = torch.zeros(rows, words * 32, dtype=torch.int64, device=seen.device)
    dense[:, :columns] = seen.ne(0)
    weights = torch.ones(32, dtype=torch.int64, device=seen.device) << torch.arange(32, device=seen.device)
    value = (dense.view(rows, words, 32) * weights).sum(-1)
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)


def bits_of_squares(squares: Tensor, qo_indptr: Tensor, tokens: int) -> Tensor:
    """int32 [tokens, words] of bool or uint8 masks [streams, n, n], of which stream b means its first q_b rows and columns.

    What is behind those is in bits that nobody reads. Everything is done on the masks' device, without waiting for it.
    """
    streams, n, _ = squares.shape
    if streams == 0 or n == 0:
        return torch.zeros(tokens, 1, dtype=torch.int32, device=squares.device)
    token = torch.arange(tokens, device=squares.device)
    starts = qo_indptr.to(torch.int64)
    stream = (torch.searchsorted(starts, token, right=True) - 1).clamp(0, streams - 1)
    return pack_rows(squares[stream, (token - starts[stream]).clamp(0, n - 1)])
