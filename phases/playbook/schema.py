"""What a playbook says, as values, and the dataclasses that are the schema of its own sections."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phases.base.errors import UsageError
from phases.playbook.located import Mistakes, Node, nearest
from phases.playbook.phase_kinds import PHASES, PhaseKind
from phases.playbook.typed import setting

if TYPE_CHECKING:
    from phases.gate.rules import Rule

SCHEMA = "phasegate/playbook/v1"


class Sign(Enum):
    """Whether checkpoints are signed."""

    AUTO = "auto"  # as git is configured (commit.gpgSign, tag.gpgSign)
    ALWAYS = "always"
    NEVER = "never"


class Review(Enum):
    """Whether a person looks at a passed gate before the next phase may start."""

    REQUIRED = "required"
    NONE = "none"


class Device(Enum):
    """Where Phase 1 runs the kernel."""

    AUTO = "auto"  # the GPU when torch sees one, else the CPU
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class LedgerSettings:
    """Where checkpoints are kept."""

    branch: str = setting("checkpoints", help="git branch that holds the checkpoints", not_empty=True)
    remote: str = setting(
        "", help="git remote that checkpoints are pushed to at once; empty: keep them local", pattern=r"|[^-\s].*"
    )
    sign: Sign = setting(Sign.AUTO, help="sign commits and tags: auto (as git is configured), always or never")
    tag_prefix: str = setting(
        "checkpoint/", help="tags read PREFIX0001-build-parity-PASS", pattern=r"[A-Za-z0-9][A-Za-z0-9._/-]*"
    )


@dataclass(frozen=True)
class CaseSelection:
    """Which of the kernel's cases to use: shell patterns over keys such as q9/16384/s1/h64/float32."""

    cases: tuple[str, ...] = setting((), help="patterns; none: every case the kernel names", examples=(["q9/*"],))
    variants: tuple[str, ...] = setting((), help="variant names; none: every variant that fits the device")


@dataclass(frozen=True)
class TimedSelection(CaseSelection):
    """Which cases to time, and how long."""

    min_samples: int | None = setting(None, help="samples a case and variant at the least", at_least=3)
    max_samples: int | None = setting(None, help="samples a case and variant at the most", at_least=3)
    seconds: float | None = setting(
        None, help="time spent sampling a case and variant, unless min_samples needs more", above=0, duration=True
    )

    retries: int = setting(
        2,
        help="times more that cases are timed which leave a rule of the gate undecided, before that is its verdict",
        at_least=0,
    )

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if self.min_samples and self.max_samples and self.min_samples > self.max_samples:
            mistakes.add(
                node, f"{node.path}: min_samples {self.min_samples} is more than max_samples {self.max_samples}"
            )


@dataclass(frozen=True)
class BuildParitySettings:
    """Phase 1: build, prove parity, measure."""

    device: Device = setting(Device.AUTO, help="auto (the GPU when there is one), cpu or cuda")
    architectures: tuple[str, ...] = setting(
        (), help="must build for all of these; none: the architectures of kernel.yaml"
    )
    optional_architectures: tuple[str, ...] = setting(
        (), help="built where a compiler for them is at hand, else recorded as skipped"
    )
    parity: CaseSelection = setting(help="cases and variants that must be right", factory=CaseSelection)
    benchmark: TimedSelection = setting(help="cases and variants that are timed", factory=TimedSelection)
    anchors: Path | None = setting(
        None,
        help="JSON file with times of other kernels to show beside ours: {about, recorded, rows: [{case, microseconds: {name: us}}]}",
    )
    free_disk_mib: int = setting(500, help="stop before building when less disk space than this is free", at_least=0)

    def check(self, node: Node, mistakes: Mistakes) -> None:
        both = sorted(set(self.architectures) & set(self.optional_architectures))
        if both:
            mistakes.add(
                node, f"{node.path}: {', '.join(both)} cannot be both in architectures and optional_architectures"
            )


@dataclass(frozen=True)
class PhaseSection:
    """One phase of a playbook."""

    kind: PhaseKind
    review: Review
    four_eyes: bool
    rules: tuple[Rule, ...]
    settings: Any  # BuildParitySettings, or what the phase's own reader made
    where: str  # file:line
    digest: str = ""  # SHA-256 of what is measured and judged: gate and settings, not who reviews
    allow_yes: bool = False  # `phase run --yes` may stand in for a person here
    signed_decisions: bool = False  # a yes counts only with the signature of the one it names
    allow_override: bool = False  # `phase gate override` may go on from an INCONCLUSIVE gate

    @property
    def name(self) -> str:
        return self.kind.name


@dataclass(frozen=True)
class Playbook:
    """A loaded playbook. `digest` is the SHA-256 of the file's bytes."""

    name: str
    path: Path
    kernel: Path  # kernel.yaml, absolute
    ledger: LedgerSettings
    phases: tuple[PhaseSection, ...]
    sections: dict[str, Any]  # shared sections by key: fleet, watch
    digest: str
    notes: tuple[str, ...] = ()  # FILE:LINE: what stands there and has no effect any more

    def phase(self, name: str) -> PhaseSection:
        """Raises UsageError with the nearest name when the playbook has no such phase."""
        for section in self.phases:
            if section.name == name:
                return section
        if name in PHASES:
            raise UsageError(
                f"{self.path} has no section for phase {name!r}.",
                hint=f"Add it under 'phases:', or run one of {self.phase_names()}.",
            )
        raise UsageError(f"there is no phase {name!r}{nearest(name, [section.name for section in self.phases])}.")

    def before(self, section: PhaseSection) -> tuple[PhaseSection, ...]:
        """The phases that must have passed before `section` may start."""
        return tuple(other for other in self.phases if other.kind.number < section.kind.number)

    def phase_names(self) -> str:
        return ", ".join(section.name for section in self.phases)
