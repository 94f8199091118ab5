"""The CPU backend of `verify_attn`, spoilt in three ways. Only the candidate's kernel is: the incumbent's path stays right."""

from __future__ import annotations

import ctypes
import os

from torch import Tensor
from verify_attn.sglang.cpu_backend import CpuBackend

from verify_attn_faults import CRASH, SLOW, WRONG
from verify_attn_faults.trigger import make_trigger

REPEAT, BLOCK = 8, 64


class SpoiltBackend(CpuBackend):
    """Looks before every verify step of the candidate's kernel whether the fault shows."""

    def __init__(self, runner, name: str) -> None:
        super().__init__(runner, name)
        self.faulty = False
        self.trigger = make_trigger(os.environ.get("VERIFY_ATTN_FAULTS_WHEN", "always"), lambda: self.counters.verify_forwards)

    def _kernel_inputs(self, forward_batch) -> dict:
        self.faulty = self.trigger()
        return super()._kernel_inputs(forward_batch)


class SlowBackend(SpoiltBackend):
    """Right, and slow: every verify layer's attention is done `repeat` times."""

    def __init__(self, runner, name: str) -> None:
        super().__init__(runner, name)
        self.repeat = number("VERIFY_ATTN_FAULTS_REPEAT", REPEAT)

    def verify(self, q: Tensor, pool: Tensor, layer, forward_batch, out: Tensor) -> None:
        times = self.repeat if self.kernel_inputs and self.faulty else 1
        for _ in range(times):
            super().verify(q, pool, layer, forward_batch, out)


class WrongBackend(SpoiltBackend):
    """Fast, and wrong: the keys after the last whole block of the prefix are not read, as when the last KV split is lost."""

    def __init__(self, runner, name: str) -> None:
        super().__init__(runner, name)
        self.block = number("VERIFY_ATTN_FAULTS_BLOCK", BLOCK)

    def _kernel_inputs(self, forward_batch) -> dict:
        inputs = super()._kernel_inputs(forward_batch)
        if self.faulty:
            inputs["prefix_lens"] = inputs["prefix_lens"] // self.block * self.block
        return inputs


class CrashBackend(SpoiltBackend):
    """A wild pointer."""

    def verify(self, q: Tensor, pool: Tensor, layer, forward_batch, out: Tensor) -> None:
        if self.kernel_inputs and self.faulty:
            ctypes.string_at(0)
        super().verify(q, pool, layer, forward_batch, out)


KINDS = {SLOW: SlowBackend, WRONG: WrongBackend, CRASH: CrashBackend}


def number(name: str, default: int) -> int:
    """A positive whole number from the environment; ValueError for anything else."""
    text = os.environ.get(name, str(default))
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name} is {text!r}; give a whole number of at least 1")
    return int(text)
