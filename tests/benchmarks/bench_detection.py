"""From the start of a regression in a canary to traffic safe, on real SGLang workers: `python tests/benchmarks/bench_detection.py`.

A canary that is as good as its control starts being slow while it bakes, at once or later: `verify_attn_slow`
(kernels/verify_attn_faults) repeats its attention while a file exists, and the file is made after `--healthy` seconds. The judge is the
playbook's (playbooks/local-regression.yaml), so is the load. How much slower `--work` makes it depends on the machine: see `ratio`. Counted are the seconds from the file to the verdict and to the moment
the router no longer sends the canary anything. The fleet is stopped at the end.

Every request of both arms is written to --records, for `phase analyze` and for asking what another judge would have said.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phases.base.verdict import Verdict
from phases.engines.embedded.down import down
from phases.engines.embedded.fleet import ensure_up
from phases.base.clock import SystemClock
from phases.run.phase_run import PhaseRun
from phases.run.session import adhoc_run
from phases.run.steps import StepContext
from phases.engines.ssh.host import Host
from phases.playbook.loader import load
from phases.playbook.schema import Playbook
from phases.fleet import judging
from phases.fleet import traffic
from phases.trial.arms import choose_arms
from phases.fleet.live import fleet_settings, open_production
from phases.production.production import Production
from phases.production.releases import fleet_releases
from phases.rollback.steps import roll_back
from phases.serving.environment import environment_facts

PLAYBOOK = Path(__file__).parents[2] / "playbooks" / "local-regression.yaml"
PHASE = "tp8-canary"


@dataclass(frozen=True)
class Trial:
    """Seconds from the start of the regression; None where it did not come to that.

    Attributes:
        ratio: median latency of the canary over the control's, from the start to the verdict.
        failed: of `sent` requests of users, from the switch to the end of going back.
    """

    outcome: str
    detected: float | None
    safe: float | None
    restored: float | None
    ratio: float | None
    before: float | None
    sent: int
    failed: int


class Records:
    """Keeps every probe of a bake, with its arm."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._take = judging.ArmProbes.take

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        def take(probes: judging.ArmProbes) -> list[Any]:
            found = self._take(probes)
            self.rows += [{"arm": arm, "t": record.finished, "status": record.status, **record.metrics()} for arm, record in found]
            return found

        judging.ArmProbes.take = take  # type: ignore[method-assign]
        try:
            yield
        finally:
            judging.ArmProbes.take = self._take  # type: ignore[method-assign]

    def ratio(self, metric: str, since: float, until: float) -> float | None:
        """Median of the canary over the control's."""
        arms = {arm: [row[metric] for row in self.rows if row["arm"] == arm and since <= row["t"] <= until and row.get(metric)] for arm in ("canary", "control")}
        return statistics.median(arms["canary"]) / statistics.median(arms["control"]) if all(arms.values()) else None


def main() -> None:
    options = arguments()
    playbook = prepared(load(options.playbook), options.work)
    clock = SystemClock()
    run = dataclasses.replace(adhoc_run(playbook, PHASE, clock), section=playbook.phase(PHASE))
    started = time.monotonic()

    def progress(line: str) -> None:
        print(f"{time.monotonic() - started:7.1f}  {line}", file=sys.stderr, flush=True)

    trials = []
    try:
        with open_production(run, "bench_detection", clock, progress) as production:
            digest = prepare(run, production, progress)
            for number in range(options.repeats):
                if number and time.monotonic() - started > options.minutes * 60:
                    progress(f"{options.minutes} minutes are over: {number} of {options.repeats} repeats done")
                    break
                trials.append(trial(run, production, digest, options, number))
                progress(f"repeat {number + 1}: {trials[-1]}")
    finally:
        down(run.repo, playbook.name, playbook.sections["embedded_fleet"], by="this benchmark", clock=SystemClock(), progress=print, purge=True)
    print_table(trials, options)


def prepared(playbook: Playbook, work: int) -> Playbook:
    """The playbook with a name of its own and a candidate that waits for the file."""
    production = playbook.sections["production"]
    variables = {"VERIFY_ATTN_FAULTS_REPEAT": str(work), "VERIFY_ATTN_FAULTS_WHEN": "file:{root}/slow"}
    candidate = dataclasses.replace(production.candidate, environment={**production.candidate.environment, **variables})
    sections = {**playbook.sections, "production": dataclasses.replace(production, candidate=candidate)}
    return dataclasses.replace(playbook, name="bench-detection", sections=sections)


def prepare(run: PhaseRun, production: Production, progress: Any) -> str:
    """The fleet up on the incumbent, the candidate on the canary's host, the control restarted; the candidate's digest."""
    environment = environment_facts(production.settings.server, progress)
    bundles = fleet_releases(production.settings, run.kernel, environment, progress, run.playbook.path.parent)
    ensure_up(run.playbook.sections["embedded_fleet"], run.repo, run.playbook.name, production, bundles["incumbent"], progress)
    arms = choose_arms(production.workers, run.settings)
    production.push(list(bundles.values()), [*arms.canary, *arms.control])
    return bundles["candidate"].digest


def trial(run: PhaseRun, production: Production, digest: str, options: argparse.Namespace, number: int) -> Trial:
    """Switch the canary, bake, make it slow, wait for the verdict, go back."""
    arms, records, clock = choose_arms(fleet_settings(run).workers(), run.settings), Records(), production.clock
    canary: Host = arms.canary[0]
    slow = Path(canary.root) / "slow"
    slow.unlink(missing_ok=True)
    began: list[float] = []

    def begin() -> None:
        slow.touch()
        began.append(clock.now())
        production.progress("the regression starts")

    timer = threading.Timer(options.healthy, begin)
    context = StepContext(run.work, {}, production.progress, clock)
    with traffic.own_load(run, production) as load, load.during("trial") as shares:
        production.switch(canary, digest)
        with records.kept():
            timer.start()
            verdict = judging.judge(run, production, run.settings.judge, arms.canary, arms.control, digest, context, others=arms.rest)
        detected = clock.now()
        timer.cancel()
        back = roll_back(production, verdict.reason, detected=detected)
    slow.unlink(missing_ok=True)
    options.records.mkdir(parents=True, exist_ok=True)
    (options.records / f"trial-{number + 1}.jsonl").write_text("".join(json.dumps({"began": began[:1], **row}) + "\n" for row in records.rows))
    metric = run.settings.judge.metrics[0].metric
    if not began or verdict.verdict is not Verdict.FAIL:
        return Trial(verdict.verdict.value, None, None, None, None, None, shares[0].sent, shares[0].failed)
    at = {event["event"]: detected + event["at"] - began[0] for event in reversed(back.events)}
    return Trial(verdict.verdict.value, detected - began[0], at.get("traffic safe"), at.get("verified"), records.ratio(metric, began[0], detected),
                 records.ratio(metric, 0.0, began[0]), shares[0].sent, shares[0].failed)  # fmt: skip


def print_table(trials: list[Trial], options: argparse.Namespace) -> None:
    judge = load(options.playbook).phase(PHASE).settings.judge
    shown = ", ".join(f"{m.metric} p{m.quantile * 100:g} margin {m.margin:g}" for m in judge.metrics)
    print(f"judge: {shown}, window {judge.window:g} s, {judge.probes:g} probes/s an arm; attention repeated {options.work} times after {options.healthy:g} s of health")
    print(f"{'repeat':>6} {'outcome':>12} {'before':>7} {'ratio':>6} {'detected s':>10} {'traffic safe s':>14} {'verified s':>10} {'failed/sent':>12}")
    for number, t in enumerate(trials, 1):
        cells = [_cell(t.before, 2), _cell(t.ratio, 2), _cell(t.detected, 1), _cell(t.safe, 1), _cell(t.restored, 1)]
        print(f"{number:6} {t.verdict:>12} {cells[0]:>7} {cells[1]:>6} {cells[2]:>10} {cells[3]:>14} {cells[4]:>10} {t.failed:>6}/{t.sent}")
    found = [t.safe for t in trials if t.safe is not None]
    if found:
        print(f"traffic safe after {statistics.median(found):.0f} s (median), {max(found):.0f} s at the most, in {len(found)} of {len(trials)}")


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no repeat after so many")
    parser.add_argument("--healthy", type=float, default=0.0, help="seconds of health under judgement before the regression; they are evidence that it then has to undo")
    parser.add_argument("--work", type=int, default=16, help="how often the slow kernel does its attention; see the ratio it gives")
    parser.add_argument("--records", type=Path, default=Path("detection-records"), help="directory for the requests of each trial")
    parser.add_argument("--playbook", type=Path, default=PLAYBOOK)
    return parser.parse_args()


if __name__ == "__main__":
    main()
