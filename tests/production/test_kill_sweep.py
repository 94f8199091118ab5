"""kill -9 of `phase` at the boundaries of the journal: whatever is left, `--resume` and `phase rollback` bring the fleet to one release.

Engine, command line, guards, leases, sshd and sglang-router are the real ones; the workers are stand-ins, since this takes
hundreds of restarts. `tests/benchmarks/bench_kill_sweep.py` does the same on real SGLang workers, and with every instant.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phases.full_rollout import steps as waves
from phases.ledger.verify import verify_ledger
from phases.run.closing import ledger_of
from phases.tp8_canary import steps as canary
from tests.engines.ssh.sshfleet import SSHD
from tests.production.kill_sweep import Boundary, boundaries, chain
from tests.production.light_fleet import LightFleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.skipif(not SSHD, reason="sshd is not installed (package openssh-server)"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightFleet]:
    made = LightFleet(tmp_path_factory.mktemp("light"))
    try:
        yield made.up()
    finally:
        made.close()


@pytest.mark.parametrize(("phase", "end"), [("tp8-canary", "incumbent"), ("full-rollout", "candidate")])
def test_killed_at_the_boundaries_and_resumed_it_ends_on_one_release(fleet: LightFleet, phase: str, end: str) -> None:
    if phase == "full-rollout":
        _canary_passed(fleet)
    before = len(ledger_of(fleet.playbook).checkpoints())
    done = chain(fleet, phase, boundaries(phase, every=False), lambda boundary: _nothing_mixed(fleet, boundary))
    went_back = (
        done.returncode == 7
    )  # on a machine so busy that a lease runs out or a soak gets no traffic: then it must say so, and be back
    assert done.returncode in (0, 7), done.stdout
    assert not fleet.not_converged(fleet.digests["incumbent" if went_back else end]), done.stdout
    ledger = ledger_of(fleet.playbook)
    (recorded,) = ledger.checkpoints()[before:]  # one run, one checkpoint, however often it was killed
    assert (recorded.phase, recorded.verdict.advances) == (phase, not went_back) and not verify_ledger(ledger)


def test_the_plan_knows_what_those_runs_took_and_saw(fleet: LightFleet) -> None:
    _canary_passed(fleet)
    planned = json.loads(fleet.phase("plan", "tp8-canary", "--json").stdout)["phases"][0]["forecast"]
    assert planned["expected"] > planned["shortest"] and planned["expected_from"].startswith(
        "the steps of light-tp8-canary-000"
    )
    (sight,) = planned["sights"]
    if sight["slowdown"] is None:  # on a machine so busy that the interval never came off zero: then it must say that
        assert "-tp8-canary-PASS recorded no interval of e2e p50" in sight["source"]
    else:
        assert sight["slowdown"] > 2.5 and "-tp8-canary-PASS after" in sight["source"]


ROLLED_BACK_AT = [
    ("tp8-canary", ("step-finished", canary.CANARY, "before")),
    ("tp8-canary", ("step-finished", canary.CANARY, "after")),
    ("full-rollout", ("step-finished", waves.wave_name(1), "before")),
    ("full-rollout", ("step-finished", waves.wave_name(2), "after")),
]


@pytest.mark.parametrize(("phase", "boundary"), ROLLED_BACK_AT)
def test_killed_and_rolled_back_by_hand_it_ends_on_the_incumbent(
    fleet: LightFleet, phase: str, boundary: Boundary
) -> None:
    _on_the_incumbent(fleet)
    _canary_passed(fleet)
    done = fleet.phase("run", phase, "--yes", kill=boundary)
    assert done.returncode == -9, done.stdout
    if (
        boundary == ROLLED_BACK_AT[-1][1]
    ):  # all four have moved: left alone, two would restart first and two when those are up
        assert sorted(_lease(fleet, number)["turn"] for number in range(1, fleet.count + 1)) == [0.0, 0.0, 75.0, 75.0]
    back = fleet.phase("rollback", "--yes", "--json")
    told = json.loads(back.stdout[back.stdout.index("{") :])
    assert back.returncode == 0 and told["rollback"]["verified"], back.stdout
    assert not fleet.not_converged(fleet.digests["incumbent"])


@pytest.mark.parametrize(("phase", "verdict"), [("full-rollout", "going-back"), ("tp8-canary", "judged")])
def test_killed_while_it_goes_back_it_finishes_that_and_moves_nothing_forward_again(
    fleet: LightFleet, phase: str, verdict: str
) -> None:
    """A verdict that is out is acted on, not asked for again: the bad candidate does not get a second go at the users."""
    _on_the_incumbent(fleet)
    _canary_passed(fleet)
    for number in (
        1,
        2,
    ):  # the first wave, and the first of them the canary; the gate of Phase 3 is passed by the same candidate
        fleet.fault(number, SLOW=40, only="light_candidate")
    try:
        armed = _armed(fleet)
        done = fleet.phase("run", phase, "--yes", kill=("decided", verdict, "after"))
        assert done.returncode == -9 and _armed(fleet) > armed, done.stdout
        armed = _armed(fleet)
        done = fleet.phase("run", phase, "--yes", "--resume")
        assert done.returncode == 7 and _armed(fleet) == armed, done.stdout
        assert not fleet.not_converged(fleet.digests["incumbent"])
    finally:
        for number in (1, 2):
            (fleet.root(number) / "fault").unlink()


def test_with_the_toolkit_dead_for_good_the_lease_brings_the_canary_back(fleet: LightFleet) -> None:
    _on_the_incumbent(fleet)
    usual, fleet.lease = fleet.lease, 25.0  # long enough for a busy machine to look before it is over
    fleet.configure()
    try:
        done = fleet.phase("run", "tp8-canary", "--yes", kill=("step-finished", canary.CANARY, "after"))
        assert done.returncode == -9, done.stdout
        (moved,) = [state for state in fleet.states() if state.current == fleet.digests["candidate"]]
        assert moved.lease and moved.lease.active and moved.in_service
        until = time.monotonic() + 10 * fleet.lease
        while left := fleet.not_converged(fleet.digests["incumbent"]):
            assert time.monotonic() < until, left
            time.sleep(0.5)
    finally:
        fleet.lease = usual
        fleet.configure()
    events = [json.loads(line)["event"] for line in (fleet.root(1) / "audit.log").read_text().splitlines()]
    assert "lease_reverted" in events and events.index("lease_confirmed") < len(events) - 1 - events[::-1].index(
        "lease_reverted"
    )


def _nothing_mixed(fleet: LightFleet, boundary: Boundary) -> None:
    """Whatever instant it was: every worker that serves is wholly on the release its host says, and users are served."""
    assert not fleet.mixed(), boundary
    assert len(fleet.served_by()) >= 2, f"under the floor after {boundary}"


def _canary_passed(fleet: LightFleet) -> None:
    """Phase 4 starts after a passed Phase 3 only; the newest checkpoint counts."""
    canaries = [
        checkpoint for checkpoint in ledger_of(fleet.playbook).checkpoints() if checkpoint.phase == "tp8-canary"
    ]
    if not canaries or not canaries[-1].verdict.advances:
        done = fleet.phase("run", "tp8-canary", "--yes")
        assert done.returncode == 0, done.stdout


def _lease(fleet: LightFleet, number: int) -> dict[str, Any]:
    """As the host has it on disk."""
    return json.loads((fleet.root(number) / "lease.json").read_text())  # type: ignore[no-any-return]


def _armed(fleet: LightFleet) -> int:
    """How often a worker was moved forward, by the hosts' own account."""
    logs = [fleet.root(number) / "audit.log" for number in range(1, fleet.count + 1)]
    return sum(json.loads(line)["event"] == "lease_armed" for log in logs for line in log.read_text().splitlines())


def _on_the_incumbent(fleet: LightFleet) -> None:
    if fleet.not_converged(fleet.digests["incumbent"]):
        fleet.reset()
