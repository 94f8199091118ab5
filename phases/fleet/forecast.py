"""What a production phase would cost and could see, before it starts: `phase plan` prints it.

Everything is read from the playbook, and from what was recorded: the times of the steps of the latest run that came to its end on this
machine, and the intervals of the latest passed canary, or an A/A recording. What nothing is recorded of is said to be unknown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from phases.analysis import power
from phases.analysis.counts import clean_requests
from phases.analysis.records import Records
from phases.base.errors import AnalysisError, JournalError
from phases.base.results import Results
from phases.engines.ssh.host import Host
from phases.fleet.live import fleet_settings
from phases.full_rollout import steps as waves
from phases.ledger.checkpoint import RESULTS, Checkpoint
from phases.playbook.schema import Playbook
from phases.production.settings import ProductionSettings
from phases.run import journal, run_directory
from phases.run.closing import ledger_of
from phases.run.phase_run import PhaseRun
from phases.run.progress import of_playbook
from phases.tp8_canary import steps as canary
from phases.trial.arms import batches, like_for_like
from phases.trial.settings import Design, JudgeSettings, MetricSettings

REPLAYS = 100  # of an A/A recording: a plan is asked for often, and its answer is one of a few slowdowns anyway


@dataclass(frozen=True)
class Moved:
    """What one step does to the fleet.

    Attributes:
        hosts: workers that are restarted. share: share of requests that the candidate serves after it, 0 to 1, if the router spreads evenly.
    """

    step: str
    hosts: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Sight:
    """The smallest slowdown a gate can see by the end of its shortest bake, as a factor; None where nothing tells.

    Attributes:
        gate: whose it is. source: what says so, or what is missing.
    """

    gate: str
    metric: str
    slowdown: float | None
    source: str


@dataclass(frozen=True)
class Forecast:
    """Durations are seconds.

    Attributes:
        moved: step by step. untouched: workers no step restarts.
        shortest, longest: from the playbook: nothing waits, or everything takes as long as it may.
        expected: from the times of an earlier run, None without one; `expected_from` names it.
        tolerance: excess share of failed requests that is acceptable.
        clean: requests each arm needs, none of them failed, before its error rate can pass; None: it never can.
        own: own requests judged of each arm by the deadline; what else the workers serve counts too.
    """

    moved: tuple[Moved, ...]
    untouched: tuple[str, ...]
    shortest: float
    longest: float
    expected: float | None
    expected_from: str
    tolerance: float
    clean: int | None
    own: int
    sights: tuple[Sight, ...] = field(default=())

    @property
    def exposed(self) -> float:
        """The largest share of requests that the candidate serves at any time of the phase."""
        return max((step.share for step in self.moved), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "exposed": self.exposed}


def forecast(run: PhaseRun, recording: Records | None = None, rate: float | None = None) -> Forecast | None:
    """The forecast of a phase that changes production; None for one that does not.

    Args:
        recording: request records of two equal arms. rate: requests a second of an arm to expect; as recorded when absent.
    Raises:
        AnalysisError: the recording has too little, or not the metrics that are judged.
        UsageError: the playbook's fleet cannot be split as it asks.
    """
    if not run.section.kind.changes_production:
        return None
    production: ProductionSettings | None = run.playbook.sections.get("production")
    fleet = fleet_settings(run)
    workers = fleet.workers()
    if production is None:
        return None
    floor = production.min_available.of(len(workers))
    once = fleet.service.drain + fleet.service.ready  # one batch of restarts, at the longest
    judge: JudgeSettings = run.settings.judge
    if run.section.name == "tp8-canary":
        moved, gates, restarts = _canary(run, len(workers), floor)
        watched = run.settings.turns.lead_in if run.settings.design is Design.SWITCHBACK else 0.0
    else:
        moved, gates, restarts = _waves(run, workers, floor)
        watched = run.settings.soak
    touched = {name for step in moved for name in step.hosts}
    expected, expected_from = _recorded_time(run)
    sights = tuple(
        _sight(gate, metric, judge, run.playbook, recording, rate) for gate in gates for metric in judge.metrics
    )
    return Forecast(
        moved,
        tuple(host.name for host in workers if host.name not in touched),
        len(gates) * judge.bake + watched,
        restarts * once + len(gates) * judge.deadline + watched,
        expected,
        expected_from,
        judge.error_tolerance,
        clean_requests(judge.error_tolerance, judge.share),
        _own_requests(run),
        sights,
    )


def _own_requests(run: PhaseRun) -> int:
    judge: JudgeSettings = run.settings.judge
    share = 1.0
    if (
        getattr(run.settings, "design", None) is Design.SWITCHBACK
    ):  # half of the turns are an arm's, and of each what is left after the washout
        turns = run.settings.turns
        share = (1 - turns.washout / turns.period) / 2
    return round(judge.probes * judge.deadline * share)


def _canary(run: PhaseRun, workers: int, floor: int) -> tuple[tuple[Moved, ...], list[str], int]:
    arms = canary.arms_of(run)
    names = tuple(host.name for host in arms.canary)
    moved = (
        Moved(canary.CONTROL, tuple(host.name for host in arms.control), 0.0),
        Moved(canary.CANARY, names, arms.share),
        Moved(canary.END, names, 0.0),
    )
    moved = tuple(step for step in moved if step.hosts)  # in the switchback design nobody is control
    restarts = len(batches(arms.control, workers, floor)) + 2 * len(batches(arms.canary, workers, floor))
    return moved, [canary.BAKE], restarts


def _waves(run: PhaseRun, workers: Sequence[Host], floor: int) -> tuple[tuple[Moved, ...], list[str], int]:
    planned = waves.waves_of(run)
    moved, gates, on, restarts = [], [], 0, 0
    for number, moving in enumerate(planned, 1):
        on += len(moving)
        moved.append(Moved(waves.wave_name(number), tuple(host.name for host in moving), on / len(workers)))
        restarts += len(batches(moving, len(workers), floor))
        if like_for_like(moving, [host for later in planned[number:] for host in later])[0]:
            gates.append(waves.wave_name(number))
    return tuple(moved), gates, restarts


# -- what was recorded ----------------------------------------------------------------------------------------------------


def _recorded_time(run: PhaseRun) -> tuple[float | None, str]:
    """Seconds all steps of the latest finished attempt took, with what it was; the waiting for a killed process does not count."""
    state = run.repo / ".phase"
    for attempt in reversed(
        run_directory.attempts(state, run.playbook.name, run.section.name) if state.is_dir() else []
    ):
        try:
            records = journal.read(attempt.journal, attempt.record.run_id)
        except JournalError:
            continue
        if any(record.event == "run-finished" for record in records):
            seconds = {record.step: record.data["seconds"] for record in records if record.event == "step-finished"}
            return sum(seconds.values()), f"the steps of {attempt.record.run_id}"
    return None, "no run of this phase has come to its end on this machine"


def _sight(
    gate: str,
    metric: MetricSettings,
    judge: JudgeSettings,
    playbook: Playbook,
    recording: Records | None,
    rate: float | None,
) -> Sight:
    name = f"{metric.metric} p{metric.quantile * 100:g}"
    if recording is not None:
        return Sight(gate, name, *_by_recording(metric, judge, recording, rate))
    passed = [
        c
        for c in ledger_of(playbook).survey()[0]
        if c.phase == "tp8-canary" and c.verdict.advances and of_playbook(c, playbook)
    ]
    if not passed:
        return Sight(
            gate,
            name,
            None,
            "nothing is recorded yet: no canary has passed, and no A/A recording was given (--a-a FILE)",
        )
    return Sight(gate, name, *_by_canary(name, metric, judge, playbook, passed[-1]))


def _by_recording(
    metric: MetricSettings, judge: JudgeSettings, recording: Records, rate: float | None
) -> tuple[float | None, str]:
    """By the test itself, run on resampled stretches of two equal arms (`phases.analysis.power`)."""
    arms = recording.get(metric.metric, {})
    if len(arms) < 2:
        raise AnalysisError(
            f"the A/A recording has no {metric.metric} of both arms.",
            hint=f"It has {', '.join(recording) or 'nothing'}; record what the playbook judges.",
        )
    settings = judge.test(metric)
    made = power.Recording.of(arms["canary"], arms["control"], settings)
    settings = replace(settings, dispersion=power.dispersion(made, settings))
    seen = power.detectable(made, settings, judge.bake, rate=rate, replays=REPLAYS)
    said = f"A/A recording of {made.seconds:.0f} s at {rate or made.rate:.3g} requests/s an arm, found with 95 % probability within {judge.bake:g} s"
    return seen, said if seen else f"{said}: none up to {power.SLOWDOWNS[-1]:g}"


def _by_canary(
    name: str, metric: MetricSettings, judge: JudgeSettings, playbook: Playbook, checkpoint: Checkpoint
) -> tuple[float | None, str]:
    """By how wide the interval was after as long a bake: a slowdown is found when even the interval's lower end is over the margin."""
    results = Results.from_json(json.loads(ledger_of(playbook).files(checkpoint)[RESULTS]))
    row = next((row for row in results.facts.get("sequential", []) if row["name"].startswith(name)), None)
    looks = [
        look for look in (row or {}).get("looks", []) if look[1] is not None and look[2] is not None and look[2] > 0
    ]
    within = [look for look in looks if look[0] <= judge.bake] or looks[:1]
    if not within:
        return None, f"{checkpoint.name} recorded no interval of {name}"
    elapsed, estimate, low, _ = within[-1]
    return (
        1 + metric.margin
    ) * estimate / low, f"the interval of {checkpoint.name} after {elapsed:.0f} s; expect that one more often than not"
