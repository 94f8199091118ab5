"""`phase fleet adopt`: a fleet that the toolkit has put nothing on yet, with stand-in workers behind the real router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.ssh.sshfleet import SSHD
from tests.production.light_fleet import LightFleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.skipif(not SSHD, reason="sshd is not installed (package openssh-server)"),
]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LightFleet]:
    fleet = LightFleet(tmp_path / "light", ssh=1, count=3).prepare()
    fleet.start_router()
    yield fleet
    fleet.close()


def test_a_bare_fleet_is_adopted_and_then_a_phase_may_run(fleet):
    assert fleet.phase("fleet", "adopt").returncode != 0  # nobody there to answer
    assert all(state.current == "none" for state in fleet.states())
    done = fleet.phase("fleet", "adopt", "--yes", "--json")
    assert done.returncode == 0, done.stdout
    answer = json.loads(done.stdout[done.stdout.index("{\n") if "{\n" in done.stdout else done.stdout.rindex("{") :])
    assert answer["adopted"] == ["w1", "w2", "w3"] and answer["there"] == []
    states = fleet.states()
    assert all(state.serving and state.in_service and state.current == state.last_good for state in states)
    assert len({state.current for state in states}) == 1
    again = fleet.phase("fleet", "adopt", "--yes")
    assert again.returncode == 0 and "Adopted nobody; w1, w2, w3 had a release." in again.stdout
    assert {state.current for state in fleet.states()} == {states[0].current}
    assert fleet.phase("run", "tp8-canary", "--yes").returncode in (0, 5)


def test_one_that_does_not_come_up_is_named_and_the_rest_goes_on_later(fleet):
    fleet.root(2).mkdir(parents=True)
    (fleet.root(2) / "fault").write_text(json.dumps({"CRASH": 1}))
    failed = fleet.phase("fleet", "adopt", "--yes")
    assert failed.returncode == 1 and "w2" in failed.stdout and "phase fleet adopt" in failed.stdout, failed.stdout
    (fleet.root(2) / "fault").unlink()
    done = fleet.phase("fleet", "adopt", "--yes")
    assert done.returncode == 0, done.stdout
    assert all(state.serving and state.in_service and state.current == state.last_good for state in fleet.states())
