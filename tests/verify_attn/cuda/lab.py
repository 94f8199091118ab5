"""Inputs on the GPU, a float64 reference, and sets of cold KV, for the CUDA tests and benchmark.

Independent of the package's own reference on purpose: two references that agree are worth more than one.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verify_attn import cuda
from verify_attn.problem import Problem, make_problem
from verify_attn.timing import graph_of, time_graphs  # noqa: F401 - part of the lab


@dataclass(frozen=True)
class Shape:
    """A batch: one entry a stream in `q` and `prefix`. `tree`: random, chain, star. `mask`: bits, qlen, full, causal."""

    heads: int
    q: tuple[int, ...]
    prefix: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    page: int = 1
    mask: str = "bits"
    tree: str = "random"
    beside: bool = False  # draft rows beside the pool
    wide: bool = False  # int64 indices
    latent: int = 512
    rope: int = 64
    padding: int = 0  # rows past the last stream
    amplitude: float = 1.0
    equal: bool = False  # all keys alike

    @staticmethod
    def even(heads: int, q: int, streams: int, prefix: int, **more) -> Shape:
        return Shape(heads, (q,) * streams, (prefix,) * streams, **more)

    @property
    def tokens(self) -> int:
        return sum(self.q) + self.padding

    @property
    def key_bytes(self) -> int:
        return sum(p + q for p, q in zip(self.prefix, self.q)) * (self.latent + self.rope) * self.dtype.itemsize

    @property
    def needed_bytes(self) -> int:
        """Every KV row, query and output once."""
        rows = sum(self.q) * self.heads
        return self.key_bytes + rows * (2 * self.latent + self.rope) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        keys = sum(q * (p + q) for p, q in zip(self.prefix, self.q))
        return 2 * self.heads * keys * (2 * self.latent + self.rope)


@dataclass
class Batch:
    """The tensors of a shape, as `make_problem` takes them, and the mask of each stream as bool [q, q]."""

    shape: Shape
    problem: Problem
    masks: list[Tensor]
    keep: list[Tensor] = field(default_factory=list)


def tree_mask(q: int, tree: str, generator: torch.Generator) -> Tensor:
    """Ancestor-or-self mask [q, q] of a tree whose nodes stand in topological order."""
    mask = torch.eye(q, dtype=torch.bool)
    for i in range(1, q):
        parent = {"chain": i - 1, "star": 0}.get(tree)
        if parent is None:
            parent = int(torch.randint(i, (1,), generator=generator))
        mask[i] |= mask[parent]
    return mask


def pack_bits(masks: list[Tensor], tokens: int) -> Tensor:
    words = max(1, -(-max((m.shape[0] for m in masks), default=1) // 32))
    packed = torch.zeros(tokens, words, dtype=torch.int64)
    t = 0
    for mask in masks:
        q = mask.shape[0]
        for j in range(q):
            packed[t:t + q, j // 32] |= mask[:, j].to(torch.int64) << (j % 32)
        t += q
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def make_batch(shape: Shape, seed: int = 0, pool: Tensor | None = None, free_pages: Tensor | None = None, **bounds) -> Batch:
    """Random inputs of a shape. `pool` and `free_pages`: share a pool between batches, taking these pages of it."""
    generator = torch.Generator().manual_seed(seed)
    device = torch.device("cuda")
    row = shape.latent + shape.rope
    pages = [-(-p // shape.page) for p in shape.prefix]
    if pool is None:
        total = sum(pages) + -(-shape.tokens // shape.page) + 3
        pool = random_rows(total * shape.page, row, shape.dtype, seed) * shape.amplitude
        if shape.equal:
            pool[:] = pool[:1]
        free_pages = torch.randperm(total, generator=generator)
    index = torch.int64 if shape.wide else torch.int32
    prefix_pages = free_pages[:sum(pages)].to(index)
    slots = (free_pages[sum(pages):, None] * shape.page + torch.arange(shape.page)).reshape(-1)
    slots = slots[torch.randperm(slots.numel(), generator=generator)[:shape.tokens]].to(device)
    masks = [tree_mask(q, "chain" if shape.mask == "causal" else shape.tree, generator) for q in shape.q]
    mask, indptr, layout = _mask(shape, masks, index)
    draft = dict(draft_kv=pool[slots].contiguous()) if shape.beside else dict(draft_slots=slots.to(index))
    q = random_rows(shape.tokens * shape.heads, row, shape.dtype, seed + 1).view(shape.tokens, shape.heads, row) * shape.amplitude
    out = torch.empty(shape.tokens, shape.heads, shape.latent, dtype=shape.dtype, device=device)
    lse = torch.empty(shape.tokens, shape.heads, dtype=torch.float32, device=device)
    problem = make_problem(
        q, pool, qo_indptr=_indptr(shape.q, index), kv_indptr=_indptr(pages, index), kv_indices=prefix_pages.to(device),
        prefix_lens=torch.tensor(shape.prefix, dtype=torch.int32, device=device), scale=(192 ** -0.5), page_size=shape.page,
        mask=mask, mask_indptr=indptr, mask_layout=layout, latent_dim=shape.latent, out=out, lse=lse,
        **{"max_q": max(shape.q, default=0), "max_prefix": max(shape.prefix, default=0), **bounds}, **draft)
    poison(problem)
    return Batch(shape, problem, [m.to(device) for m in masks])


def random_rows(rows: int, row: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    out = torch.empty(rows, row, dtype=dtype, device="cuda")
    for start in range(0, rows, 1 << 20):
        part = out[start:start + (1 << 20)]
        part.copy_(torch.randn(part.shape, generator=generator, device="cuda"))
    return out


def poison(problem: Problem) -> None:
    problem.out.fill_(math.nan)
    problem.lse.fill_(math.nan)


def _indptr(lengths, dtype) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0], dtype=dtype, device="cuda")


def _mask(shape: Shape, masks: list[Tensor], index: torch.dtype):
    if shape.mask == "causal":
        return None, None, "auto"
    if shape.mask == "bits":
        return pack_bits(masks, shape.tokens).cuda(), None, "bits"
    full = shape.mask == "full"
    parts = [torch.cat([torch.ones(m.shape[0], p if full else 0, dtype=torch.bool), m], 1).reshape(-1)
             for m, p in zip(masks, shape.prefix)]
    indptr = _indptr([part.numel() for part in parts], index)
    return torch.cat(parts).to(torch.uint8).cuda(), indptr, shape.mask


def key_rows(batch: Batch, b: int) -> Tensor:
    """KV rows [keys, row] of stream b in order, prefix first."""
    p, shape = batch.problem, batch.shape
    k = torch.arange(shape.prefix[b], device="cuda")
    pages = p.kv_indices[int(p.kv_indptr[b]) + k // shape.page].long()
    first, q = sum(shape.q[:b]), shape.q[b]
    draft = p.draft_kv[first:first + q] if shape.beside else p.kv_pool[p.draft_slots[first:first + q].long()]
    return torch.cat([p.kv_pool[pages * shape.page + k % shape.page], draft])


def reference(batch: Batch, streams: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """out [tokens, heads, latent] and lse in float64 of these streams (default all); NaN in all other rows."""
    p, shape = batch.problem, batch.shape
    out = torch.full(p.out.shape, math.nan, dtype=torch.float64, device="cuda")
    lse = torch.full(p.lse.shape, math.nan, dtype=torch.float64, device="cuda")
    first = 0
    for b, q in enumerate(shape.q):
        if q and (streams is None or b in streams):
            rows = key_rows(batch, b).double()
            scores = torch.einsum("qhd,kd->qhk", p.q[first:first + q].double(), rows) * p.scale
            scores[:, :, shape.prefix[b]:].masked_fill_(~batch.masks[b][:, None, :], -math.inf)
            lse[first:first + q] = torch.logsumexp(scores, -1)
            out[first:first + q] = torch.softmax(scores, -1) @ rows[:, :shape.latent]
        first += q
    return out, lse


@dataclass(frozen=True)
class Verdict:
    """Errors of one run against the reference; `why` is empty when all is well."""

    error: float
    lse_error: float
    why: str


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 1e-3}


def judge(batch: Batch, expected: tuple[Tensor, Tensor], streams: list[int] | None = None, *, lse: bool = True) -> Verdict:
    """Relative Frobenius error over the rows of these streams (default all), worst lse difference, untouched padding rows."""
    p, shape = batch.problem, batch.shape
    live = sum(shape.q)
    starts = [sum(shape.q[:b]) for b in range(len(shape.q))]
    rows = torch.cat([torch.arange(starts[b], starts[b] + shape.q[b]) for b in (range(len(shape.q)) if streams is None else streams)]).cuda()
    error = float((p.out[rows].double() - expected[0][rows]).norm() / expected[0][rows].norm())
    lse_error = float((p.lse[rows].double() - expected[1][rows]).abs().max()) if lse else 0.0
    limit, why = TOLERANCE[p.q.dtype], []
    if not error <= limit:
        why.append(f"error {error:.2e} over {limit:.0e}")
    if not lse_error <= 2e-3:
        why.append(f"lse off by {lse_error:.2e}")
    if not bool(p.out[live:].isnan().all()) or not bool(p.lse[live:].isnan().all()):
        why.append("padding rows were written")
    return Verdict(error, lse_error, ", ".join(why))


def try_variant(batch: Batch, variant: str, expected: tuple[Tensor, Tensor], *, num_splits: int = 0) -> Verdict | str:
    """Poison, run, judge, run again and compare bits. A text is the variant's refusal."""
    p = batch.problem
    reason = cuda.refuse(variant, p)
    if reason:
        return reason
    workspace = cuda.make_workspace(p, variant, num_splits=num_splits)
    poison(p)
    cuda.run(p, variant, num_splits=num_splits, workspace=workspace)
    verdict = judge(batch, expected)
    first = p.out.clone(), p.lse.clone()
    poison(p)
    cuda.run(p, variant, num_splits=num_splits, workspace=workspace)
    same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, (p.out, p.lse)))
    return verdict if same else dataclasses.replace(verdict, why=(verdict.why + " rerun differs").strip())


class ColdSets:
    """Batches of one shape over disjoint KV rows of one pool, together well past the L2, so that every call finds it cold."""

    def __init__(self, shape: Shape, *, seed: int = 0, cold_bytes: int = 200 << 20, most: int = 200) -> None:
        count = max(2, min(most, -(-cold_bytes // max(shape.key_bytes, 1))))
        each = sum(-(-p // shape.page) for p in shape.prefix) + -(-shape.tokens // shape.page)
        pool = random_rows(count * each * shape.page, shape.latent + shape.rope, shape.dtype, seed)
        order = torch.randperm(count * each, generator=torch.Generator().manual_seed(seed))
        self.batches = [make_batch(shape, seed + i, pool, order[i * each:(i + 1) * each]) for i in range(count)]
        self.bytes = pool.numel() * pool.element_size()
