"""A run that was suspended and wakes up late changes nothing, says so, and records no PASS; a rollback stops at the floor.

Field failure: a closed laptop made the candidate last-good after the rollback, and the next rollback deployed it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import requests

from phases.full_rollout import steps as waves
from phases.run.closing import ledger_of
from phases.tp8_canary import steps as canary
from tests.engines.ssh.sshfleet import SSHD
from tests.production.kill_sweep import Boundary
from tests.production.light_fleet import LightFleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.skipif(not SSHD, reason="sshd is not installed (package openssh-server)"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightFleet]:
    made = LightFleet(tmp_path_factory.mktemp("fenced"), ssh=1)
    try:
        yield made.up()
    finally:
        made.close()


def canary_passed(fleet: LightFleet) -> None:
    done = fleet.phase("run", "tp8-canary", "--yes")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "at",
    [
        ("step-finished", waves.SOAK, "after"),
        ("step-started", waves.FINISH, "after"),
        ("step-finished", waves.FINISH, "after"),
        ("step-finished", "judge the gate", "after"),
    ],
    ids=lambda at: f"{at[0]} {at[1]}",
)
def test_a_rollout_that_slept_through_a_rollback_makes_nothing_last_good_and_is_no_pass(
    fleet: LightFleet, at: Boundary
) -> None:
    canary_passed(fleet)
    before = len(ledger_of(fleet.playbook).checkpoints())
    with fleet.suspended("run", "full-rollout", "--yes", at=at) as run:
        done = fleet.phase("rollback", "--yes")
        assert done.returncode == 0, done.stdout
        assert not fleet.not_converged(fleet.digests["incumbent"])
    assert run.returncode == 7, run.said  # type: ignore[attr-defined]
    assert not fleet.not_converged(fleet.digests["incumbent"]), run.said  # type: ignore[attr-defined]
    recorded = [c for c in ledger_of(fleet.playbook).checkpoints()[before:] if c.phase == "full-rollout"]
    assert recorded and not recorded[-1].verdict.advances, run.said  # type: ignore[attr-defined]
    again = fleet.phase("rollback", "--yes")
    assert again.returncode == 0 and not fleet.not_converged(fleet.digests["incumbent"]), again.stdout


def test_a_rollout_whose_leases_ran_out_while_it_slept_makes_nothing_last_good(fleet: LightFleet) -> None:
    canary_passed(fleet)
    fleet.lease = 6.0
    fleet.configure()
    try:
        canary_passed(fleet)
        with fleet.suspended("run", "full-rollout", "--yes", at=("step-started", waves.FINISH, "after")) as run:
            until = time.monotonic() + 240
            while fleet.not_converged(fleet.digests["incumbent"]):  # each host's guard puts it back by itself
                if time.monotonic() > until:
                    break  # who is not in the router's list again is put there by the run that wakes up
                time.sleep(1)
            assert {s.last_good for s in fleet.states()} == {fleet.digests["incumbent"]}
        assert run.returncode == 7, run.said  # type: ignore[attr-defined]
        assert not fleet.not_converged(fleet.digests["incumbent"]), run.said  # type: ignore[attr-defined]
    finally:
        fleet.lease = 90.0
        fleet.configure()


def test_a_canary_that_slept_through_a_rollback_is_no_pass(fleet: LightFleet) -> None:
    with fleet.suspended("run", "tp8-canary", "--yes", at=("step-finished", canary.END, "after")) as run:
        done = fleet.phase("rollback", "--yes")
        assert done.returncode == 0, done.stdout
    assert run.returncode == 7 and "taken over" in run.said, run.said  # type: ignore[attr-defined]
    assert not ledger_of(fleet.playbook).checkpoints()[-1].verdict.advances


@contextlib.contextmanager
def counting(fleet: LightFleet) -> Iterator[list[int]]:
    """How many workers the router's users were served by, looked at all the time while the block runs: listed, and answering."""
    seen, stop = [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            with contextlib.suppress(requests.RequestException):
                alive = 0
                for url in fleet.served_by():
                    with contextlib.suppress(requests.RequestException):
                        alive += requests.get(f"{url}/health", timeout=2).ok
                seen.append(alive)
            time.sleep(0.05)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def test_a_rollback_whose_incumbent_does_not_start_stops_at_the_floor(fleet: LightFleet) -> None:
    canary_passed(fleet)
    assert fleet.phase("run", "full-rollout", "--yes").returncode == 0
    for number in range(1, fleet.count + 1):
        fleet.fault(number, only="light_incumbent", CRASH=1)
    try:
        with counting(fleet) as served:
            done = fleet.phase("rollback", "--yes")
        assert done.returncode == 8, done.stdout
        assert min(served) >= 2, f"{min(served)} workers served\n{done.stdout}"
        assert "stopped at the floor" in done.stdout and "--below-floor" in done.stdout, done.stdout
        assert sum(s.serving and s.in_service for s in fleet.states()) >= 2
    finally:
        for number in range(1, fleet.count + 1):
            (fleet.root(number) / "fault").unlink(missing_ok=True)
    mended = fleet.phase("rollback", "--yes", "--below-floor")
    assert mended.returncode == 0 and not fleet.not_converged(fleet.digests["incumbent"]), mended.stdout
