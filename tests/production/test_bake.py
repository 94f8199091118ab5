"""A bake on metrics made here (a stand-in for workers, so that the truth is known and no time passes)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict
from phases.serving.load import RequestRecord
from phases.trial.bake import Bake
from phases.trial.end import Fault, TrialEnd
from phases.trial.prometheus_source import SourceError
from phases.trial.settings import JudgeSettings, MetricSettings

EDGES = [0.005 * 1.1**i for i in range(70)]


class SimulatedTime:
    """A clock whose sleep advances it."""

    def __init__(self) -> None:
        self.at = 1_000_000.0

    def now(self) -> float:
        return self.at

    monotonic = now

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class SimulatedWorkers:
    """Prometheus text of workers that serve lognormal latencies at a rate, some slowed, some failing."""

    def __init__(
        self,
        clock: SimulatedTime,
        *,
        slowdown: dict[str, float] | None = None,
        errors: dict[str, float] | None = None,
        rate: float = 10.0,
        status: int = 500,
    ) -> None:
        self.clock, self.slowdown, self.errors, self.rate = clock, slowdown or {}, errors or {}, rate
        self.random, self.status = np.random.default_rng(3), status
        self.counts: dict[str, np.ndarray] = {}
        self.answers: dict[str, list[int]] = {}
        self.last: dict[str, float] = {}

    def read(self, url: str) -> str:
        counts = self.counts.setdefault(url, np.zeros(len(EDGES) + 1))
        answers = self.answers.setdefault(url, [0, 0])
        n = self.random.poisson(self.rate * (self.clock.at - self.last.get(url, self.clock.at)))
        self.last[url] = self.clock.at
        values = 0.1 * np.exp(0.4 * self.random.standard_normal(n)) * self.slowdown.get(url, 1.0)
        counts += np.bincount(np.searchsorted(EDGES, values), minlength=len(EDGES) + 1)
        failed = self.random.binomial(n, self.errors.get(url, 0.0))
        answers[0] += n - failed
        answers[1] += failed
        name = "sglang:time_to_first_token_seconds"
        rows = [
            f'{name}_bucket{{le="{edge}"}} {value}'
            for edge, value in zip([*EDGES, "+Inf"], np.cumsum(counts), strict=True)
        ]
        rows += [f"{name}_count {counts.sum()}", f"{name}_sum 1"]
        codes = [
            f'sglang:http_responses_total{{endpoint="/generate",status_code="{code}"}} {value}'
            for code, value in zip((200, self.status), answers, strict=True)
        ]
        return (
            f"# TYPE {name} histogram\n"
            + "\n".join(rows)
            + "\n# TYPE sglang:http_responses counter\n"
            + "\n".join(codes)
            + "\n"
        )


def settings(**changes: float) -> JudgeSettings:
    values = {"alpha": 0.01, "window": 10.0, "bake": 120.0, "deadline": 1800.0, "min_samples": 100, **changes}
    return JudgeSettings((MetricSettings("ttft", 0.9, 0.25),), **values)  # type: ignore[arg-type]


def bake(workers: SimulatedWorkers, check=lambda: None, **changes: float) -> Bake:  # type: ignore[no-untyped-def]
    return Bake(settings(**changes), {"c": "canary"}, {"k": "control"}, workers.clock, check, read=workers.read)


def test_equal_arms_pass_not_before_the_bake_is_over() -> None:
    clock = SimulatedTime()
    verdict = bake(SimulatedWorkers(clock), bake=600.0).run()
    assert verdict.verdict is Verdict.PASS and verdict.seconds >= 600.0
    assert (
        verdict.reference[0].metric == "ttft"
        and verdict.reference[0].low <= 0.1 * np.exp(0.4 * 1.2816) <= verdict.reference[0].high
    )
    assert verdict.requests["canary"] == pytest.approx(verdict.requests["control"], rel=0.1)


def test_a_slow_canary_fails_early() -> None:
    clock = SimulatedTime()
    verdict = bake(SimulatedWorkers(clock, slowdown={"canary": 2.0}, rate=8.0)).run()  # too few for error rates
    assert verdict.verdict is Verdict.FAIL and verdict.seconds < 300.0
    (entry, errors, refusals) = verdict.facts()
    assert (
        entry["verdict"] == "FAIL"
        and entry["looks"]
        and errors["name"] == "5xx excess_rate"
        and refusals["name"] == "4xx excess_rate"
    )
    assert entry["decided_at"] == entry["looks"][-1][0] and refusals["decided_at"] is None
    assert "slowdown" in verdict.reason


def test_errors_of_the_canary_alone_fail() -> None:
    clock = SimulatedTime()
    verdict = bake(SimulatedWorkers(clock, errors={"canary": 0.05})).run()
    assert verdict.verdict is Verdict.FAIL and "5xx" in verdict.reason


def test_a_canary_that_refuses_what_the_control_takes_fails() -> None:
    """4xx are not 5xx, and their difference counts all the same: a kernel under which every JSON request is a 400."""
    clock = SimulatedTime()
    verdict = bake(SimulatedWorkers(clock, errors={"canary": 0.05}, status=400)).run()
    assert verdict.verdict is Verdict.FAIL and "4xx" in verdict.reason and "5xx" not in verdict.reason
    both = bake(SimulatedWorkers(SimulatedTime(), errors={"canary": 0.05, "control": 0.05}, status=400)).run()
    assert both.verdict is Verdict.PASS  # the users' own mistakes come to both arms


def test_a_metrics_server_that_is_down_says_nothing_about_the_canary() -> None:
    clock = SimulatedTime()
    workers = SimulatedWorkers(clock)
    until = clock.at + 60

    def read(url: str) -> str:
        if clock.at > until:
            raise SourceError("Prometheus at x does not answer.")
        return workers.read(url)

    made = bake(workers, deadline=300.0)
    made.read = read
    verdict = made.run()
    assert verdict.verdict is Verdict.INCONCLUSIVE and verdict.fault is None and "was not scraped for" in verdict.reason


def test_no_traffic_ends_inconclusive_at_the_deadline() -> None:
    clock = SimulatedTime()
    verdict = bake(SimulatedWorkers(clock, rate=0.0), deadline=300.0).run()
    assert verdict.verdict is Verdict.INCONCLUSIVE and verdict.seconds == pytest.approx(300.0, abs=10.0)


@pytest.mark.parametrize(("incumbent", "outcome"), [(False, Verdict.FAIL), (True, Verdict.INCONCLUSIVE)])
def test_a_fault_ends_it_at_once_and_a_sick_incumbent_is_not_the_candidates_fault(
    incumbent: bool, outcome: Verdict
) -> None:
    clock = SimulatedTime()
    seen = iter([None, None, Fault("c", "it does not answer", incumbent)])
    verdict = bake(SimulatedWorkers(clock), check=lambda: next(seen)).run()
    assert (
        verdict.verdict is outcome
        and verdict.seconds == pytest.approx(20.0)
        and verdict.reason == "c: it does not answer"
    )


def test_a_worker_whose_metrics_stay_away_is_a_fault() -> None:
    clock = SimulatedTime()
    workers = SimulatedWorkers(clock)
    started = clock.at

    def read(url: str) -> str:
        if url == "canary" and clock.at > started + 30:
            raise AnalysisError("canary/metrics cannot be read")
        return workers.read(url)

    made = bake(workers)
    made.read = read
    verdict = made.run()
    assert (
        verdict.verdict is Verdict.FAIL
        and verdict.fault is not None
        and "metrics cannot be read" in verdict.fault.reason
    )


GARBAGE = {
    "no metrics at all": "<html>502 Bad Gateway</html>",
    "half a line": 'sglang:http_responses_total{endpoint="/gen',
    "no number": 'sglang:http_responses_total{endpoint="/generate",status_code="200"} NaN\n',
    "infinite": 'sglang:http_responses_total{endpoint="/generate",status_code="200"} +Inf\n',
    "below zero": 'sglang:http_responses_total{endpoint="/generate",status_code="200"} -5\n',
}


@pytest.mark.parametrize("what", GARBAGE)
def test_metrics_that_turn_to_garbage_are_a_fault_of_their_worker_and_no_crash(what: str) -> None:
    clock = SimulatedTime()
    workers = SimulatedWorkers(clock)
    started = clock.at
    made = bake(workers)
    made.read = lambda url: GARBAGE[what] if url == "canary" and clock.at > started + 30 else workers.read(url)
    verdict = made.run()
    assert verdict.verdict is Verdict.FAIL and verdict.fault and verdict.fault.worker == "c", verdict.reason
    assert "metrics cannot be read" in verdict.fault.reason


class SimulatedProbes:
    """Own requests to each arm, `rate` a second, some of one arm without any answer."""

    def __init__(
        self,
        clock: SimulatedTime,
        *,
        slowdown: float = 1.0,
        unanswered: float = 0.0,
        rate: float = 5.0,
        hanging: int = 0,
    ) -> None:
        self.hanging = hanging
        self.clock, self.slowdown, self.unanswered, self.rate = clock, slowdown, unanswered, rate
        self.random = np.random.default_rng(5)
        self.last = clock.at

    def waiting(self, seconds: float) -> dict[str, int]:
        return {"canary": self.hanging, "control": 0}

    def take(self) -> list[tuple[str, RequestRecord]]:
        found = []
        for arm, slowdown in (("canary", self.slowdown), ("control", 1.0)):
            for finished in sorted(
                self.random.uniform(
                    self.last, self.clock.at, self.random.poisson(self.rate * (self.clock.at - self.last))
                )
            ):
                due = finished - 0.1 * np.exp(0.4 * self.random.standard_normal()) * slowdown
                lost = arm == "canary" and self.random.random() < self.unanswered
                found.append(
                    (arm, RequestRecord("p", due, due, None if lost else due + 0.01, finished, 0 if lost else 200))
                )
        self.last = self.clock.at
        return found


def probed(clock: SimulatedTime, probes: SimulatedProbes, **workers: Any) -> TrialEnd:
    made = JudgeSettings(
        (MetricSettings("e2e", 0.5, 0.25),),
        window=5.0,
        bake=30.0,
        deadline=600.0,
        min_samples=100,
        error_tolerance=0.05,
    )
    simulated = SimulatedWorkers(clock, **workers)
    return Bake(made, {"c": "canary"}, {"k": "control"}, clock, lambda: None, read=simulated.read, probes=probes).run()


def test_with_probes_their_latencies_decide_and_the_users_errors_still_count() -> None:
    clock = SimulatedTime()
    equal = probed(clock, SimulatedProbes(clock))
    assert equal.verdict is Verdict.PASS and equal.decisions[0].source == "own requests to each arm"
    assert probed(clock, SimulatedProbes(clock, slowdown=1.8)).verdict is Verdict.FAIL
    failing = probed(
        clock, SimulatedProbes(clock), errors={"canary": 0.2}
    )  # no probe fails: it is users' requests that do
    assert failing.verdict is Verdict.FAIL and "5xx" in failing.reason


def test_own_requests_without_an_answer_are_errors_though_no_counter_knows_of_them() -> None:
    clock = SimulatedTime()
    verdict = probed(clock, SimulatedProbes(clock, unanswered=0.15))
    assert verdict.verdict is Verdict.FAIL and "5xx" in verdict.reason


def test_the_reference_is_kept_by_kind_of_worker_and_without_the_canary() -> None:
    clock = SimulatedTime()
    workers = SimulatedWorkers(clock, slowdown={"large": 3.0})
    made = bake(workers, bake=300.0)
    made.others, made.kinds = {"big": "large"}, {"c": "tp 1", "k": "tp 1", "big": "tp 8"}
    end = made.run()
    small, large = end.reference
    assert (small.kind, large.kind) == ("tp 1", "tp 8") and large.low > 2 * small.high
    assert small.n == pytest.approx(10 * end.seconds, rel=0.15)  # the control's alone


def test_own_requests_that_hang_count_against_the_canary_before_they_end() -> None:
    """Those that ended were all well: what has no end is no success."""
    clock = SimulatedTime()
    hanging = probed(clock, SimulatedProbes(clock, hanging=1000))
    assert hanging.verdict is Verdict.INCONCLUSIVE and "1000 own requests to the canary wait" in hanging.reason
