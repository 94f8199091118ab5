"""Value types of `results.json`, the record a gate judges and a checkpoint keeps (schema phasegate/results/v1).

Every type is frozen and turns into plain JSON and back. Times are seconds, sizes bytes, rates per second unless a
name says otherwise.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from phases.base.verdict import Verdict

SCHEMA = "phasegate/results/v1"
RATIO = "candidate / incumbent"  # unit of what Phase 2 measures between two servers


@dataclass(frozen=True)
class Case:
    """One shape a kernel is proved or timed on.

    `name` reads `q9/16384/s1` (draft-tree queries / prefix length / streams); `params` holds whatever the kernel
    needs to make the inputs (heads, page size, tree kind, seed ...), as plain JSON.
    """

    name: str
    dtype: str
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Unique text of the case: name, dtype and heads, which tables and diffs match on."""
        heads = self.params.get("heads")
        return f"{self.name}/{self.dtype}" if heads is None else f"{self.name}/h{heads}/{self.dtype}"


@dataclass(frozen=True)
class BuildRecord:
    """One compiled object, or the reason why there is none."""

    variant: str
    arch: str  # sm_90, x86-64-v4, python
    ok: bool
    artifact: str = ""  # file name inside the build cache
    sha256: str = ""
    cache_key: str = ""  # digest of sources, flags and compiler
    compiler: str = ""
    flags: tuple[str, ...] = ()
    seconds: float = 0.0
    cached: bool = False
    reason: str = ""  # why not ok, with the compiler's last lines


@dataclass(frozen=True)
class ParityRecord:
    """One variant on one case against the float64 reference."""

    case: Case
    variant: str
    device: str
    ok: bool
    error: float | None = None  # relative Frobenius error, worst output
    tolerance: float | None = None
    max_abs: float | None = None
    rerun_identical: bool | None = None
    batch_invariant: bool | None = None
    refused: str = ""  # the variant's own reason for not doing this case
    reason: str = ""  # why not ok


@dataclass(frozen=True)
class BenchmarkRecord:
    """Timing samples of one variant on one case. Exists with samples only where parity passed, before and after."""

    case: Case
    variant: str
    role: str  # baseline | incumbent | candidate
    device: str
    samples: tuple[float, ...] = ()  # seconds per call, every kept sample
    warmup_sweeps: int = 0
    bytes_needed: int = 0  # each needed byte once
    flops: int = 0
    parity_after: bool | None = None
    bandwidth_fraction: float | None = None  # of the measured ceiling of this device, at the median sample
    compute_fraction: float | None = None
    roofline_seconds: float | None = None
    refused: str = ""
    reason: str = ""  # why there are no samples
    detail: dict[str, Any] = field(default_factory=dict)  # how it was timed: method, input sets, settled ...

    @property
    def median(self) -> float | None:
        """Median seconds per call, or None without samples."""
        if not self.samples:
            return None
        ordered = sorted(self.samples)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True)
class Ceiling:
    """What this device itself was measured to reach, in the same run as the benchmark."""

    device: str
    kind: str  # read | copy | gather | flops_float32 | flops_bfloat16
    value: float  # bytes/s or FLOP/s
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """One scalar a serving phase observed, with its interval: accept length, latency ratio, error rate ..."""

    metric: str
    estimate: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    unit: str = ""
    source: str = ""  # where it was read: url, file, prompt set
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageEnd:
    """How a judged stage of a phase ended: `bake`, `wave 1`, `soak`. The phase's own verdict, which its gate holds whatever the playbook says.

    Attributes:
        seconds: how long it was judged.
    """

    stage: str
    verdict: Verdict
    reason: str
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "verdict": self.verdict.value}

    @staticmethod
    def from_json(row: dict[str, Any]) -> StageEnd:
        return StageEnd(row["stage"], Verdict(row["verdict"]), row["reason"], row["seconds"])


@dataclass(frozen=True)
class Results:
    """Everything one phase measured."""

    phase: str
    kernel: str
    build: tuple[BuildRecord, ...] = ()
    parity: tuple[ParityRecord, ...] = ()
    benchmark: tuple[BenchmarkRecord, ...] = ()
    ceilings: tuple[Ceiling, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    ends: tuple[StageEnd, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # servers, hosts, timeline ...: plain JSON
    schema: str = SCHEMA

    def end_of(self, stage: str) -> StageEnd | None:
        """How a stage ended; None where it was not judged."""
        return next((end for end in self.ends if end.stage == stage), None)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ends": [end.to_json() for end in self.ends]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Results:
        """Inverse of `to_json`; ValueError when the schema is another one."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"results have schema {data.get('schema')!r}, this toolkit reads {SCHEMA!r}")
        return Results(
            phase=data["phase"],
            kernel=data["kernel"],
            build=tuple(_load(BuildRecord, row) for row in data["build"]),
            parity=tuple(_load(ParityRecord, row) for row in data["parity"]),
            benchmark=tuple(_load(BenchmarkRecord, row) for row in data["benchmark"]),
            ceilings=tuple(_load(Ceiling, row) for row in data["ceilings"]),
            measurements=tuple(_load(Measurement, row) for row in data["measurements"]),
            ends=tuple(map(StageEnd.from_json, data["ends"])) if "ends" in data else _ends_of_facts(data["facts"]),
            facts=data["facts"],
        )


def _ends_of_facts(facts: dict[str, Any]) -> tuple[StageEnd, ...]:
    """As results of toolkits before 0.2 hold them."""
    rows = {name: facts[name] for name in ("bake", "soak") if isinstance(facts.get(name), dict)}
    ends = [
        StageEnd(name, Verdict(row["outcome"]), row.get("reason", ""), row.get("seconds", 0.0))
        for name, row in rows.items()
        if row.get("outcome") in Verdict.__members__
    ]
    waves = [
        (key, value) for key, value in facts.items() if key.startswith("wave ") and value in list(Verdict.__members__)
    ]
    return (*(StageEnd(key, Verdict(value), "") for key, value in waves), *ends)


def _load(kind: type, row: dict[str, Any]) -> Any:
    values = dict(row)
    if "case" in values:
        values["case"] = Case(**values["case"])
    for name in ("samples", "flags"):
        if name in values:
            values[name] = tuple(values[name])
    return kind(**values)
