"""Benchmark: the variants of each case timed against each other, every sample kept.

A performance number exists only where parity passed: the parity record of the case, if there is one, a proof just before
timing, and a check of outputs produced while timing. The worker's timings are audited by this process, whose clock no
kernel can reach: runs of calls between two messages must take here what the samples say.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phases.base.errors import KernelContractError
from phases.base.results import BenchmarkRecord, Case, Ceiling, ParityRecord
from phases.harness import process
from phases.harness.contract import Kernel, Progress, case_json, describe, select, silent, to_json

AUDIT_WINDOWS, AUDIT_WINDOWS_ALONE = 3, 12  # the fastest window counts: a busy machine only makes windows longer
AUDIT_FACTOR = 2.5  # the toolkit's clock may see so many times the upper quartile of the samples ...
AUDIT_ATTEMPTS_ALONE = (
    3  # a burst of other work can outlast every window of one attempt; a kernel that bends the clock fails them all
)
AUDIT_SLACK_SECONDS = 5e-3  # ... plus this a window, for the messages and a busy machine
_GIVE_UP_AFTER = 2
_DISTRUST = "the samples say"


@dataclass(frozen=True)
class Effort:
    """How long a benchmark may take.

    Attributes:
        min_samples, max_samples: samples a case and variant.
        seconds: time spent sampling a case and variant, unless min_samples needs more.
        warmup_tolerance: two warm-up sweeps agree when they differ by at most this share.
        max_warmup_sweeps: after so many sweeps sampling starts anyway; the record then says `settled: false`.
        audit_seconds: length of one audit window.
    """

    min_samples: int = 12
    max_samples: int = 40
    seconds: float = 2.0
    warmup_tolerance: float = 0.1
    max_warmup_sweeps: int = 8
    audit_seconds: float = 0.05


def measure(
    kernel: Kernel,
    device: str,
    ceilings: Sequence[Ceiling],
    parity: Sequence[ParityRecord],
    variants: Sequence[str] | None = None,
    cases: Sequence[Case | str] | None = None,
    progress: Progress = silent,
    *,
    effort: Effort = Effort(),
    silence: float = process.SILENCE_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[BenchmarkRecord, ...]:
    """Time the kernel's variants for `device` on its benchmark cases.

    Args:
        ceilings: from `phases.harness.ceilings.measure` in the same run; fractions are None where one is missing.
        parity: records that stand against a number: no samples for a case and variant that failed here.
        variants, cases: as in `phases.harness.parity.prove`; variants of role `reference` are not timed.
        clock: this process's clock, for the audit.

    Returns:
        One record per case and variant, cases outermost.

    Raises:
        KernelContractError, UsageError: as `phases.harness.parity.prove`.
    """
    names = tuple(name for name in kernel.variants_for(device, variants) if kernel.variants[name].role != "reference")
    chosen = select(describe(kernel, device)["benchmark"], cases, "benchmark")
    run = _Run(kernel, device, names, chosen, progress, silence, clock, effort, tuple(ceilings))
    run.refuse_unproved(parity)
    run.finish()
    return tuple(run.records[number, name] for number in range(len(chosen)) for name in names)


class _Run:
    """Workers started one after the other until every (case, variant) has its record."""

    def __init__(
        self,
        kernel: Kernel,
        device: str,
        names: tuple[str, ...],
        cases: tuple[Case, ...],
        progress: Progress,
        silence: float,
        clock: Callable[[], float],
        effort: Effort,
        ceilings: tuple[Ceiling, ...],
    ) -> None:
        self.kernel, self.device, self.names, self.cases = kernel, device, names, cases
        self.progress, self.silence, self.clock, self.effort, self.ceilings = progress, silence, clock, effort, ceilings
        self.records: dict[tuple[int, str], BenchmarkRecord] = {}
        self.deaths = dict.fromkeys(names, 0)
        self.alone: dict[tuple[int, str], int] = {}  # audited badly: times sent to a process of its own
        self.began = 0.0
        self.audits: dict[
            str, list[tuple[float, int]]
        ] = {}  # variant: (seconds, calls) of each window of the case at hand

    def refuse_unproved(self, parity: Sequence[ParityRecord]) -> None:
        """Records without samples for what failed parity."""
        failed = {
            (record.case.key, record.variant): record for record in parity if not record.ok and not record.refused
        }
        for number, case in enumerate(self.cases):
            for name in self.names:
                if record := failed.get((case.key, name)):
                    self._keep(number, self._blank(number, name, f"parity failed on this case: {record.reason}"))

    def finish(self) -> None:
        while self._missing():
            before = len(self.records) + sum(self.alone.values())
            items = [
                (number, left)
                for number, names in self._missing()
                if (left := [n for n in names if (number, n) not in self.alone])
            ]
            windows = AUDIT_WINDOWS if items else AUDIT_WINDOWS_ALONE
            items = items or [(number, names[:1]) for number, names in self._missing()][:1]
            death = process.run(self._job(items, windows), self._listen, silence=self.silence)
            if death:
                self._bury(death)
            if len(self.records) + sum(self.alone.values()) == before:
                raise KernelContractError(f"the worker of {self.kernel.name} ended without finishing its cases.")

    def _missing(self) -> list[tuple[int, list[str]]]:
        rows = [(n, [name for name in self.names if (n, name) not in self.records]) for n in range(len(self.cases))]
        return [(number, names) for number, names in rows if names]

    def _job(self, items: list[tuple[int, list[str]]], windows: int) -> dict[str, Any]:
        return {
            "op": "benchmark",
            "audit_windows": windows,
            "kernel": to_json(self.kernel),
            "device": self.device,
            "effort": dataclasses.asdict(self.effort),
            "numbers": [number for number, _ in items],
            "items": [{"case": case_json(self.cases[number]), "variants": names} for number, names in items],
        }

    def _listen(self, message: dict[str, Any]) -> None:
        now = self.clock()
        if message["type"] == "audit-begin":
            self.began = now
        elif message["type"] == "audit-end":
            self.audits.setdefault(message["variant"], []).append((now - self.began, message["calls"]))
        elif message["type"] == "timing":
            record = self._record(message)
            place = (message["item"], record.variant)
            if record.reason.startswith(_DISTRUST) and self.alone.get(place, 0) < AUDIT_ATTEMPTS_ALONE:
                self.alone[place] = self.alone.get(place, 0) + 1  # who shares a process can spoil another's clock
                self.progress(
                    f"benchmark {record.case.key} {record.variant}: to be timed again, alone in a process ({record.reason})"
                )
                return
            self._keep(message["item"], record)

    def _record(self, message: dict[str, Any]) -> BenchmarkRecord:
        case, variant, cost = self.cases[message["item"]], message["variant"], message["cost"]
        windows = self.audits.pop(variant, [])
        reason = message["reason"]
        if not reason and not message["refused"]:
            reason = audit(message["samples"], windows)
        alone = {"alone": True} if (message["item"], variant) in self.alone else {}
        samples = () if reason or message["refused"] else tuple(message["samples"])
        record = BenchmarkRecord(
            case=case,
            variant=variant,
            role=self.kernel.variants[variant].role,
            device=self.device,
            samples=samples,
            warmup_sweeps=message["warmup_sweeps"],
            bytes_needed=int(cost["bytes"]),
            flops=int(cost["flops"]),
            parity_after=message["parity_after"],
            refused=message["refused"],
            reason=reason,
            detail={**message["detail"], **alone},
        )
        return with_fractions(record, cost["access"], self.ceilings)

    def _keep(self, number: int, record: BenchmarkRecord) -> None:
        self.records[number, record.variant] = record
        state = f"refused: {record.refused}" if record.refused else f"NO NUMBER: {record.reason}"
        if record.samples:
            share = record.roofline_seconds / record.median if record.roofline_seconds else None
            state = f"{record.median * 1e3:.4g} ms, {len(record.samples)} samples" + (
                f", {share:.0%} of roofline" if share else ""
            )
        self.progress(
            f"benchmark {len(self.records)} of {len(self.cases) * len(self.names)}, {record.case.key} {record.variant}: {state}"
        )

    def _bury(self, death: process.Death) -> None:
        self.audits.clear()
        variant = list(self.kernel.variants)[death.variant] if death.variant >= 0 else ""
        if death.item < 0 or not variant:
            at = f" on case {self.cases[death.item].key}" if death.item >= 0 else ""
            raise KernelContractError(
                f"{self.kernel.entry}{at}: the worker {death.reason}.",
                hint="This happened outside run(): in import, inputs, outputs or reference.",
            )
        self.deaths[variant] += 1
        self._keep(death.item, self._blank(death.item, variant, f"the process {death.reason}"))
        if self.deaths[variant] >= _GIVE_UP_AFTER:
            for number, names in self._missing():
                if variant in names:
                    self._keep(
                        number,
                        self._blank(number, variant, f"not tried: the variant ended {_GIVE_UP_AFTER} workers before"),
                    )

    def _blank(self, number: int, variant: str, reason: str) -> BenchmarkRecord:
        return BenchmarkRecord(
            case=self.cases[number],
            variant=variant,
            role=self.kernel.variants[variant].role,
            device=self.device,
            reason=reason,
        )


def merged(records: Sequence[BenchmarkRecord], again: Sequence[BenchmarkRecord]) -> tuple[BenchmarkRecord, ...]:
    """The records with the samples of a later run added. A later one without samples stands for both: what lost its right to a number
    once has none."""
    later = {(record.case.key, record.variant): record for record in again}
    return tuple(_with_more(record, later.get((record.case.key, record.variant))) for record in records)


def _with_more(record: BenchmarkRecord, later: BenchmarkRecord | None) -> BenchmarkRecord:
    if later is None or not record.samples:
        return record
    if not later.samples:
        return later
    both = dataclasses.replace(
        later,
        samples=(*record.samples, *later.samples),
        detail={**later.detail, "runs": [*record.detail.get("runs", [len(record.samples)]), len(later.samples)]},
    )
    slower = (later.median or 1.0) / (both.median or 1.0)
    return dataclasses.replace(
        both,
        bandwidth_fraction=later.bandwidth_fraction and later.bandwidth_fraction * slower,
        compute_fraction=later.compute_fraction and later.compute_fraction * slower,
    )


def audit(samples: Sequence[float], windows: Sequence[tuple[float, int]]) -> str:
    """Compare the worker's samples (seconds a call) with windows (seconds, calls) timed here; the reason of distrust, or empty."""
    if not samples or not windows:
        return "the timing was not audited"
    typical = statistics.quantiles(samples, n=4)[2] if len(samples) > 1 else samples[0]
    seconds, calls = min(windows, key=lambda window: window[0] / window[1])
    here = seconds / calls
    if here > AUDIT_FACTOR * typical + AUDIT_SLACK_SECONDS / calls:
        return f"{_DISTRUST} {typical:.3g} s a call, the toolkit's own clock saw {here:.3g} s: time is being hidden"
    slowest = max(seconds / calls for seconds, calls in windows)
    if AUDIT_FACTOR * (slowest + AUDIT_SLACK_SECONDS / calls) < min(samples):
        return f"{_DISTRUST} {typical:.3g} s a call, the toolkit's own clock saw only {slowest:.3g} s: time is being invented"
    return ""


def with_fractions(record: BenchmarkRecord, access: str, ceilings: Sequence[Ceiling]) -> BenchmarkRecord:
    """The record with roofline seconds and the fractions of the ceilings that its median reaches."""
    top = {ceiling.kind: ceiling.value for ceiling in ceilings if ceiling.device == record.device}
    bandwidth = top.get(access) or top.get("read")
    compute = top.get(f"flops_{record.case.dtype}")
    floors = [
        amount / rate for amount, rate in ((record.bytes_needed, bandwidth), (record.flops, compute)) if rate and amount
    ]
    complete = bool(bandwidth) and bool(compute or not record.flops)
    median = record.median
    return dataclasses.replace(
        record,
        roofline_seconds=max(floors) if floors and complete else None,
        bandwidth_fraction=record.bytes_needed / median / bandwidth if median and bandwidth else None,
        compute_fraction=record.flops / median / compute if median and compute else None,
    )
