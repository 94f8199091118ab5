"""A killed run that is resumed: the leases of its canary are renewed at once, and one that ran out meanwhile fails no good candidate.

Engine, command line, guards, leases and sglang-router are the real ones; the workers are stand-ins, since restarts of real ones take long.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phases.fleet.inherited_leases import adopt_leases
from phases.tp8_canary import steps as canary
from tests.production.light_fleet import LightFleet

pytestmark = [pytest.mark.slow, pytest.mark.fleet]

LEASE = 600.0  # no test waits for its end


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightFleet]:
    """A fleet whose run was killed when its canary had been switched."""
    fleet = LightFleet(tmp_path_factory.mktemp("light"), ssh=0, count=3, lease=LEASE)
    try:
        fleet.up()
        done = fleet.phase("run", "tp8-canary", "--yes", kill=("step-finished", canary.CANARY, "after"))
        assert done.returncode == -9, done.stdout
        yield fleet
    finally:
        fleet.close()


def test_an_adopted_lease_is_renewed_before_anything_else(killed: LightFleet) -> None:
    _deadline_in(killed, 100 * LEASE)
    with killed.production() as production:
        production.token = next((killed.repo / ".phase" / "runs").glob("*/work/lock-token")).read_text()
        adopt_leases(production)
    (leased,) = [state for state in killed.states() if state.leased]
    assert leased.host.name == "w1" and leased.lease and leased.lease.seconds_left <= LEASE


def test_a_lease_that_ran_out_before_the_run_was_resumed_fails_no_good_candidate(killed: LightFleet) -> None:
    _deadline_in(killed, -1.0)
    done = killed.phase("run", "tp8-canary", "--yes", "--resume")
    assert done.returncode == 0, done.stdout
    assert not killed.not_converged(killed.digests["incumbent"])
    events = [json.loads(line)["event"] for line in (killed.root(1) / "audit.log").read_text().splitlines()]
    assert events.count("lease_armed") == 2, events


def _deadline_in(fleet: LightFleet, seconds: float) -> None:
    """Change the canary's lease behind the guard's back, in one step."""
    path = fleet.root(1) / "lease.json"
    lease = json.loads(path.read_text())
    changed = Path(f"{path}.changed")
    changed.write_text(json.dumps({**lease, "deadline": time.clock_gettime(time.CLOCK_BOOTTIME) + seconds}))
    os.replace(changed, path)
