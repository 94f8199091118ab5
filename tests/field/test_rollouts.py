"""Rollouts as they went wrong for others, played on a light fleet: real command line, hosts, leases and router; workers are stand-ins."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from phases.base.results import Results
from phases.engines.ssh.lease import read_lease
from phases.engines.ssh.locks import show_lock
from phases.run.closing import ledger_of
from phases.tp8_canary import steps as canary
from tests.engines.ssh.sshfleet import SSHD
from tests.production.light_fleet import LightFleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.skipif(not SSHD, reason="sshd is not installed (package openssh-server)"),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightFleet]:
    made = LightFleet(tmp_path_factory.mktemp("field"), ssh=1, count=4)
    try:
        yield made.up()
    finally:
        made.close()


@pytest.fixture
def fleet(shared: LightFleet) -> LightFleet:
    """All workers on the incumbent, well, with the ordinary playbook."""
    shared.configure()
    if shared.not_converged(shared.digests["incumbent"]):
        shared.reset()
    return shared


def results(fleet: LightFleet) -> Results:
    """Of the newest checkpoint."""
    ledger = ledger_of(fleet.playbook)
    return Results.from_json(json.loads(ledger.files(ledger.checkpoints()[-1])["results.json"]))


def on_the_incumbent(fleet: LightFleet) -> bool:
    return not fleet.not_converged(fleet.digests["incumbent"])


def test_a_canary_that_never_gets_ready_is_rolled_back_at_its_deadline(fleet: LightFleet) -> None:
    fleet.configure(candidate={"NEVER_READY": 1}, ready=8)
    done = fleet.phase("run", "tp8-canary", "--yes")
    assert done.returncode == 7 and on_the_incumbent(fleet), done.stdout
    assert "did not answer" in done.stdout or "not ready" in done.stdout or "503" in done.stdout, done.stdout


def test_a_canary_that_dies_at_its_start_fails_at_once_with_its_last_words_and_again_as_attempt_two(
    fleet: LightFleet,
) -> None:
    fleet.configure(candidate={"CRASH": 1})
    for _ in range(2):  # after two failures in a row the way back is still the good release, not the failed one
        done = fleet.phase("run", "tp8-canary", "--yes")
        assert done.returncode == 7 and on_the_incumbent(fleet), done.stdout
        assert "no kernel image is available" in json.dumps(results(fleet).to_json())
    first, second = ledger_of(fleet.playbook).checkpoints()[-2:]
    assert first.manifest["run"] != second.manifest["run"]


def test_a_worker_that_is_sick_before_anything_moved_stops_the_run_and_is_named(fleet: LightFleet) -> None:
    fleet.fault(3, NEVER_READY=1)
    try:
        done = fleet.phase("run", "tp8-canary", "--yes")
        assert done.returncode == 1 and "w3" in done.stdout and "before anything has moved" in done.stdout
        assert {state.current for state in fleet.states()} == {fleet.digests["incumbent"]}
    finally:
        fleet.fault(3)


def test_metrics_under_other_names_stop_the_run_before_anything_moves(fleet: LightFleet) -> None:
    """A name that matches nothing makes every canary look the same; some let such canaries pass, some roll back good ones."""
    fleet.configure(probes=0)
    fleet.fault(2, RENAMED=1)
    try:
        done = fleet.phase("run", "tp8-canary", "--yes")
        assert done.returncode == 1 and "/metrics of w2 has no metric 'e2e_request_latency_seconds'" in done.stdout, (
            done.stdout
        )
        assert "other:e2e_request_latency_seconds" in done.stdout  # the nearest there is
        assert {state.current for state in fleet.states()} == {fleet.digests["incumbent"]}
    finally:
        fleet.fault(2)


def test_without_traffic_the_canary_is_held_and_never_promoted(fleet: LightFleet) -> None:
    fleet.configure(probes=0, rate=0, deadline=3)
    done = fleet.phase("run", "tp8-canary", "--yes")
    assert done.returncode == 5 and on_the_incumbent(fleet), done.stdout
    held = fleet.phase("run", "full-rollout", "--yes")
    assert held.returncode == 4 and "may not start" in held.stdout


def test_a_rollback_from_another_terminal_in_the_middle_of_a_canary(fleet: LightFleet) -> None:
    fleet.configure(deadline=600, probes=0, rate=0)
    with fleet.start("run", "tp8-canary", "--yes") as running:
        try:
            _until(lambda: any(s.current == fleet.digests["candidate"] and s.in_service for s in fleet.states()), 200)
            done = fleet.phase("rollback", "--yes", "--reason", "p99 doubled", "--json")
            assert done.returncode == 0, done.stdout
            out, _ = running.communicate(timeout=300)
        except BaseException:
            running.kill()
            raise
    assert running.returncode not in (0, 3) and on_the_incumbent(fleet), out


def test_rolling_back_what_never_moved_does_nothing(fleet: LightFleet) -> None:
    started = [(fleet.root(n) / "run" / "service.json").read_text() for n in range(1, 5)]
    done = fleet.phase("rollback", "--yes", "--json")
    told = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.returncode == 0 and told["rollback"]["moved"] == [] and told["rollback"]["verified"]
    assert [
        (fleet.root(n) / "run" / "service.json").read_text() for n in range(1, 5)
    ] == started  # no service was restarted


def test_with_the_router_gone_a_rollback_still_restores_the_hosts_and_says_what_is_left(fleet: LightFleet) -> None:
    fleet.phase("run", "tp8-canary", "--yes", kill=("step-finished", canary.CANARY, "after"))
    fleet.stop_router()
    try:
        done = fleet.phase("rollback", "--yes", "--json")
        told = json.loads(done.stdout[done.stdout.index("{") :])
        assert done.returncode == 8 and not told["rollback"]["verified"], done.stdout
        assert not [
            event for event in told["rollback"]["timeline"] if event["event"] == "traffic safe"
        ]  # not seen is not safe
        links = {(fleet.root(number) / "current").resolve().name for number in range(1, 5)}
        assert links == {fleet.digests["incumbent"]}
    finally:
        fleet.start_router()
    assert fleet.phase("rollback", "--yes").returncode == 0 and on_the_incumbent(
        fleet
    )  # and puts all into service again


@pytest.mark.parametrize(("budget", "code"), [(0, 7), (1, 0)])
def test_one_bad_host_counts_against_the_fleets_budget(fleet: LightFleet, budget: int, code: int) -> None:
    fleet.configure(budget=budget)
    assert fleet.phase("run", "tp8-canary", "--yes").returncode == 0
    fleet.fault(2, CRASH=1, only="light_candidate")
    try:
        done = fleet.phase("run", "full-rollout", "--yes")
        assert done.returncode == code, done.stdout
        runs = {state.host.name: state.current for state in fleet.states()}
        moved = fleet.digests["candidate"] if budget else fleet.digests["incumbent"]
        assert runs == {"w1": moved, "w2": fleet.digests["incumbent"], "w3": moved, "w4": moved}
        assert all(state.in_service for state in fleet.states())
    finally:
        (fleet.root(2) / "fault").unlink()


def test_a_rollout_cut_off_while_it_was_made_last_good_is_undone_on_all(fleet: LightFleet) -> None:
    """Half of the hosts call the candidate their last good, half the incumbent: going back must not leave both running."""
    fleet.phase("run", "full-rollout", "--yes", kill=("step-finished", "soak", "after")) if fleet.phase(
        "run", "tp8-canary", "--yes"
    ).returncode == 0 else None
    with fleet.production() as production:
        host = production.workers[0]
        session = production.fleet.session(host)
        lease, lock = read_lease(session), show_lock(session)
        assert lease and lease.active and lock
        production.token = lock.token  # as the run itself, a moment before it was cut off: nobody else keeps its lease
        production.keep(host, lease.release)
    done = fleet.phase("rollback", "--yes")
    assert done.returncode == 0 and on_the_incumbent(fleet), done.stdout


def test_ranks_that_report_another_release_fail_the_canary(fleet: LightFleet) -> None:
    fleet.configure(candidate={"MIXED": 1})
    done = fleet.phase("run", "tp8-canary", "--yes")
    assert done.returncode == 7 and on_the_incumbent(fleet), done.stdout
    assert "runs release 000000000000" in json.dumps(results(fleet).to_json())
    assert canary.CANARY in done.stdout


def _until(true, seconds: float) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.5)
