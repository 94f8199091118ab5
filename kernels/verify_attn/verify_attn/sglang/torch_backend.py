"""Plain torch attention for MLA models on SGLang's CPU engine: all forward modes, trees included.

SGLang's own `torch_native` backend fails on tree verify and reads MLA's pool wrongly in prefill, so a CPU server under tree
speculation needs this one. It is the incumbent of local playbooks and everything but tree verify of our CPU backend.

A forward is cut into `Segment`s once, in `init_forward_metadata`; every layer then attends segment by segment in MLA's
absorbed form: the rows of the latent pool are key (all of a row) and value (its latent part) at once, for all heads. Only
prefill without a cached prefix comes in the expanded form, with keys and values a head, since SGLang chooses so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verify_attn.sglang import publish
from verify_attn.sglang.facts import Counters
from verify_attn.sglang.identity import announce

QUERY_BLOCK = 256  # query rows at a time, which bounds the score matrix


@dataclass(frozen=True)
class Segment:
    """Consecutive query rows and the pool slots they attend to.

    Attributes:
        first, last: query rows [first, last).
        slots: [keys] int64.
        causal_from: query row i sees the first causal_from + i + 1 keys; None: all keys, or as `tree` says.
        tree: [rows, n] bool, which of the last n keys each query row sees, beside all keys before them.
    """

    first: int
    last: int
    slots: Tensor
    causal_from: int | None = None
    tree: Tensor | None = None


class TorchBackend(AttentionBackend):
    """Attention of one model runner, target or draft.

    Args:
        runner: SGLang's ModelRunner.
        name: backend name it was registered under.
        announces: whether it writes facts; the target's does, the draft's helpers do not.
    """

    def __init__(self, runner, name: str, announces: bool = True) -> None:
        super().__init__()
        self.name = name
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.is_draft = bool(runner.is_draft_worker)
        self.counters = Counters()
        self.segments: list[Segment] = []
        self.verifying = False
        self.announcement = None
        if announces and not self.is_draft:
            self.announcement = announce(self, runner)
            publish.add(self)

    def support_triton(self) -> bool:
        return False

    def facts(self) -> dict:
        return self.announcement.snapshot()

    def variant(self) -> str:
        """Kernel variant that serves tree verify; the engine's plain torch here."""
        return "torch"

    def build(self) -> str:
        """Digest of the compiled object in use; none here."""
        return ""

    def choice(self) -> str:
        return "incumbent"

    def hot(self) -> dict:
        """The `hot` entry of its facts; there is nothing to switch here."""
        return {"able": False, "reason": f"{self.name} has no candidate", "choice": self.choice()}

    def init_forward_metadata(self, forward_batch) -> None:
        """Cut the batch into segments; once a forward."""
        mode = forward_batch.forward_mode
        self.counters.forwards += 1
        self.verifying = mode.is_target_verify()
        if mode.is_idle():
            self.segments = []
            return
        table = self.req_to_token_pool.req_to_token
        requests = list(zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()))
        if mode.is_decode():
            self.segments = [Segment(i, i + 1, table[row, :length].long()) for i, (row, length) in enumerate(requests)]
        elif self.verifying:
            self.counters.verify_forwards += 1
            self.segments = _verify_segments(requests, table, forward_batch.spec_info)
        else:
            self.segments = _extend_segments(requests, table, forward_batch.extend_seq_lens.tolist())

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **unused) -> Tensor:
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **unused) -> Tensor:
        """Attend after the new rows are in the pool.

        Args:
            q: [rows, heads * (latent + rope)], absorbed; or [rows, heads * head size], expanded.
            k, v: absorbed: [rows, 1, latent + rope] and [rows, 1, latent], the rows to write first; expanded: [rows, heads,
                head size], already written by the model in their latent form.
        Returns:
            [rows, heads * latent], or [rows, heads * value size].
        """
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if layer.tp_k_head_num > 1:
            k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_k_head_num, layer.v_head_dim)
            self.attend_expanded(q, k, v, layer.scaling, out)
            return out.view(q.shape[0], -1)
        pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if self.verifying:
            started = time.perf_counter()
            self.verify(q, pool, layer, forward_batch, out)
            self.counters.verify_seconds += time.perf_counter() - started
        else:
            self.attend(q, pool, layer.scaling, out)
        return out.view(q.shape[0], -1)

    def verify(self, q: Tensor, pool: Tensor, layer, forward_batch, out: Tensor) -> None:
        """Tree verify of one layer: the part a candidate replaces."""
        self.counters.incumbent_calls += 1
        self.attend(q, pool, layer.scaling, out)

    def attend(self, q: Tensor, pool: Tensor, scale: float, out: Tensor) -> None:
        for segment in self.segments:
            rows = pool[segment.slots, 0].to(q.dtype)
            for first in range(segment.first, segment.last, QUERY_BLOCK):
                last = min(first + QUERY_BLOCK, segment.last)
                keys = rows if segment.causal_from is None else rows[: segment.causal_from + last - segment.first]
                visible = _visible(segment, first, last, keys.shape[0])
                out[first:last] = _attention(q[first:last], keys, scale, out.shape[-1], visible)

    def attend_expanded(self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
        """Causal attention of each request's new tokens among themselves; there is no prefix."""
        for segment in self.segments:
            part = slice(segment.first, segment.last)
            heads_first = (tensor[part].transpose(0, 1)[None] for tensor in (q, k, v))
            attended = scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale)
            out[part] = attended[0].transpose(0, 1)


class TorchDraftDecode:
    """Multi-step top-k draft decoding on the CPU: one backend a step.

    At step s, candidate t of a request sees the committed prefix and its own s + 1 draft slots, which SGLang lays out at
    req_to_token[request, length + t * steps :].
    """

    def __init__(self, runner, name: str, topk: int, steps: int) -> None:
        self.topk, self.steps = topk, steps
        self.attn_backends = [TorchBackend(runner, name, announces=False) for _ in range(steps - 1)]

    def init_forward_metadata(self, forward_batch) -> None:
        table = self.attn_backends[0].req_to_token_pool.req_to_token
        requests = list(zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()))
        for step, backend in enumerate(self.attn_backends):
            own = torch.eye(self.topk, dtype=torch.bool).repeat_interleave(step + 1, 1)  # candidate t sees its own slots
            segments = []
            for i, (row, length) in enumerate(requests):
                starts = range(length, length + self.topk * self.steps, self.steps)
                slots = torch.cat([table[row, :length], *(table[row, start : start + step + 1] for start in starts)])
                segments.append(Segment(i * self.topk, (i + 1) * self.topk, slots.long(), tree=own))
            backend.segments = segments


def _verify_segments(requests: list[tuple[int, int]], table: Tensor, spec) -> list[Segment]:
    n = spec.draft_token_num
    trees = None
    if spec.custom_mask is not None:  # the CPU engine builds QLEN_ONLY masks: [requests, n, n]
        trees = spec.custom_mask.view(-1)[: len(requests) * n * n].view(len(requests), n, n).bool()
    segments = []
    for i, (row, length) in enumerate(requests):
        slots = table[row, : length + n].long()
        tree = None if trees is None else trees[i]
        segments.append(Segment(i * n, (i + 1) * n, slots, causal_from=None if tree is not None else length, tree=tree))
    return segments


def _extend_segments(requests: list[tuple[int, int]], table: Tensor, new: list[int]) -> list[Segment]:
    """Prefill, chunks of it, and draft extend: the last `new` of a request's `length` tokens are the queries."""
    segments, first = [], 0
    for (row, length), count in zip(requests, new):
        segments.append(Segment(first, first + count, table[row, :length].long(), causal_from=length - count))
        first += count
    return segments


def _visible(segment: Segment, first: int, last: int, keys: int) -> Tensor | None:
    """[last - first, keys] bool, or None when every row sees every key."""
    begin, end = first - segment.first, last - segment.first
    if segment.tree is not None:
        prefix = torch.ones(end - begin, keys - segment.tree.shape[1], dtype=torch.bool)
        return torch.cat([prefix, segment.tree[begin:end]], 1)
    if segment.causal_from is None:
        return None
    return torch.arange(keys) <= segment.causal_from + torch.arange(begin, end)[:, None]


def _attention(q: Tensor, rows: Tensor, scale: float, latent: int, visible: Tensor | None) -> Tensor:
    """q [n, heads, row], rows [keys, row] -> [n, heads, latent]; all heads in one product, since they share the keys."""
    n, heads, width = q.shape
    scores = (q.reshape(n * heads, width) @ rows.T).view(n, heads, -1).float() * scale
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, :], float("-inf"))
    weights = torch.softmax(scores, -1).to(rows.dtype)
    return (weights.view(n * heads, -1) @ rows[:, :latent]).view(n, heads, latent)
