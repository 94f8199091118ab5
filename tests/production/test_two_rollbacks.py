"""Rollbacks that meet: one waits for the other, and one that was cut short goes on the same way when it is begun again.

Engine, command line, guards, leases and sglang-router are the real ones; the workers are stand-ins, since restarts of real ones take long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from phases.base.clock import SystemClock
from phases.engines.ssh.errors import ServiceError
from phases.engines.ssh.host import Host
from phases.production.production import ROLLBACK, Production
from phases.rollback import steps as rollback
from phases.rollback.phase import RollbackInterrupted, roll_back_now
from phases.rollback.steps import roll_back
from phases.tp8_canary import steps as canary
from tests.production.light_fleet import LightFleet

pytestmark = [pytest.mark.slow, pytest.mark.fleet]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightFleet]:
    with closing(LightFleet(tmp_path_factory.mktemp("light"), ssh=0, count=3, lease=600.0)) as made:
        yield made.up()


def test_a_second_rollback_waits_for_the_first_and_then_has_nothing_to_do(
    fleet: LightFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_back, tried = Production.go_back, []

    def at_the_second_try(production: Production, host: Host, target: str = "") -> str:
        tried.append(host.name)
        if len(tried) == 1:
            raise ServiceError("the service ended while it was waited for.")  # a run was in the middle of switching it
        return go_back(production, host, target)

    monkeypatch.setattr(Production, "go_back", at_the_second_try)
    killed = fleet.phase("run", "tp8-canary", "--yes", kill=("step-finished", canary.CANARY, "after"))
    assert killed.returncode == -9, killed.stdout
    with fleet.production() as first:
        first.purpose, first.preempt = f"{ROLLBACK} a colleague's", True
        for host in first.workers:
            first.take_lock(first.fleet.session(host))
        second = fleet.start("rollback", "--yes")
        assert second.stdout
        said = iter(second.stdout.readline, "")
        assert any("waiting for the rollback that is at work already" in line for line in said)
        assert [state.host.name for state in fleet.states() if state.current == fleet.digests["candidate"]] == [
            "w1"
        ]  # it has touched nothing
        back = roll_back(first, "a colleague's", detected=first.clock.now(), by_hand=True)
    assert back.verified and tried == ["w1", "w1"]
    out, _ = second.communicate(timeout=300)
    assert second.returncode == 0 and "no worker has strayed: none is restarted" in out, out
    assert not fleet.not_converged(fleet.digests["incumbent"])


def test_a_rollback_cut_short_without_a_router_kept_the_floor_and_goes_on_to_where_it_was_going(
    fleet: LightFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for phase in ("tp8-canary", "full-rollout"):
        done = fleet.phase("run", phase, "--yes")
        assert done.returncode == 0, done.stdout
    batches: list[int] = []
    restored: list[str] = []
    together, go_back = rollback._restore_together, Production.go_back

    def counted(production: Production, hosts: list[Host], *more: object) -> dict[str, str]:
        batches.append(len(hosts))
        return together(production, hosts, *more)  # type: ignore[arg-type]

    def cut_short(production: Production, host: Host, target: str = "") -> str:
        if restored:
            raise KeyboardInterrupt
        restored.append(host.name)
        return go_back(production, host, target)

    monkeypatch.setattr(rollback, "_restore_together", counted)
    monkeypatch.setattr(Production, "go_back", cut_short)
    fleet.stop_router()
    with pytest.raises(RollbackInterrupted, match="workers may run either release. Give it again"):
        roll_back_now(fleet.playbook, to="", reason="p99 doubled", clock=SystemClock(), progress=print)
    assert max(batches) == 1  # three serve and two must stay, though no router says so
    fleet.start_router()
    runs = {state.host.name: state.current for state in fleet.states()}
    assert sorted(runs.values()) == sorted([fleet.digests["incumbent"], *[fleet.digests["candidate"]] * 2]), runs
    done = fleet.phase("rollback", "--yes")
    assert done.returncode == 0, done.stdout
    assert not fleet.not_converged(fleet.digests["incumbent"])
