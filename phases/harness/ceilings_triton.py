"""Triton kernels that only read: what a GPU's memory gives to streams and to random 1152-byte rows.

Each program reads its share with 16-byte loads in flight and writes one number, so that nothing is optimised away.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROW = 576  # bfloat16 elements of a row: 512 latent + 64 rope, 1152 bytes
_BLOCK = 8192  # elements a program reads at a time
_ROWS = 16  # rows a program reads at a time


@triton.jit
def _read(source, sink, per_program, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * per_program
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for offset in range(0, per_program, BLOCK):
        total += tl.load(source + start + offset + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(sink + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _gather(source, order, sink, per_program, ROW: tl.constexpr, ROWS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * per_program
    latent = tl.zeros([ROWS, 512], dtype=tl.float32)
    rope = tl.zeros([ROWS, 64], dtype=tl.float32)
    for offset in range(0, per_program, ROWS):
        rows = tl.load(order + start + offset + tl.arange(0, ROWS)).to(tl.int64)[:, None] * ROW
        latent += tl.load(source + rows + tl.arange(0, 512)[None, :]).to(tl.float32)
        rope += tl.load(source + rows + 512 + tl.arange(0, 64)[None, :]).to(tl.float32)
    tl.store(sink + tl.program_id(0), tl.sum(tl.sum(latent, axis=1), axis=0) + tl.sum(tl.sum(rope, axis=1), axis=0))


def read_once(source: torch.Tensor, sink: torch.Tensor, warps: int) -> None:
    """Read a bfloat16 tensor whose length is programs x a multiple of 8192; `sink` float32 [programs]."""
    programs = sink.numel()
    _read[(programs,)](source, sink, source.numel() // programs, BLOCK=_BLOCK, num_warps=warps)


def gather_once(source: torch.Tensor, order: torch.Tensor, sink: torch.Tensor, warps: int) -> None:
    """Read row order[k] of `source` (bfloat16 [rows, 576]) for every k; len(order) is programs x a multiple of 16."""
    programs = sink.numel()
    _gather[(programs,)](source, order, sink, order.numel() // programs, ROW=ROW, ROWS=_ROWS, num_warps=warps)
