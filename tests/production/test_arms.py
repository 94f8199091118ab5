"""Who is canary, who moves when, and how many may be out of service: pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phases.base.errors import UsageError
from phases.engines.ssh.host import Host
from phases.full_rollout.settings import RolloutSettings
from phases.playbook.located import Mistakes, load_text
from phases.playbook.typed import read
from phases.production.settings import Amount
from phases.tp8_canary.settings import CanarySettings
from phases.trial.arms import batches, choose_arms, kinds_of, like_for_like, waves
from phases.trial.settings import JudgeSettings, MetricSettings

JUDGE = JudgeSettings((MetricSettings("ttft"),))


def fleet(count: int, **labels: str) -> list[Host]:
    return [Host(f"w{number}", "local", f"/srv/w{number}", labels=labels) for number in range(1, count + 1)]


def test_canary_and_control_are_different_workers_of_one_kind() -> None:
    workers = fleet(2, tp="1") + [Host("big", "local", "/srv/big", labels={"tp": "8"})]
    arms = choose_arms(workers, CanarySettings(JUDGE))
    assert [h.name for h in arms.canary] == ["w1"] and [h.name for h in arms.control] == ["w2"]
    assert [h.name for h in arms.rest] == ["big"] and arms.share == pytest.approx(1 / 3)


def test_labels_choose_and_a_control_of_another_kind_is_refused() -> None:
    workers = fleet(2, tp="1") + [Host("big", "local", "/srv/big", labels={"tp": "8"})]
    with pytest.raises(UsageError, match="not enough for 1 canary and 1 control workers of the same kind"):
        choose_arms(workers, CanarySettings(JUDGE, labels={"tp": "8"}))
    with pytest.raises(UsageError, match="no worker has the labels"):
        choose_arms(workers, CanarySettings(JUDGE, labels={"tp": "4"}))


@given(st.integers(1, 40), st.lists(st.floats(1, 100), max_size=4), st.integers(0, 5))
def test_waves_move_everybody_once(count: int, percents: list[float], already: int) -> None:
    workers = fleet(count)
    moved = [host.name for host in workers[: min(already, count)]]
    planned = waves(workers, [*(Amount(percent=p) for p in sorted(percents)), Amount(percent=100)], moved)
    names = [host.name for wave in planned for host in wave]
    assert sorted(names + moved) == sorted(host.name for host in workers)
    assert all(planned)


@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 30))
def test_a_batch_never_goes_under_the_floor(moving: int, others: int, floor: int) -> None:
    workers = fleet(moving)
    in_service = moving + others
    if in_service - floor < 1:
        with pytest.raises(UsageError, match="min_available"):
            batches(workers, in_service, floor)
        return
    planned = batches(workers, in_service, floor)
    assert [h for batch in planned for h in batch] == workers
    assert all(in_service - len(batch) >= floor for batch in planned)


@pytest.mark.parametrize(
    ("amount", "fleet_size", "wanted"),
    [
        (Amount(count=2), 8, 2),
        (Amount(count=9), 8, 8),
        (Amount(percent=25), 8, 2),
        (Amount(percent=30), 8, 3),
        (Amount(percent=0), 8, 0),
        (Amount(percent=100), 8, 8),
    ],
)
def test_amounts(amount: Amount, fleet_size: int, wanted: int) -> None:
    assert amount.of(fleet_size) == wanted


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (Amount, "{count: 1, percent: 5}", "exactly one of count and percent"),
        (
            CanarySettings,
            "{canary: {count: 0}, judge: {metrics: [{metric: ttft}]}}",
            "canary needs at least one worker",
        ),
        (CanarySettings, "{judge: {metrics: [{metric: latency}]}}", "must be one of ttft, itl, e2e, tpot"),
        (CanarySettings, "{judge: {metrics: []}}", "at least one entry"),
        (CanarySettings, "{judge: {metrics: [{metric: ttft}], bake: 10m, deadline: 5m}}", "before the end of the bake"),
        (
            RolloutSettings,
            "{judge: {metrics: [{metric: ttft}]}, waves: [{percent: 50}]}",
            "the last wave must be percent: 100",
        ),
    ],
)
def test_mistakes_are_named(kind: type, text: str, said: str) -> None:
    mistakes = Mistakes()
    read(kind, load_text(text, "playbook.yaml", mistakes), mistakes)
    assert said in "\n".join(map(str, mistakes))


def test_a_wave_is_compared_with_as_many_unmoved_workers_of_each_kind() -> None:
    small, large = (
        fleet(4, tp="1"),
        [
            Host("big", "local", "/srv/big", labels={"tp": "8"}),
            Host("bigger", "local", "/srv/bigger", labels={"tp": "8"}),
        ],
    )
    canary, control = like_for_like([*small[:3], large[0]], [small[3], large[1]])
    assert [h.name for h in canary] == ["w1", "big"] and [h.name for h in control] == ["w4", "bigger"]
    assert like_for_like([large[0]], small) == ((), ())  # no like worker is left
    assert kinds_of([*small, *large])["big"] == "tp 8" and set(kinds_of(small).values()) == {""}
