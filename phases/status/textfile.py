"""The state of a playbook as a Prometheus textfile, for the textfile collector of node_exporter.

Times are moments (seconds since the epoch), so that `time() - phasegate_waiting_since_timestamp_seconds` is right however long ago
the file was written. Every metric has the label `playbook`.

| metric | labels | value |
|---|---|---|
| phasegate_info | kernel, version | 1 |
| phasegate_status_timestamp_seconds | | when this file was written |
| phasegate_ledger_damaged | | 1 where the ledger cannot be read; then phases, last good and rollbacks are absent |
| phasegate_phase_state | phase, state | 1 for the state the phase is in, 0 for the others |
| phasegate_phase_verdict | phase, verdict | 1 for the verdict of its newest checkpoint, 0 for the others |
| phasegate_phase_recorded_timestamp_seconds | phase | when that checkpoint was recorded |
| phasegate_waiting_since_timestamp_seconds | phase | since when a review is waited for; absent when none is |
| phasegate_run_active | | 1 while a run holds the playbook's lock on this machine |
| phasegate_run_started_timestamp_seconds | | since when; absent when none does |
| phasegate_runs_unfinished | | runs on this machine that were cut off and can be resumed |
| phasegate_last_exit_code | phase | exit code of the phase's latest finished run on this machine |
| phasegate_last_good_info | release, checkpoint | 1 for the release the newest passed full rollout made last-good |
| phasegate_last_good_timestamp_seconds | | when that was |
| phasegate_rolled_back_timestamp_seconds | checkpoint | when the newest rollback was recorded; absent when there was none |
| phasegate_rollback_verified | checkpoint | 1: it was observed to be complete; 0: a person is needed, also for what one before it left unrestored; absent where the fleet was taken down since |
| phasegate_worker_reachable | worker | 1: the host answered (workers only when the fleet was asked) |
| phasegate_worker_serving | worker | 1: it answers /health; absent when not asked |
| phasegate_worker_in_service | worker | 1: the router sends it requests; absent when the router does not say |
| phasegate_worker_on_last_good | worker | 1: it runs what a rollback would go to |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phases import __version__
from phases.base.errors import PhaseError
from phases.base.files import explain
from phases.playbook.typed import setting

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from phases.base.clock import Clock
    from phases.playbook.schema import Playbook
    from phases.status.fleet_view import FleetLook
    from phases.status.overview import Overview

SUFFIX = ".prom"  # of the files that node_exporter reads; it passes over all others


@dataclass(frozen=True)
class MetricsSettings:
    """State for Prometheus, written anew whenever a command changes it."""

    textfile: Path = setting(
        help="a .prom file in the directory of node_exporter's textfile collector; from the playbook's directory"
    )

    def check(self, node: Any, mistakes: Any) -> None:
        if self.textfile.suffix != SUFFIX:
            mistakes.add(
                node.get("textfile") or node, f"{node.path}: node_exporter reads only files that end in {SUFFIX}"
            )


def write(path: Path, overview: Overview, look: FleetLook | None = None) -> None:
    """Replace the file in one step. Raises PhaseError when it cannot be written."""
    from prometheus_client import write_to_textfile

    try:
        if path.exists() and not path.is_file():  # the new file would take the place of a device, /dev/stdout say
            raise PhaseError(
                f"the metrics cannot be written: {path} is no ordinary file.",
                hint="Name a .prom file in the directory of node_exporter's textfile collector.",
            )
        write_to_textfile(str(path), registry(overview, look))
    except OSError as fault:
        message, hint = explain(fault)
        raise PhaseError(f"the metrics cannot be written: {message}", hint=hint) from fault


def keep_written(playbook: Playbook, clock: Clock, warn: Callable[[str], None]) -> None:
    """Write the textfile if the playbook wants one. A fault is a warning: no run or rollback may fail by it."""
    settings: MetricsSettings | None = playbook.sections.get("metrics")
    if settings is None:
        return
    from phases.run.closing import ledger_of
    from phases.status.overview import gather

    try:
        write(playbook.path.parent / settings.textfile, gather(playbook, ledger_of(playbook), clock))
    except (PhaseError, OSError) as fault:
        warn(str(fault))


def registry(overview: Overview, look: FleetLook | None = None) -> CollectorRegistry:
    """All metrics of one moment."""
    gauges = _Gauges(overview.playbook.name)
    gauges.add("info", "Version of the toolkit that wrote this.", 1, kernel=_kernel(overview), version=__version__)
    gauges.add("status_timestamp_seconds", "When this file was written.", overview.at)
    gauges.add("ledger_damaged", "1 where the ledger cannot be read.", int(bool(overview.damaged)))
    _phases(gauges, overview)
    _runs(gauges, overview)
    _production(gauges, overview)
    if look is not None:
        _workers(gauges, look)
    return gauges.registry


class _Gauges:
    """Gauges by name, each made when its first sample comes."""

    def __init__(self, playbook: str) -> None:
        from prometheus_client import CollectorRegistry

        self.registry, self.playbook = CollectorRegistry(), playbook
        self._known: dict[str, Any] = {}

    def add(self, name: str, text: str, value: float, **labels: str) -> None:
        from prometheus_client import Gauge

        if name not in self._known:
            self._known[name] = Gauge(f"phasegate_{name}", text, ["playbook", *labels], registry=self.registry)
        self._known[name].labels(self.playbook, *labels.values()).set(value)


def _phases(gauges: _Gauges, overview: Overview) -> None:
    from phases.base.verdict import Verdict
    from phases.run.progress import State

    for standing in overview.phases:
        phase, checkpoint = standing.section.name, standing.checkpoint
        for state in State:
            gauges.add(
                "phase_state",
                "State of a phase.",
                standing.state is state,
                phase=phase,
                state=state.value.replace(" ", "-"),
            )
        if checkpoint is None:
            continue
        for verdict in Verdict:
            gauges.add(
                "phase_verdict",
                "Verdict of a phase's newest checkpoint.",
                checkpoint.verdict is verdict,
                phase=phase,
                verdict=verdict.value,
            )
        gauges.add(
            "phase_recorded_timestamp_seconds",
            "When a phase's newest checkpoint was recorded.",
            checkpoint.recorded_at,
            phase=phase,
        )
    for row in overview.waiting:
        gauges.add("waiting_since_timestamp_seconds", "Since when a review is waited for.", row.since, phase=row.phase)


def _runs(gauges: _Gauges, overview: Overview) -> None:
    gauges.add("run_active", "Whether a run holds the playbook's lock on this machine.", overview.running is not None)
    if overview.running:
        gauges.add("run_started_timestamp_seconds", "When that run took the lock.", overview.running.since)
    gauges.add(
        "runs_unfinished",
        "Runs on this machine that were cut off.",
        len(overview.unfinished) if overview.running is None else 0,
    )
    for phase, code in overview.exits:
        gauges.add("last_exit_code", "Exit code of a phase's latest finished run on this machine.", code, phase=phase)


def _production(gauges: _Gauges, overview: Overview) -> None:
    good, back = overview.last_good, overview.rolled_back
    if good:
        gauges.add(
            "last_good_info",
            "The release made last-good by a full rollout.",
            1,
            release=good.release,
            checkpoint=good.checkpoint,
        )
        gauges.add("last_good_timestamp_seconds", "When that release was made last-good.", good.at)
    if back:
        gauges.add(
            "rolled_back_timestamp_seconds",
            "When the newest rollback was recorded.",
            back.at,
            checkpoint=back.checkpoint,
        )
        if back.verified or overview.left_to_restore:
            gauges.add(
                "rollback_verified",
                "Whether that rollback was observed to be complete, and none before it left a worker unrestored.",
                back.verified and not overview.left_to_restore,
                checkpoint=back.checkpoint,
            )


def _workers(gauges: _Gauges, look: FleetLook) -> None:
    for worker in look.workers:
        asked = bool(worker.current or worker.last_good) or not worker.problem
        gauges.add("worker_reachable", "Whether the worker's host answered.", asked, worker=worker.name)
        for name, value in (("worker_serving", worker.serving), ("worker_in_service", worker.in_service)):
            if value is not None:
                gauges.add(name, "Whether a worker is well, or gets requests.", value, worker=worker.name)
        if worker.current and worker.last_good:
            gauges.add(
                "worker_on_last_good",
                "Whether a worker runs what a rollback goes to.",
                worker.current == worker.last_good,
                worker=worker.name,
            )


def _kernel(overview: Overview) -> str:
    from phases.harness import contract

    return contract.load(overview.playbook.kernel).name
