"""The answer in float64, written as the definition reads; and the streams of a problem as plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_attn import masks
from verify_attn.problem import Problem


@dataclass(frozen=True)
class Stream:
    """One stream with its KV rows gathered: prefix first, then its draft rows."""

    rows: slice  # of q, out and lse
    q: Tensor  # [q, heads, row]
    kv: Tensor  # [prefix + q, row]
    visible: Tensor  # bool [q, prefix + q]
    prefix: int


def streams(p: Problem) -> Iterator[Stream]:
    """The streams that have queries. Waits for the device."""
    for b in range(p.streams):
        first, last = int(p.qo_indptr[b]), int(p.qo_indptr[b + 1])
        if first == last:
            continue
        prefix = int(p.prefix_lens[b])
        keys = torch.arange(prefix, device=p.q.device)
        pages = p.kv_indices[int(p.kv_indptr[b]) + keys // p.page_size].to(torch.int64)
        slots = pages * p.page_size + keys % p.page_size
        draft = p.draft_kv[first:last] if p.draft_kv is not None else p.kv_pool[p.draft_slots[first:last].to(torch.int64)]
        tree = masks.dense(p, b)
        visible = torch.cat([tree.new_ones(last - first, prefix), tree], dim=1)
        yield Stream(slice(first, last), p.q[first:last], torch.cat([p.kv_pool[slots], draft]), visible, prefix)


def attend(p: Problem) -> tuple[Tensor, Tensor]:
    """Output [tokens, heads, latent] and log-sum-exp [tokens, heads] in float64.

    A key that a row may not see takes no part in its sums, whatever it holds; a NaN or infinity in a KV row makes NaN
    of the rows that see it. Rows that see nothing give 0 and -inf; padding rows likewise.
    """
    out = torch.zeros(p.tokens, p.heads, p.latent_dim, dtype=torch.float64, device=p.q.device)
    lse = torch.full((p.tokens, p.heads), float("-inf"), dtype=torch.float64, device=p.q.device)
    for s in streams(p):
        kv = s.kv.double()
        broken = ~kv.isfinite().all(dim=1)
        scores = torch.einsum("thd,kd->thk", s.q.double(), kv) * p.scale
        scores = torch.where(s.visible[:, None, :], scores, float("-inf"))
        scores = torch.where((s.visible & broken)[:, None, :], float("nan"), scores)
        total = torch.logsumexp(scores, dim=-1)
        weights = torch.where(s.visible[:, None, :], torch.exp(scores - total[..., None]), 0.0)
        nothing = ~s.visible.any(dim=1)
        weights[nothing], total[nothing] = 0.0, float("-inf")
        out[s.rows] = weights @ kv[:, :p.latent_dim].nan_to_num(0.0, 0.0, 0.0)
        lse[s.rows] = total
    return out, lse
