"""Timing the variants of one case against each other, inside the worker.

The story of a case: make the input sets; prove each variant right on it; warm up until two sweeps agree; take samples
round-robin in shuffled order; let the toolkit's clock look over it (the audit); check outputs that were produced while
timing. Compiling, capturing and first calls lie before the first sample.
"""

from __future__ import annotations

import gc
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from phases.harness import guards
from phases.harness.buffers import fingerprint, is_poison, same_bits
from phases.harness.channel import Channel
from phases.harness.compare import compare
from phases.harness.entry import Entry, Json, Tensors, blame
from phases.harness.input_sets import InputSets, cache_bytes, describe, free_memory
from phases.harness.timers import CpuTimer, CudaTimer


class Dishonest(Exception):
    """A variant lost its right to a performance number on this case; the text says why."""


@dataclass
class Lane:
    """One variant on its way through a case."""

    variant: str
    index: int  # in kernel.yaml, for the pulse
    samples: list[float] = field(default_factory=list)
    last: float = 0.0  # seconds a call in the last sweep
    warmup_sweeps: int = 0
    settled: bool = False
    reason: str = ""
    refused: str = ""
    wanted: int = 0
    check_at: int = 0  # number of the sample whose outputs are checked afterwards
    kept: tuple[int, int, Tensors] | None = None  # set, its state, outputs of that sample
    parity_after: bool | None = None
    error_after: float | None = None
    timer: Any = None
    detail: Json = field(default_factory=dict)


def measure(job: Json, channel: Channel) -> None:
    """Time every item of the job: {"case", "variants"}; emits one `timing` message per variant."""
    originals = guards.Originals()
    entry = Entry(job["kernel"])
    for number, item in zip(job["numbers"], job["items"], strict=True):
        channel.at(number)
        CaseRace(entry, item, job, channel, originals, number).run()


class CaseRace:
    """All variants of one case."""

    def __init__(
        self, entry: Entry, item: Json, job: Json, channel: Channel, originals: guards.Originals, number: int
    ) -> None:
        self.entry, self.case, self.device, self.effort = entry, item["case"], job["device"], job["effort"]
        self.channel, self.originals, self.number = channel, originals, number
        names = list(entry.kernel["variants"])
        self.lanes = [Lane(variant, names.index(variant)) for variant in item["variants"]]
        self.tolerance, self.cost = entry.tolerance(self.case), entry.cost(self.case)
        self.random = random.Random(zlib.crc32(self.case["name"].encode()))
        self.audit_windows = job["audit_windows"]
        self.turn = 0
        self.other_values: Tensors | None = None

    def run(self) -> None:
        for lane in self.lanes:
            lane.refused = self.entry.refuse(lane.variant, self.case, self.device)
        racing = [lane for lane in self.lanes if not lane.refused]
        if racing:
            seed = zlib.crc32(f"time {self.case['name']}/{self.case['dtype']}".encode()) & 0x3FFFFFFF
            self.sets = InputSets(
                self.entry, self.case, self.device, seed, cache_bytes(self.device), free_memory(self.device)
            )
            self._race(racing)
        for lane in self.lanes:
            self._report(lane)
        self.sets = None
        gc.collect()

    def _race(self, racing: list[Lane]) -> None:
        first = self.sets.reference(0, 0)
        self.untouched = sum(int(torch.isnan(tensor).sum()) for tensor in first.values())
        for lane in racing:
            self._guarded(lane, self._prove_first, first)
        gc.collect()
        gc.disable()
        try:
            self._warm_up(racing)
            self._sample(racing)
            for lane in racing:
                self._guarded(lane, self._audit)
        finally:
            gc.enable()
        for lane in racing:
            self._guarded(lane, self._prove_after)

    def _guarded(self, lane: Lane, action: Any, *arguments: Any) -> None:
        """Run an action of a lane that is still honest; what goes wrong in it takes that lane out of the race."""
        if lane.reason:
            return
        self.channel.variant(lane.index)
        try:
            action(lane, *arguments)
            self.originals.check()
        except (Dishonest, guards.Tampering) as fault:
            lane.reason = str(fault)
        except (Exception, SystemExit) as fault:
            lane.reason = f"run() raised {blame(fault)}"
        self.channel.variant(-1)

    def _prove_first(self, lane: Lane, reference: Tensors) -> None:
        """Right on set 0 before any timing; also the first guess of how long a call takes, and the timer's preparation."""
        outputs = self.sets.outputs[0]
        self.sets.restore(0, 0)
        outputs.poison()
        self._call(lane, 0)
        self._synchronize()
        self._must_be_right(outputs.tensors, reference, "before timing: ")
        if overrun := outputs.overrun():
            raise Dishonest(overrun)
        start = guards.perf_counter()
        self._call(lane, 1)
        self._synchronize()
        cuda = self.device.startswith("cuda")
        lane.timer = (CudaTimer if cuda else CpuTimer)(self.sets.count)
        lane.timer.prepare(lambda number: self._call(lane, number), guards.perf_counter() - start)

    def _warm_up(self, racing: list[Lane]) -> None:
        """Sweeps until two in a row agree for every variant, at most `max_warmup_sweeps`."""
        for _ in range(self.effort["max_warmup_sweeps"]):
            for lane in racing:
                self._guarded(lane, self._warm_up_once)
            if all(lane.settled or lane.reason for lane in racing):
                return

    def _warm_up_once(self, lane: Lane) -> None:
        seconds = self._one_sample(lane, check=False)
        lane.warmup_sweeps += 1
        tolerance = self.effort["warmup_tolerance"] * max(seconds, lane.last)
        lane.settled = lane.warmup_sweeps > 1 and abs(seconds - lane.last) <= tolerance
        lane.last = seconds
        if isinstance(lane.timer, CpuTimer):
            lane.timer.prepare(lambda number: self._call(lane, number), seconds)

    def _sample(self, racing: list[Lane]) -> None:
        """Samples in sweeps; a slow variant takes part in fewer, evenly spread, so that all see the same noise."""
        for lane in racing:
            if not lane.reason:
                a_sample = max(lane.last * len(lane.timer.touched(range(self.sets.count))), 1e-6)
                fits = int(self.effort["seconds"] / a_sample)
                lane.wanted = max(self.effort["min_samples"], min(self.effort["max_samples"], fits))
                lane.check_at = self.random.randrange(lane.wanted // 2, lane.wanted)
        sweeps = max((lane.wanted for lane in racing), default=0)
        for sweep in range(sweeps):
            order = [lane for lane in racing if (sweep + 1) * lane.wanted // sweeps > sweep * lane.wanted // sweeps]
            self.random.shuffle(order)
            for lane in order:
                self._guarded(lane, self._take_sample)

    def _take_sample(self, lane: Lane) -> None:
        lane.samples.append(self._one_sample(lane, check=len(lane.samples) == lane.check_at))

    def _one_sample(self, lane: Lane, check: bool) -> float:
        """Time one sample on refreshed, poisoned sets; every element must be there when the clock stops."""
        order = [(self.turn + offset) % self.sets.count for offset in range(self.sets.count)]
        touched = lane.timer.touched(order)
        for number in touched:
            self.sets.refresh(number)
        self._synchronize()
        seconds = lane.timer.sample(lambda number: self._call(lane, number), order)
        last = touched[-1]
        unwritten = sum(int(is_poison(tensor).sum()) for tensor in self.sets.outputs[last].tensors.values())
        if check:
            chosen = self.random.choice(list(touched))
            lane.kept = (chosen, self.sets.state[chosen], self.sets.outputs[chosen].snapshot())
        self.turn += len(touched)
        if unwritten > self.untouched:
            raise Dishonest(f"{unwritten - self.untouched} output elements were not written when the call had returned")
        if overrun := self.sets.outputs[last].overrun():
            raise Dishonest(overrun)
        return seconds

    def _audit(self, lane: Lane) -> None:
        """Calls back to back between two messages: the toolkit's clock, in another process, must see the same time a call."""
        calls = max(1, min(500, int(self.effort["audit_seconds"] / max(lane.last, 1e-9))))
        for _ in range(self.audit_windows if lane.last < 0.2 else 1):
            self.channel.send("audit-begin", variant=lane.variant)
            done = lane.timer.back_to_back(lambda number: self._call(lane, number), calls)
            self.channel.send("audit-end", variant=lane.variant, calls=done)

    def _prove_after(self, lane: Lane) -> None:
        number, state, outputs = lane.kept
        lane.parity_after = False  # until everything below has passed
        comparison = compare(outputs, self.sets.reference(number, state), self.tolerance)
        lane.error_after = comparison.error
        if not comparison.ok:
            raise Dishonest(f"outputs produced while timing are wrong: {comparison.reason}")
        if self.other_values is None:
            self.other_values = self.sets.reference(0, 1)
        self.sets.restore(0, 1)  # set 0 held state 0 when it was proved before timing: same memory, other values
        before, outputs = fingerprint(self.sets.inputs[0]), self.sets.outputs[0]
        self._once_more(lane)
        if fingerprint(self.sets.inputs[0]) != before:
            raise Dishonest("changed its inputs")
        self._must_be_right(outputs.tensors, self.other_values, "after timing, with other values in the same memory: ")
        first = outputs.snapshot()
        self._once_more(lane)
        if not all(same_bits(outputs.tensors[name], first[name]) for name in first):
            raise Dishonest("after timing, a rerun on the same inputs gives other bits")
        lane.parity_after = True

    def _once_more(self, lane: Lane) -> None:
        self.sets.outputs[0].poison()
        self._call(lane, 0)
        self._synchronize()

    def _must_be_right(self, outputs: Tensors, reference: Tensors, when: str) -> None:
        comparison = compare(outputs, reference, self.tolerance)
        if not comparison.ok:
            raise Dishonest(f"{when}{comparison.reason}")

    def _call(self, lane: Lane, number: int) -> None:
        self.entry.run(lane.variant, self.case, self.sets.inputs[number], self.sets.outputs[number].tensors)

    def _synchronize(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def _report(self, lane: Lane) -> None:
        if lane.timer is not None:
            lane.detail = {
                "method": lane.timer.method,
                "settled": lane.settled,
                "error_after": lane.error_after,
                **describe(self.sets),
            }
            if why := getattr(lane.timer, "why_eager", ""):
                lane.detail["not_captured"] = why
        self.channel.send(
            "timing",
            item=self.number,
            variant=lane.variant,
            samples=lane.samples,
            warmup_sweeps=lane.warmup_sweeps,
            parity_after=lane.parity_after,
            refused=lane.refused,
            reason=lane.reason,
            cost=self.cost,
            detail=lane.detail,
        )
