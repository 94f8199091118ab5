"""The CPU candidate: tree verify by the compiled kernel, the rest as `TorchBackend`."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_attn import cpu, verify_attention
from verify_attn.sglang.control import Control
from verify_attn.sglang.identity import hot_facts
from verify_attn.sglang.objects import from_release
from verify_attn.sglang.shadow import Shadow
from verify_attn.sglang.torch_backend import TorchBackend

VARIANT = "cpu"


class CpuBackend(TorchBackend):
    """SGLang attention backend `verify_attn` on the CPU engine.

    The kernel sees the batch as SGLang lays it out: the draft rows are in the pool at `out_cache_loc`, the mask is
    QLEN_ONLY (or FULL, told apart by its size), the prefix is given slot by slot, so that any page size is served.
    """

    def __init__(self, runner, name: str) -> None:
        self.control = Control.from_environment()
        self.shadow = Shadow.from_environment(self.control)
        self.shadowing = False
        self.kernel_inputs: dict = {}
        self.object = from_release(cpu.built())  # now, so that what cannot be loaded ends the server at its start
        self.isa = cpu.isa()
        super().__init__(runner, name)

    def variant(self) -> str:
        return f"{VARIANT} ({self.isa})"

    def build(self) -> str:
        return self.object.sha256

    def choice(self) -> str:
        return self.control.choice

    def hot(self) -> dict:
        return hot_facts(self.control)

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        self.kernel_inputs = {}
        self.shadowing = False
        candidate = self.control.decide(self.counters.forwards)
        if candidate and self.verifying and self.segments:
            self.kernel_inputs = self._kernel_inputs(forward_batch)
            self.shadowing = self.shadow.due()
            if self.shadowing:
                self.shadow.begin()

    def verify(self, q: Tensor, pool: Tensor, layer, forward_batch, out: Tensor) -> None:
        if not self.kernel_inputs:
            super().verify(q, pool, layer, forward_batch, out)
            return
        self.counters.verify_calls += 1
        verify_attention(q, pool, **self.kernel_inputs, scale=layer.scaling, out=out, variant=VARIANT)
        self.kernel_inputs["check_values"] = False  # the indices are the same for every layer: looked at once a forward
        if self.shadowing:
            self._compare(q, pool, layer, out)

    def _compare(self, q: Tensor, pool: Tensor, layer, out: Tensor) -> None:
        """Run the incumbent on the same inputs; on a mismatch its result is used, and the rest of this forward is its."""
        theirs = torch.empty_like(out)
        self.attend(q, pool, layer.scaling, theirs)
        lengths = self.kernel_inputs["prefix_lens"].tolist()
        if not self.shadow.agrees(out, theirs, q=q, lengths=lengths, layer=layer.layer_id, variant=VARIANT):
            out.copy_(theirs)
            self.kernel_inputs = {}

    def _kernel_inputs(self, forward_batch) -> dict:
        """What is the same for every layer of this forward, as `verify_attention` takes it; indices int64."""
        n = forward_batch.spec_info.draft_token_num
        prefix = forward_batch.seq_lens.long()
        streams = prefix.numel()
        inputs = {
            "qo_indptr": torch.arange(0, (streams + 1) * n, n),
            "kv_indptr": _offsets(prefix),
            "kv_indices": torch.cat([segment.slots[:-n] for segment in self.segments]),
            "prefix_lens": prefix.int(),
            "draft_slots": forward_batch.out_cache_loc.long(),
            "max_q": n,
            "max_prefix": int(prefix.max()),
        }
        mask = forward_batch.spec_info.custom_mask
        if mask is not None:
            mask = mask.view(-1)
            cells = torch.full_like(prefix, n * n) if mask.numel() == streams * n * n else n * (prefix + n)
            inputs |= {
                "mask": mask,
                "mask_indptr": _offsets(cells),
                "mask_layout": "qlen" if mask.numel() == streams * n * n else "full",
            }
        return inputs


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
