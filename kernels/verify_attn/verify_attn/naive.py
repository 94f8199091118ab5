"""Two variants in plain torch, for any device.

`naive` is the baseline: a score row a query and head, as the CUDA `naive` kernel does it, so the stream's KV is read twice for
every one of them. `torch_gemm` is the best plain torch does: the heads and queries of a stream as the rows of two
matrix products, all scores in memory between them. A speedup over the first says what the algorithm is worth, one over
the second what is left when the algorithm is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verify_attn.problem import Problem
from verify_attn.reference import Stream, streams


def naive(p: Problem) -> None:
    """Fills p.out and p.lse: for each query and head its score row, the softmax of it, the weighted sum."""
    for s in streams(p):
        kv = s.kv.float()
        broken = _take_broken(s, kv)
        value = kv[:, :p.latent_dim]
        for t in range(s.q.shape[0]):
            hidden = ~s.visible[t]
            for h in range(p.heads):
                scores = (kv @ s.q[t, h].float()).mul_(p.scale)
                scores[s.prefix:].masked_fill_(broken, float("nan"))
                scores.masked_fill_(hidden, float("-inf"))
                total = torch.logsumexp(scores, dim=0)
                base = torch.where(total == float("-inf"), 0.0, total)  # a row that sees nothing
                p.out[s.rows.start + t, h] = (torch.exp(scores - base) @ value).to(p.out.dtype)
                p.lse[s.rows.start + t, h] = total


def torch_gemm(p: Problem) -> None:
    """Fills p.out and p.lse: two matrix products a stream."""
    for s in streams(p):
        rows = s.q.reshape(-1, s.q.shape[2]).float()
        kv = s.kv.float()
        broken = _take_broken(s, kv)
        scores = (rows @ kv.T).mul_(p.scale).view(-1, p.heads, kv.shape[0])
        scores[:, :, s.prefix:].masked_fill_(broken, float("nan"))
        hidden = ~s.visible[:, s.prefix:]
        scores[:, :, s.prefix:].masked_fill_(hidden[:, None, :], float("-inf"))
        _write_all(p, s, scores, kv[:, :p.latent_dim])


def _take_broken(s: Stream, kv: Tensor) -> Tensor:
    """Bool [q]: draft rows with NaN or infinity, which become zeros in `kv`. Their weight is NaN where they are seen, and 0 * NaN must not be where not."""
    draft = kv[s.prefix:]
    broken = ~draft.isfinite().all(dim=1)
    draft.masked_fill_(broken[:, None], 0.0)
    return broken


def _write_all(p: Problem, s: Stream, scores: Tensor, value: Tensor) -> None:
    top = scores.amax(dim=-1, keepdim=True)
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = weights.view(-1, scores.shape[-1]) @ value
    out = out.view(-1, p.heads, p.latent_dim) / torch.where(total == 0, 1.0, total)
    p.out[s.rows] = out.to(p.out.dtype)
    p.lse[s.rows] = (top + total.log())[..., 0]
