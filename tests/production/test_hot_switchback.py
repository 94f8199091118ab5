"""Turns of candidate and incumbent on the same workers: order, washout, verdicts, faults. The servers are simulated; the tests are real."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict
from phases.playbook import loader
from phases.production.hot import Answer, HotSwitch
from phases.production.settings import Amount
from phases.serving.load import RequestRecord
from phases.tp8_canary.settings import CanarySettings
from phases.trial.arms import choose_arms
from phases.trial.end import Fault
from phases.trial.settings import Design, JudgeSettings, MetricSettings, SwitchbackSettings
from phases.trial.switchback import Clipped, Switchback
from tests.production.test_arms import fleet

EDGES = [0.05 * 1.1**n for n in range(60)]


class Servers:
    """Two simulated workers on one virtual clock: requests at a steady rate, latencies by the kernel that runs.

    Args:
        slow: the candidate's latencies over the incumbent's.
        carry: seconds after a switch (without `switch_resets`: after the start) in which every request takes ten times as long.
    """

    def __init__(self, slow: float = 1.0, carry: float = 0.0, rate: float = 20.0, errors: float = 0.0) -> None:
        self.slow, self.carry, self.rate, self.errors = slow, carry, rate, errors
        self.time, self.arm, self.switched_at, self.switches = 0.0, "canary", 0.0, []
        self.draw = random.Random(5)
        self.counts = {name: [0] * (len(EDGES) + 1) for name in ("w1", "w2")}
        self.failed = dict.fromkeys(self.counts, 0)
        self.finished: list[tuple[str, RequestRecord]] = []
        self.unable, self.at_sleep, self.switch_resets = "", lambda: None, True

    # the clock

    def now(self) -> float:
        return 1000.0 + self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        step = 1 / self.rate
        end = self.time + seconds
        while self.time + step <= end:
            self.time += step
            for name in self.counts:
                self._serve(name)
        self.time = end
        self.at_sleep()

    def _serve(self, name: str) -> None:
        seconds = self.draw.lognormvariate(-1.2, 0.3) * (self.slow if self.arm == "canary" else 1.0)
        if self.time - self.switched_at < self.carry:
            seconds *= 10
        self.counts[name][sum(edge < seconds for edge in EDGES)] += 1
        self.failed[name] += self.arm == "canary" and self.draw.random() < self.errors
        self.finished.append(
            ("", RequestRecord("p", self.now() - seconds, self.now() - seconds, None, self.now(), 200, worker=name))
        )

    # what the bake is given

    def switch(self, arm: str) -> HotSwitch:
        if self.arm != arm and self.switch_resets:
            self.switched_at = self.time
        self.arm = arm
        self.switches.append((self.time, arm))
        to = {"canary": "candidate", "control": "incumbent"}[arm]
        return HotSwitch(to, (Answer("w1", True, ({},), self.unable, 0.01), Answer("w2", True, ({},), "", 0.01)))

    def read(self, url: str) -> str:
        counts, total, lines = self.counts[url], 0, ["# TYPE sglang:e2e_request_latency_seconds histogram"]
        for edge, count in zip([*EDGES, float("inf")], counts, strict=True):
            total += count
            label = "+Inf" if edge == float("inf") else repr(edge)
            lines.append(f'sglang:e2e_request_latency_seconds_bucket{{le="{label}"}} {total}')
        lines += [
            f"sglang:e2e_request_latency_seconds_count {total}",
            f"sglang:e2e_request_latency_seconds_sum {total}",
            "# TYPE sglang:http_responses counter",
            f'sglang:http_responses_total{{endpoint="/generate",status_code="200"}} {total - self.failed[url]}',
            f'sglang:http_responses_total{{endpoint="/generate",status_code="500"}} {self.failed[url]}',
        ]
        return "\n".join(lines) + "\n"

    def take(self) -> list[tuple[str, RequestRecord]]:
        found, self.finished = self.finished, []
        return found


def judge(margin: float = 0.2, deadline: float = 1200.0) -> JudgeSettings:
    return JudgeSettings(
        (MetricSettings("e2e", 0.5, margin),),
        alpha=0.05,
        window=10,
        bake=60,
        deadline=deadline,
        min_samples=50,
        settle=0,
        error_tolerance=0.1,
    )


def bake(
    servers: Servers,
    *,
    own: bool = False,
    check: Callable[[], Fault | None] = lambda: None,
    settings: JudgeSettings | None = None,
    washout: float = 4.0,
    seed: int = 1,
) -> Switchback:
    turns = SwitchbackSettings(period=20, washout=washout, seed=seed)
    return Switchback(
        settings or judge(),
        turns,
        {"w1": "w1", "w2": "w2"},
        servers,
        servers.switch,
        check,
        read=servers.read,
        probes=servers if own else None,
    )


@pytest.mark.parametrize("own", [False, True], ids=["histograms", "own requests"])
@pytest.mark.parametrize(("slow", "outcome"), [(1.0, Verdict.PASS), (1.6, Verdict.FAIL)])
def test_an_equal_candidate_passes_and_a_slow_one_fails(own, slow, outcome):
    made = bake(Servers(slow), own=own)
    verdict = made.run()
    assert verdict.verdict is outcome and verdict.fault is None, verdict.reason
    e2e = next(d for d in verdict.decisions if d.metric == "e2e")
    assert e2e.low <= slow <= e2e.high
    canary, control = verdict.requests["canary"], verdict.requests["control"]
    assert canary > 0 and abs(canary - control) < 0.1 * control
    assert verdict.reference and len(verdict.looks.rows["e2e p50"]) == len(made.order) / 2
    shown = next(row for row in verdict.facts() if row["name"] == "e2e p50")
    first = next(
        look[0]
        for look in shown["looks"]
        if look[2 if outcome is Verdict.FAIL else 3] is not None
        and (look[2] > 1.2 if outcome is Verdict.FAIL else look[3] <= 1.2)
    )
    assert shown["decided_at"] == first > e2e.seconds_to_decide, (
        "the report counts seconds since the bake began, lead-in and both kernels' turns"
    )


def test_blocks_hold_both_kernels_in_an_order_that_the_seed_draws():
    orders = []
    for seed in (1, 1, 2):
        made = bake(Servers(), seed=seed)
        made.run()
        pairs = list(zip(made.order[::2], made.order[1::2], strict=True))
        assert all(set(pair) == {"canary", "control"} for pair in pairs)
        orders.append(pairs[:3])
    assert orders[0] == orders[1]
    long = bake(Servers(), settings=judge(margin=0.0, deadline=2000))
    long.run()
    assert 0.2 < long.order[::2].count("canary") / (len(long.order) / 2) < 0.8


@pytest.mark.parametrize("own", [False, True], ids=["histograms", "own requests"])
def test_what_carries_over_into_a_turn_is_washed_out(own):
    clean = bake(Servers(1.0, carry=3.0), own=own).run()
    assert clean.verdict is Verdict.PASS
    level = clean.reference[0]
    assert level.high < 0.5  # seconds: the slow requests after each switch are in neither arm's numbers


def test_requests_that_take_longer_than_a_turn_are_not_left_out():
    """Else a slow candidate would be judged by its fastest requests, and one slow enough by none."""
    servers = Servers(60.0)
    made = bake(servers, own=True)
    verdict = made.run()
    e2e = next(d for d in verdict.decisions if d.metric == "e2e")
    sent = 2 * servers.rate * 16 * len(made.order) / 2  # by two workers in 16 judged seconds of a turn
    assert verdict.verdict is Verdict.FAIL and e2e.n > 0.95 * sent, verdict.reason


def test_errors_of_the_candidate_alone_fail_it():
    verdict = bake(Servers(errors=0.5)).run()
    assert verdict.verdict is Verdict.FAIL and "5xx" in verdict.reason


def test_too_little_time_is_inconclusive():
    verdict = bake(Servers(1.15, rate=1.0), settings=judge(deadline=120)).run()
    assert verdict.verdict is Verdict.INCONCLUSIVE and verdict.seconds >= 120


def test_servers_that_cannot_be_switched_are_no_verdict_on_the_candidate():
    servers = Servers()
    servers.unable = "VERIFY_ATTN_HOT is off"
    verdict = bake(servers).run()
    assert verdict.verdict is Verdict.INCONCLUSIVE and "VERIFY_ATTN_HOT is off" in verdict.reason and servers.time == 0


def test_a_rank_that_stops_acknowledging_later_is_a_fault():
    servers = Servers()
    servers.at_sleep = lambda: setattr(servers, "unable", "rank 1 still says candidate" if servers.time > 100 else "")
    verdict = bake(servers).run()
    assert verdict.verdict is Verdict.FAIL and "w1: it cannot be switched" in verdict.reason


def test_a_fault_found_between_looks_ends_the_bake():
    servers = Servers()
    found = lambda: Fault("w2", "it does not answer /health", incumbent=False) if servers.time > 50 else None  # noqa: E731
    verdict = bake(servers, check=found).run()
    assert verdict.verdict is Verdict.FAIL and verdict.fault.worker == "w2" and servers.time < 60


def test_checks_take_no_time_from_a_turn_and_its_end_is_checked():
    """SGLang's /health answers after a second: asked three times a turn, it made turns of 10 s last 13.6."""
    servers, checked = Servers(), []

    def check() -> None:
        Servers.sleep(servers, 1.1)
        checked.append(servers.time)

    made = bake(servers, check=check)
    made.run()
    begun = [time for time, _ in servers.switches]
    assert [after - before for before, after in zip(begun[1:], begun[2:])] == pytest.approx([20.0] * (len(begun) - 2))
    assert all(
        any(0 <= switch - time < 0.1 for time in checked) for switch in begun
    )  # what a check may find is seen before the next switch
    assert max(after - before for before, after in zip(checked, checked[1:])) < 6.5


@pytest.mark.parametrize("own", [False, True], ids=["histograms", "own requests"])
def test_what_a_worker_learns_in_the_lead_in_is_judged_in_neither_kernel(own):
    servers = Servers(1.0, carry=25.0)  # ten times as slow for 25 s, whatever runs
    turns = SwitchbackSettings(period=20, washout=4, lead_in=30)
    made = Switchback(
        judge(),
        turns,
        {"w1": "w1", "w2": "w2"},
        servers,
        servers.switch,
        lambda: None,
        read=servers.read,
        probes=servers if own else None,
    )
    servers.switch_resets = False
    verdict = made.run()
    assert servers.switches[0][0] == pytest.approx(30) and verdict.verdict is Verdict.PASS, verdict.reason
    assert (
        verdict.reference[0].high < 0.5 and verdict.seconds < servers.time - 29
    )  # the bake's time is counted from its first turn


def test_a_fault_in_the_lead_in_ends_it_before_any_turn():
    servers = Servers()
    made = Switchback(
        judge(),
        SwitchbackSettings(period=20, washout=4, lead_in=30),
        {"w1": "w1"},
        servers,
        servers.switch,
        lambda: Fault("w1", "it does not answer /health", incumbent=False) if servers.time > 8 else None,
        read=servers.read,
    )
    verdict = made.run()
    assert verdict.verdict is Verdict.FAIL and verdict.fault and not servers.switches and servers.time < 12


def test_a_restart_in_a_turn_is_a_fault_and_no_increase():
    servers = Servers()

    def crash() -> None:
        if 47 < servers.time < 60:
            servers.counts["w1"] = [0] * (len(EDGES) + 1)

    servers.at_sleep = crash
    verdict = bake(servers).run()
    assert verdict.verdict is Verdict.FAIL and "restarted" in verdict.reason


def test_only_what_happens_in_stretches_is_counted():
    from phases.analysis.scrape import Scrape

    def scrape(value: float) -> Scrape:
        return Scrape.parse(
            f'# TYPE http_responses counter\nhttp_responses_total{{status_code="200"}} {value}\n', t=0.0, source="w1"
        )

    clipped = Clipped("w1 canary")
    name = "http_responses_total"
    assert list(clipped.begin(scrape(100)).samples[name].values()) == [0.0]
    assert list(clipped.end(scrape(130), 1.0).samples[name].values()) == [30.0]
    clipped.begin(scrape(500))  # 370 in the other kernel's turn
    assert list(clipped.end(scrape(501), 2.0).samples[name].values()) == [31.0]
    clipped.begin(scrape(600))
    with pytest.raises(AnalysisError, match="restarted"):
        clipped.end(scrape(3), 3.0)


def test_canary_workers_are_their_own_control():
    workers = fleet(4)
    arms = choose_arms(
        workers, CanarySettings(judge(), canary=Amount(count=2), control=Amount(count=1), design=Design.SWITCHBACK)
    )
    assert arms.canary == tuple(workers[:2]) and not arms.control and arms.rest == tuple(workers[2:])


def test_the_playbook_says_so_and_the_plan_restarts_no_control(tmp_path: Path):
    text = (Path(__file__).parents[2] / "playbooks" / "local.yaml").read_text()
    kernel = Path(__file__).parents[2] / "kernels" / "verify_attn" / "kernel.yaml"
    path = tmp_path / "playbook.yaml"
    changed = text.replace("../kernels/verify_attn/kernel.yaml", str(kernel)).replace(
        "    control: {count: 1}\n", "    design: switchback\n    turns: {period: 20, washout: 4}\n"
    )
    assert changed.count("switchback") == 1
    path.write_text(changed)
    section = next(section for section in loader.load(path).phases if section.name == "tp8-canary")
    assert section.settings.design is Design.SWITCHBACK and section.settings.turns.period == 20
    path.write_text(changed.replace("washout: 4", "washout: 15"))
    with pytest.raises(Exception, match="leaves less than half of a period"):
        loader.load(path)
    for turns, said in (
        ("period: 1e6", "two turns take 2e\\+06 s, longer than the judge's deadline"),
        ("lead_in: 30d", "a lead_in takes 2.592e\\+06 s, longer"),
    ):
        path.write_text(changed.replace("period: 20", turns))
        with pytest.raises(Exception, match=said):
            loader.load(path)
