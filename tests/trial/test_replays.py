"""What broke for others, played again on a clock that is moved by hand: every one passed once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from phases.base.verdict import Verdict
from phases.trial.alive import Ask, Liveness, Stalls
from phases.trial.bake import Bake
from phases.trial.end import Fault, times_as_long
from phases.trial.metrics import as_scrape
from phases.trial.reference import Level, Reference, Traffic
from phases.trial.settings import JudgeSettings, MetricSettings, ReferenceSettings
from phases.trial.soak import Soak
from phases.trial.users import UsersOnly
from tests.production.test_bake import SimulatedProbes, SimulatedTime, SimulatedWorkers

DAY = 86400.0


def judge(**changes: float) -> JudgeSettings:
    values = {"alpha": 0.01, "window": 10.0, "bake": 600.0, "deadline": 1800.0, "min_samples": 100, **changes}
    return JudgeSettings((MetricSettings("ttft", 0.9, 0.25),), **values)  # type: ignore[arg-type]


def bake(workers: SimulatedWorkers, settings: JudgeSettings, **more: object) -> Bake:
    return Bake(
        settings,
        {"c": "canary"},
        {"k": "control"},
        workers.clock,
        more.pop("check", lambda: None),  # type: ignore[arg-type]
        read=workers.read,
        **more,  # type: ignore[arg-type]
    )


class Changing(SimulatedWorkers):
    """Workers that change at given seconds."""

    def __init__(self, clock: SimulatedTime, changes: dict[float, Callable[[SimulatedWorkers], None]]) -> None:
        super().__init__(clock)
        self.started, self.changes = clock.at, dict(changes)

    def read(self, url: str) -> str:
        for at in [at for at in self.changes if self.clock.at - self.started >= at]:
            self.changes.pop(at)(self)
        return super().read(url)


def test_600_of_18000_failed_is_not_within_one_in_a_hundred() -> None:
    """The bound was reached while nothing failed, and was shown at the end beside the failures of the last minutes."""

    def fail(workers: SimulatedWorkers) -> None:
        workers.errors = {"canary": 0.2, "control": 0.19}

    end = bake(Changing(SimulatedTime(), {1500.0: fail}), judge(bake=1800.0, deadline=1800.0)).run()
    errors = next(d for d in end.decisions if d.metric == "5xx")
    assert end.verdict is not Verdict.PASS and errors.verdict is not Verdict.PASS
    assert errors.counts["canary"]["errors"] == pytest.approx(600, rel=0.15) and errors.high > errors.threshold


@pytest.mark.parametrize("own", [False, True], ids=["histograms", "own requests"])
def test_ten_times_slower_in_the_last_five_of_thirty_minutes(own: bool) -> None:
    clock = SimulatedTime()
    probes = SimulatedProbes(clock) if own else None
    begun = clock.at

    def slow(workers: SimulatedWorkers) -> None:
        workers.slowdown = {"canary": 10.0}
        if probes:
            probes.slowdown = 10.0

    settings = JudgeSettings(
        (MetricSettings("e2e" if own else "ttft", 0.9, 0.25),), bake=1800.0, deadline=1800.0, probes=5.0 if own else 0.0
    )
    end = bake(Changing(clock, {1500.0: slow}), settings, probes=probes).run()
    assert end.verdict is Verdict.FAIL, end.reason
    assert 1500 < clock.at - begun <= 1800
    assert "_change" in end.reason or "recent" in end.reason or "at least" in end.reason


def test_what_passes_shows_the_bound_that_decided_on_all_data_and_on_the_recent_part() -> None:
    end = bake(SimulatedWorkers(SimulatedTime()), judge()).run()
    assert end.verdict is Verdict.PASS
    whole, recent, *errors = end.decisions
    assert (whole.statistic, recent.statistic) == ("p90", "p90_recent") and recent.reason.startswith("of the last ")
    for decision in (whole, recent, *errors):
        assert decision.verdict is Verdict.PASS and decision.high is not None and decision.high <= decision.threshold


def test_a_pass_of_the_whole_with_a_recent_part_that_is_not_shown_is_none() -> None:
    """A slowdown within noise of the limit in the recent part: nothing fails, and nothing passes."""
    clock = SimulatedTime()

    def slow(workers: SimulatedWorkers) -> None:
        workers.slowdown = {"canary": 1.25}  # at the limit: no test fails it, none may pass it

    end = bake(Changing(clock, {850.0: slow}), judge(bake=1790.0, deadline=1790.0)).run()
    assert end.verdict is Verdict.INCONCLUSIVE, end.reason


# -- users ----------------------------------------------------------------------------------------------------------------


class Taken(SimulatedWorkers):
    """Workers whose canary the router has left: only own probes come to it, `rate` a second, and are counted as own."""

    def own(self, url: str) -> dict[int, int]:
        return {200: self.answers.get(url, [0, 0])[0]} if url == "canary" else {}


def test_a_canary_whose_only_requests_are_our_own_does_not_pass() -> None:
    """A "share" of 0.876 was made of probes."""
    clock = SimulatedTime()
    workers = Taken(clock)
    settings = JudgeSettings((MetricSettings("e2e", 0.5, 0.25),), bake=60.0, deadline=600.0, probes=10.0)
    end = bake(workers, settings, probes=SimulatedProbes(clock), own=workers.own).run()
    assert end.verdict is Verdict.INCONCLUSIVE and end.requests["canary"] == 0
    assert end.requests["control"] > 1000 and "0 users' requests came to the canary" in end.reason


def test_a_share_outside_its_tolerance_is_said_and_passes_nothing() -> None:
    class Uneven(SimulatedWorkers):
        def read(self, url: str) -> str:
            self.rate = 4.0 if url == "canary" else 16.0
            return super().read(url)

    settings = judge(error_tolerance=0.1, deadline=900.0)
    end = bake(Uneven(SimulatedTime()), settings, share_tolerance=0.15).run()
    assert end.verdict is Verdict.INCONCLUSIVE and "0.4" in end.reason and "of its share" in end.reason
    assert bake(Uneven(SimulatedTime()), settings, share_tolerance=0.7).run().verdict is Verdict.PASS
    assert bake(SimulatedWorkers(SimulatedTime()), settings, share_tolerance=0.15).run().verdict is Verdict.PASS


def _scrape(answered: float, other: float = 0.0, t: float = 0.0):  # type: ignore[no-untyped-def]
    text = (
        "# TYPE sglang:http_responses counter\n"
        f'sglang:http_responses_total{{endpoint="/generate",method="POST",status_code="200"}} {answered}\n'
        f'sglang:http_responses_total{{endpoint="/v1/chat/completions",method="POST",status_code="200"}} {other}\n'
    )
    return as_scrape(text, t=t, source="w1")


def _shown(scrape) -> list[float]:  # type: ignore[no-untyped-def]
    return list(scrape.samples["sglang:http_responses_total"].values())


def test_own_requests_are_taken_out_exactly_and_nothing_goes_back() -> None:
    users = UsersOnly()
    assert _shown(users(_scrape(100, 7), {200: 40})) == [100, 7]  # what was before does not count
    assert _shown(users(_scrape(150, 9), {200: 60})) == [130, 9]
    assert _shown(users(_scrape(150, 9), {200: 63})) == [130, 9]  # ours was counted first: stands still
    assert _shown(users(_scrape(163, 9), {200: 63})) == [140, 9]  # exact again
    assert _shown(users(_scrape(5, 0), {200: 65})) == [5, 0]  # it restarted: our count begins anew
    assert _shown(users(_scrape(9, 0), {200: 68})) == [6, 0]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_of_counting_the_total_is_the_users(seed: int) -> None:
    rng = np.random.default_rng(seed)
    users, server, own, theirs = UsersOnly(), 0, 0, 0
    users(_scrape(0), {200: 0})
    for _ in range(50):
        mine, more = rng.integers(0, 4), int(rng.integers(0, 4))
        early = int(rng.integers(0, mine + 1))
        own += int(mine)
        users(_scrape(server + more + early), {200: own})  # some of ours are not yet in the worker's counter
        server, theirs = server + more + int(mine), theirs + more
        assert _shown(users(_scrape(server), {200: own}))[0] == theirs


# -- alive ----------------------------------------------------------------------------------------------------------------


class Canary:
    """Answers own completions at once until a moment, then never: a scheduler that is stuck under a green /health."""

    def __init__(self, clock: SimulatedTime, stuck_at: float) -> None:
        self.clock, self.stuck_at, self.asked = clock, clock.at + stuck_at, 0

    def submit(self, ask: Ask) -> Future[object]:
        answer: Future[object] = Future()
        self.asked += 1
        if self.clock.at < self.stuck_at:
            answer.set_result(ask())
        return answer


@pytest.mark.parametrize("window", [5.0, 10.0, 40.0])
def test_a_canary_that_stops_answering_25_s_into_a_40_s_bake_does_not_pass(window: float) -> None:
    clock = SimulatedTime()
    canary = Canary(clock, 25.0)
    alive = Liveness({"c": lambda: None, "k": lambda: None}, 10.0, 15.0, clock, canary.submit)

    def fault(silent: tuple[str, str] | None) -> Fault | None:
        return Fault(*silent, incumbent=False) if silent else None

    settings = JudgeSettings(
        (MetricSettings("ttft", 0.9, 4.0),), window=window, bake=40.0, deadline=400.0, min_samples=5,
        alpha=0.2, error_tolerance=0.5,
    )  # fmt: skip
    end = bake(
        SimulatedWorkers(clock), settings, check=lambda: fault(alive.check()), prove=lambda: fault(alive.prove())
    ).run()
    assert end.verdict is Verdict.FAIL and "an own completion has not come" in end.reason, end.reason
    assert end.fault and clock.at - canary.stuck_at < 15 + 2 * max(window, 10) + 1


def test_nothing_passes_beside_a_worker_that_stopped_since_it_was_last_asked() -> None:
    clock = SimulatedTime()
    canary = Canary(clock, 0.5)
    alive = Liveness({"c": lambda: None}, 1000.0, 15.0, clock, canary.submit)
    assert alive.check() is None and canary.asked == 1
    clock.at += 1.0
    assert alive.check() is None  # it is not its turn
    silent = alive.prove()
    assert silent and silent[0] == "c" and canary.asked == 2


def test_a_completion_that_fails_is_a_fault_and_none_are_asked_where_none_are_wanted() -> None:
    clock = SimulatedTime()

    def broken() -> None:
        raise RuntimeError("500")

    def now(ask: Ask) -> Future[object]:
        answer: Future[object] = Future()
        try:
            answer.set_result(ask())
        except RuntimeError as fault:
            answer.set_exception(fault)
        return answer

    assert Liveness({"w": broken}, 0.0, 15.0, clock, now).prove() is None
    silent = Liveness({"w": broken}, 10.0, 15.0, clock, now).prove()
    assert silent == ("w", "an own completion failed: RuntimeError: 500")


def _load(running: int, queued: int, tokens: int, t: float):  # type: ignore[no-untyped-def]
    text = (
        f"sglang:num_running_reqs {running}\nsglang:num_queue_reqs {queued}\nsglang:generation_tokens_total {tokens}\n"
    )
    return as_scrape(text, t=t, source="w1")


def test_requests_that_run_or_wait_without_any_token_are_a_stall() -> None:
    stalls = Stalls(15.0)
    assert stalls.add(_load(2, 0, 100, 0.0)) == ""
    assert stalls.add(_load(2, 0, 140, 10.0)) == ""
    assert stalls.add(_load(0, 3, 140, 20.0)) == ""
    assert "3 requests run or wait in it, and no token came for 16 s" == stalls.add(_load(0, 3, 140, 26.0))
    assert stalls.add(_load(0, 0, 140, 60.0)) == ""  # nothing waits: idle is well
    assert stalls.add(_load(1, 0, 140, 90.0)) == ""  # it may have come just now
    assert stalls.add(_load(1, 0, 140, 106.0)) != "" and stalls.add(_load(1, 0, 141, 107.0)) == ""


# -- against a reference ----------------------------------------------------------------------------------------------------


def _reference(
    clock: SimulatedTime, *, old: float = DAY, rate: float = 10.0, low: float = 0.15, high: float = 0.17
) -> Reference:
    levels = (Level("ttft", 0.9, low, high, 5000),)
    return Reference(levels, "0003-tp8-canary-PASS", "verify_attn", clock.at - old, Traffic(rate))


def _soak(clock: SimulatedTime, reference: Reference, margin: float = 0.5, **more: object) -> Soak:
    workers = Serving(clock, **more)  # type: ignore[arg-type]
    settings = JudgeSettings((MetricSettings("ttft", 0.9, margin),), window=10.0)
    return Soak(settings, reference, {"w1": "w1", "w2": "w2"}, clock, lambda: None, read=workers.read)


class Serving(SimulatedWorkers):
    """Workers that count ended requests too, as SGLang does."""

    def read(self, url: str) -> str:
        text = super().read(url)
        ended = text.replace("time_to_first_token_seconds", "e2e_request_latency_seconds").split("# TYPE sglang:http")[
            0
        ]
        return text + ended


def test_a_soak_passes_only_with_its_whole_range_within_the_limit() -> None:
    clock = SimulatedTime()
    well = _soak(clock, _reference(clock)).run(300.0)
    assert well.verdict is Verdict.PASS, well.reason
    (decision,) = well.decisions
    assert decision.high <= decision.threshold and "0003-tp8-canary-PASS (verify_attn), 24 h old" in decision.source


def test_2_76_between_0_95_and_8_0_at_a_limit_of_1_1_is_no_pass() -> None:
    clock = SimulatedTime()
    wide = _reference(clock, low=0.02, high=0.17)  # coarse buckets: the range holds the limit
    end = _soak(clock, wide, margin=0.1).run(300.0)
    (decision,) = end.decisions
    assert decision.low < 1.1 < decision.high
    assert end.verdict is Verdict.INCONCLUSIVE and "no more time of the same would tell" in end.reason


def test_an_open_soak_says_how_much_longer_it_needs() -> None:
    clock = SimulatedTime()
    end = _soak(clock, _reference(clock, rate=0.6, low=0.165, high=0.17), margin=0.2, rate=0.6).run(120.0)
    assert end.verdict is Verdict.INCONCLUSIVE and "s more of the same would tell" in end.reason, end.reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"old": 8 * DAY}, "is older than 7 days"),
        ({"rate": 100.0}, "rate of requests"),
        ({"rate": 1.0}, "more than 3 times apart"),
    ],
)
def test_a_reference_that_is_old_or_of_other_traffic_passes_nothing(change: dict[str, float], said: str) -> None:
    clock = SimulatedTime()
    end = _soak(clock, _reference(clock, **change)).run(300.0)
    assert end.verdict is Verdict.INCONCLUSIVE and said in end.reason, end.reason


def test_without_a_reference_or_its_traffic_nothing_passes() -> None:
    clock = SimulatedTime()
    none = _soak(clock, Reference()).run(60.0)
    assert none.verdict is Verdict.INCONCLUSIVE and "no reference was recorded" in none.reason
    levels = _reference(clock).levels
    silent = _soak(clock, Reference(levels, "0003", "k", clock.at)).run(300.0)
    assert silent.verdict is Verdict.INCONCLUSIVE and "traffic that was not recorded" in silent.reason


@pytest.mark.parametrize("what", ["prompt", "answer"])
def test_lengths_count_as_traffic(what: str) -> None:
    then, today = Traffic(1.0, 100.0, 50.0), {"rate": 1.0, "prompt": 100.0, "answer": 50.0}
    reference = Reference((Level("ttft", 0.9, 1.0, 1.1, 9),), "0003", "k", 0.0, then)
    fit = ReferenceSettings()
    assert reference.unfit(DAY, Traffic(**today), fit) == ()
    (said,) = reference.unfit(DAY, Traffic(**{**today, what: 4 * today[what]}), fit)
    assert f"mean {what} length" in said and "0003" in said


def test_a_soak_fails_at_once_when_its_range_is_over_the_limit_and_passes_nobody_who_does_not_answer() -> None:
    clock = SimulatedTime()
    begun = clock.at
    end = _soak(clock, _reference(clock), slowdown={"w1": 3.0, "w2": 3.0}).run(3000.0)
    assert end.verdict is Verdict.FAIL and clock.at - begun < 200
    soak = _soak(clock, _reference(clock))
    soak.prove = lambda: Fault("w2", "an own completion has not come for 31 s", incumbent=False)
    assert soak.run(300.0).verdict is Verdict.FAIL


def test_how_many_times_as_long() -> None:
    from phases.analysis.decision import Decision

    rate = Decision(None, "5xx", "excess_rate", "", estimate=0.0, high=0.04, threshold=0.01, unit="rate")
    assert times_as_long(rate) == pytest.approx(16.0)
    ratio = Decision(None, "ttft", "p95", "", estimate=1.0, low=0.9, high=1.21, threshold=1.1)
    assert times_as_long(ratio) == pytest.approx(4.0, rel=0.01)
    for hopeless in (1.2, 0.0, None):
        assert times_as_long(Decision(None, "ttft", "p95", "", estimate=hopeless, high=1.5, threshold=1.1)) is None


@pytest.mark.parametrize("seed", range(12))
def test_no_trial_passes_beside_a_bound_over_its_limit(seed: int) -> None:
    """Whatever happens inside a bake: what passes shows bounds that are all within."""
    rng = np.random.default_rng(seed)

    def change(workers: SimulatedWorkers) -> None:
        workers.slowdown = {"canary": float(rng.choice([1.0, 1.0, 1.15, 1.3, 2.0]))}
        workers.errors = {"canary": float(rng.choice([0.0, 0.0, 0.01, 0.05]))}

    changes = {float(at): change for at in sorted(rng.uniform(0, 900, 2))}
    end = bake(Changing(SimulatedTime(), changes), judge(bake=400.0, deadline=900.0, error_tolerance=0.03)).run()
    for decision in end.decisions:
        if decision.verdict is Verdict.PASS:
            assert decision.high is not None and decision.high <= decision.threshold
    if end.verdict is Verdict.PASS:
        assert {d.verdict for d in end.decisions if d.metric != "4xx"} == {Verdict.PASS} and not end.withheld
