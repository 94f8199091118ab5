"""`phase rollback` from another terminal while a run bakes its canary: it takes the hosts over, and the run ends by what it finds.

Engine, command line, guards, leases and sglang-router are the real ones; the workers are stand-ins, since restarts of real ones take long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.production.light_fleet import LightFleet

pytestmark = [pytest.mark.slow, pytest.mark.fleet]


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightFleet]:
    made = LightFleet(tmp_path_factory.mktemp("light"), ssh=0, count=3)
    try:
        yield made.up()
    finally:
        made.close()


def test_a_rollback_from_another_terminal_ends_a_bake_and_no_request_fails(fleet: LightFleet) -> None:
    fleet.configure(
        floor=1, probes=0.05, rate=20.0, deadline=600.0
    )  # so few own requests that the bake would go on for minutes
    with fleet.start("run", "tp8-canary", "--yes") as run:
        _await_bake(fleet)
        back = fleet.phase("rollback", "--yes", "--reason", "asked for from another terminal", "--json")
        told = json.loads(back.stdout[back.stdout.index("{") :])
        out, _ = run.communicate(timeout=300)
    assert back.returncode == 0 and told["rollback"]["verified"] and told["rollback"]["moved"] == ["w1"], back.stdout
    assert run.returncode == 7, out
    still_there = "somebody else took over w1 by" in out and "rollback: asked for from another terminal" in out
    assert still_there or "somebody else took over w1, which has been rolled back from elsewhere" in out, out
    assert "failed requests: 0 of" in out
    assert not fleet.not_converged(fleet.digests["incumbent"])


def _await_bake(fleet: LightFleet) -> None:
    """Until the canary's lease is confirmed and the worker has been put back into service."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        state = next(state for state in fleet.states() if state.host.name == "w1")
        if (
            state.current == fleet.digests["candidate"]
            and state.lease
            and state.lease.state == "confirmed"
            and state.in_service
        ):
            return
        time.sleep(0.3)
    raise AssertionError("no canary was put into service")
