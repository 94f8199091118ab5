"""The CUDA candidate: SGLang's Triton backend with its tree-verify kernel replaced.

`TritonAttnBackend.forward_extend` writes the new KV rows and then calls the instance attribute `extend_attention_fwd` with
the same positional arguments in every SGLang version this was built for (0.5.17 to 0.5.23), eagerly and under CUDA graphs.
We replace that attribute. Everything but tree verify goes on to SGLang's kernel.

Under CUDA graphs Python runs once, at capture; so nothing here allocates or waits then, what depends on the batch is
computed on the device, and use is counted on the device. How the control byte reaches captured graphs is in `graphs`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from torch import Tensor

from verify_attn import cuda
from verify_attn.build import Built
from verify_attn.problem import Problem, make_problem
from verify_attn.sglang import NAME, graphs, publish
from verify_attn.sglang.control import CANDIDATE, Control
from verify_attn.sglang.facts import INTERVAL, Counters
from verify_attn.sglang.graphs import Way
from verify_attn.sglang.identity import announce, hot_facts
from verify_attn.sglang.objects import cuda_object, from_release
from verify_attn.sglang.shadow import Shadow

log = logging.getLogger(__name__)
LATCH = "_verify_attn_decided"  # what was decided for a batch, kept on it: it is planned first and run later
# Keyword arguments of the seam that ask for something our kernels do not do; the values that do not ask.
PLAIN = {"logit_cap": 0, "sliding_window_size": -1, "sinks": None, "xai_temperature_len": -1, "score_mod": None}


@dataclass(frozen=True)
class Plan:
    """What runs one batch shape: chosen once, since shapes repeat."""

    variant: str
    splits: int
    workspace: Tensor
    lse: Tensor  # [tokens, heads]; SGLang does not ask for it, the kernels write it


class CudaBackend(TritonAttnBackend):
    """SGLang attention backend `verify_attn` on CUDA, for the target model."""

    def __init__(self, runner, *arguments, **options) -> None:
        super().__init__(runner, *arguments, **options)
        self.name = NAME
        self.control = Control.from_environment()
        self.shadow = Shadow.from_environment(self.control)
        self.graphs = graphs.of_server(runner, self.control)
        if self.shadow.rate and self.graphs.captures and not self.graphs.alone:
            log.warning("verify_attn: the shadow is off: under CUDA graphs a rank of several cannot run a step eagerly by itself")
            self.shadow.rate = 0.0
        self.runner = runner
        self.use, self.shadowing = True, False  # of the forward that runs now: our kernel; compared with the engine's
        self.planned: tuple[bool, bool] | None = None  # the same of an eager step on its way: SGLang runs it on a copy of its batch
        self.counters = Counters()
        self.engine_attention, self.extend_attention_fwd = self.extend_attention_fwd, self._attention
        self.first_layer = self.token_to_kv_pool.start_layer
        self.layers = runner.model_config.num_hidden_layers
        self.layer = -1
        self.verifying = False
        requests = runner.req_to_token_pool.size
        # Written at the first layer of every verify forward, captured or not; addresses must not change.
        self.kv_indptr64 = torch.zeros(requests + 1, dtype=torch.int64, device=self.device)
        self.qo_indptr64 = torch.zeros(requests + 1, dtype=torch.int64, device=self.device)
        self.prefix_lens = torch.zeros(requests, dtype=torch.int32, device=self.device)
        self.count = torch.zeros(2, dtype=torch.int64, device=self.device)  # verify forwards of our kernel, of the engine's
        self.count_on_host = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self.counted_at = 0.0
        self.warming = True  # until the first forward after the captures, whose warm-up is not counted
        self.plans: dict[tuple[int, int], Plan] = {}
        self.workspaces: dict[str, list[Tensor]] = {}
        self.probed_variant = "none"
        self.object = self._probe()
        self.announcement = announce(self, runner)
        publish.add(self)

    # ---- what it says about itself ----

    def facts(self) -> dict:
        """Exact: asks the device, so only between forwards."""
        self.count_on_host.copy_(self.count)
        self._take_count()
        return self.announcement.snapshot()

    def variant(self) -> str:
        used = dict.fromkeys(plan.variant for plan in self.plans.values())
        return ", ".join(used) or self.probed_variant

    def build(self) -> str:
        return self.object.sha256 if self.object else ""

    def choice(self) -> str:
        return self.control.choice if not self._fixed() else CANDIDATE

    def hot(self) -> dict:
        reason = self._fixed()
        found = {**hot_facts(self.control, reason), "graphs": self.graphs.facts()}
        return {**found, "choice": CANDIDATE} if reason else found

    def _fixed(self) -> str:
        """Why captured graphs keep the candidate whatever the control says, or ""."""
        reason = self.graphs.reason
        if not self.control.path:  # nothing to follow; its shadow, if it has one, is hooked by itself
            return reason
        if not reason and self.graphs.captures and (missing := graphs.missing_hook(self.graphs.way)):
            reason = f"this SGLang has no {missing} to hook"
        if not reason and self.graphs.captures and getattr(self.runner, "attn_backend", self) is not self:
            reason = "SGLang wraps this backend in another one"
        return reason

    # ---- deciding which kernel a forward runs ----

    def decide(self) -> bool:
        """Whether the replay that is about to be chosen runs our kernel's graph; for `both`."""
        return self.control.decide(self.counters.forwards + 1)

    def runs_eagerly(self, forward_batch) -> bool:
        """Whether a batch that a graph could serve is to run eagerly. SGLang asks when it plans a batch and again when it runs
        it: what was decided first stays, since the metadata of a graph does not fit an eager forward."""
        decided = getattr(forward_batch, LATCH, None)
        if decided is None:
            candidate = self.control.decide(self.counters.forwards + 1)
            verifying = forward_batch.forward_mode.is_target_verify()
            decided = (candidate, candidate and verifying and self.graphs.alone and self.shadow.due())
            setattr(forward_batch, LATCH, decided)
        candidate, shadowing = decided
        eagerly = shadowing or (not candidate and self.graphs.way is Way.CANDIDATE)
        self.planned = decided if eagerly else None
        return eagerly

    # ---- SGLang's interface ----

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        verifying = forward_batch.forward_mode.is_target_verify()
        self._begin(verifying)
        decided = None
        if verifying:
            decided, self.planned = self.planned, None
        if decided is None:
            candidate = self.control.decide(self.counters.forwards)
            decided = (candidate, candidate and verifying and not self.graphs.captures and self.shadow.due())
        self.use, self.shadowing = decided
        if self.shadowing:
            self.shadow.begin()

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        verifying = forward_batch.forward_mode.is_target_verify()
        if in_capture:
            self.verifying = verifying
            self.use, self.shadowing = graphs.capturing() != graphs.INCUMBENT_GRAPH, False
            if verifying:  # outside the capture: choosing loads objects and allocates workspace
                self._plan(forward_batch.batch_size, self.target_verify_num_tokens_per_req)
        else:
            self._begin(verifying)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
        self.layer = layer.layer_id
        self.verifying = forward_batch.forward_mode.is_target_verify()
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def _begin(self, verifying: bool) -> None:
        """Host-side bookkeeping of one forward or graph replay."""
        if self.warming:
            self.warming = False
            self.count.zero_()
        self.counters.forwards += 1
        self.counters.verify_forwards += verifying
        self._take_count()
        now = time.monotonic()
        if now - self.counted_at >= INTERVAL:
            self.counted_at = now
            self.count_on_host.copy_(self.count, non_blocking=True)

    def _take_count(self) -> None:
        """Layers that either kernel ran, from the device's counts of verify forwards."""
        ours, engines = self.count_on_host.tolist()
        self.counters.verify_calls, self.counters.incumbent_calls = ours * self.layers, engines * self.layers

    # ---- the seam ----

    def _attention(
        self, q, k, v, o, k_pool, v_pool, qo_indptr, kv_indptr, kv_indices, custom_mask, is_causal, mask_indptr, max_len,
        k_scale, v_scale, sm_scale=None, **options,
    ):  # fmt: skip
        """SGLang's `extend_attention_fwd`: tree verify by our kernel, all else by SGLang's.

        Args:
            q, o: [tokens, heads, 576] and [tokens, heads, 512].
            k: [tokens, 1, 576], the draft rows.
            k_pool: [slots, 1, 576].
            qo_indptr, kv_indptr: [requests + 1]; kv_indices: slots of the committed prefixes, maybe longer than used.
            custom_mask: FULL layout, uint8 in a fixed buffer under graphs, bool eagerly; None for a chain.
            max_len: draft tokens a request.
        """
        arguments = (q, k, v, o, k_pool, v_pool, qo_indptr, kv_indptr, kv_indices, custom_mask, is_causal, mask_indptr,
                     max_len, k_scale, v_scale, sm_scale)  # fmt: skip
        if not (self.use and self.verifying and k.shape[1] == 1 and self._is_plain(options)):
            if self.verifying and self.layer == self.first_layer:
                self.count[1:].add_(1)
            return self.engine_attention(*arguments, **options)
        streams = qo_indptr.shape[0] - 1
        if self.layer == self.first_layer:
            self._fill_indices(qo_indptr, kv_indptr, streams)
        plan = self._plan(streams, max_len)
        problem = make_problem(
            q, k_pool, qo_indptr=self.qo_indptr64[: streams + 1], kv_indptr=self.kv_indptr64[: streams + 1],
            kv_indices=kv_indices, prefix_lens=self.prefix_lens[:streams], draft_kv=k, mask=custom_mask,
            mask_indptr=None if custom_mask is None else mask_indptr, mask_layout="auto" if custom_mask is None else "full",
            scale=sm_scale, out=o, lse=plan.lse, max_q=max_len, max_prefix=self.max_context_len, check_values=False)  # fmt: skip
        cuda.run(problem, plan.variant, num_splits=plan.splits, workspace=plan.workspace)
        if self.shadowing:
            self._compare(arguments, options, plan.variant)

    def _compare(self, arguments: tuple, options: dict, variant: str) -> None:
        """Run the engine's kernel on the same inputs; on a mismatch its result is used, and the rest of this forward is its."""
        q, _, _, ours, *_ = arguments
        theirs, kv_indptr = torch.empty_like(ours), arguments[7]
        self.engine_attention(*arguments[:3], theirs, *arguments[4:], **options)
        lengths = (kv_indptr[1:] - kv_indptr[:-1]).tolist()[: arguments[6].shape[0] - 1]
        if not self.shadow.agrees(ours, theirs, q=q, lengths=lengths, layer=self.layer, variant=variant):
            ours.copy_(theirs)
            self.use = self.shadowing = False

    def _is_plain(self, options: dict) -> bool:
        return all(options.get(name, plain) in (plain, None) for name, plain in PLAIN.items())

    def _fill_indices(self, qo_indptr: Tensor, kv_indptr: Tensor, streams: int) -> None:
        """One width for all indices, prefix lengths and the count, on the device: part of a captured graph."""
        self.qo_indptr64[: streams + 1].copy_(qo_indptr)
        self.kv_indptr64[: streams + 1].copy_(kv_indptr[: streams + 1])
        torch.sub(kv_indptr[1 : streams + 1], kv_indptr[:streams], out=self.prefix_lens[:streams])
        self.count[:1].add_(1)

    # ---- choosing ----

    def _plan(self, streams: int, draft_tokens: int) -> Plan:
        plan = self.plans.get((streams, draft_tokens))
        if plan is None:
            problem = self._example(streams, draft_tokens)
            variant, splits = cuda.choose(problem)
            workspace = self._workspace(variant, cuda.workspace_bytes(problem, variant, num_splits=splits))
            plan = self.plans[streams, draft_tokens] = Plan(variant, splits, workspace, problem.lse)
            log.info("verify_attn: %d requests of %d draft tokens: %s, %d splits", streams, draft_tokens, variant, splits)
        return plan

    def _workspace(self, variant: str, size: int) -> Tensor:
        """A zeroed buffer of a variant's own. Smaller ones are kept: graphs captured on them hold their addresses."""
        held = self.workspaces.setdefault(variant, [])
        if not held or held[-1].numel() < size:
            held.append(torch.zeros(max(size, 1), dtype=torch.uint8, device=self.device))
        return held[-1]

    def _example(self, streams: int, draft_tokens: int) -> Problem:
        """A problem of that shape, of which only what the host knows matters."""
        tokens, options = streams * draft_tokens, {"device": self.device}
        pool = self.token_to_kv_pool.get_key_buffer(self.first_layer)
        indices = torch.zeros(1, dtype=torch.int64, **options)
        return make_problem(
            torch.empty(tokens, self.num_head, pool.shape[-1], dtype=pool.dtype, **options), pool,
            qo_indptr=self.qo_indptr64[:1].expand(streams + 1).contiguous(),
            kv_indptr=self.kv_indptr64[:1].expand(streams + 1).contiguous(), kv_indices=indices,
            prefix_lens=torch.zeros(streams, dtype=torch.int32, **options),
            draft_kv=torch.empty(tokens, 1, pool.shape[-1], dtype=pool.dtype, **options),
            mask=torch.zeros(1, dtype=torch.uint8, **options),
            mask_indptr=torch.zeros(streams + 1, dtype=torch.int64, **options), mask_layout="full",
            scale=1.0, max_q=draft_tokens, max_prefix=self.max_context_len, check_values=False)  # fmt: skip

    def _probe(self) -> Built | None:
        """Choose and load what one request would run, so that what cannot run ends the server at its start."""
        if not self.num_draft_tokens:
            log.warning("verify_attn: this server does not speculate, so there is no tree to verify; SGLang's kernels serve it all")
            return None
        self.probed_variant = self._plan(1, self.num_draft_tokens).variant
        return from_release(cuda_object(self.probed_variant, torch.device(self.device)))
