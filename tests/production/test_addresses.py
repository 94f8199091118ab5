"""A router that has its own names for the workers: ranks (--dp-aware) and another spelling. What counts is where users' requests go.

Field failure: such workers were "not in the list", so a rollback called traffic safe and restarted all of them at once, and 61 of 2683
requests failed.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from phases.engines.ssh.router import make_router
from tests.engines.ssh.sshfleet import SSHD
from tests.production.light_fleet import LightFleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.skipif(not SSHD, reason="sshd is not installed (package openssh-server)"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightFleet]:
    made = LightFleet(
        tmp_path_factory.mktemp("addresses"),
        ssh=1,
        router_arguments=("--policy", "round_robin", "--dp-aware"),
        server_arguments=("--skip-tokenizer-init", "--dp-size", "2"),
    )
    try:
        yield made.up()
    finally:
        made.close()


def call_it_localhost(fleet: LightFleet, number: int) -> str:
    """A worker leaves the router and comes back under another spelling, as one that registers itself would."""
    with fleet.production() as production:
        production.router.remove(production.workers[number - 1].url)
    alias = f"http://LOCALHOST:{fleet.ports[number - 1]}/"
    requests.post(f"{fleet.router_url}/workers", json={"url": alias}, timeout=30).raise_for_status()
    until = time.monotonic() + 60
    while not {f"{alias}@0", f"{alias}@1"} <= set(fleet.served_by()):
        assert time.monotonic() < until, fleet.served_by()
        time.sleep(0.1)
    return alias


@contextlib.contextmanager
def restarts_seen(fleet: LightFleet) -> Iterator[list[str]]:
    """Workers that were listed in the router, before and after they were seen not to answer: users were sent to a worker under restart."""
    seen: list[str] = []
    stop = threading.Event()

    def look() -> None:
        with fleet.production() as production:
            router = make_router(production.fleet_settings.router, production.clock, production.workers)
            while not stop.is_set():
                with contextlib.suppress(Exception):
                    before = production.book.place(router.workers())
                    answering = production.answering()
                    after = production.book.place(router.workers())
                    seen.extend(
                        host.name
                        for host in production.workers
                        if before.in_service(host.name) and after.in_service(host.name) and host.name not in answering
                    )
                time.sleep(0.05)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def test_a_rollback_behind_a_dp_aware_router_restarts_workers_only_after_they_are_out(fleet: LightFleet) -> None:
    assert sorted(fleet.served_by()) == sorted(
        f"http://127.0.0.1:{port}@{rank}" for port in fleet.ports for rank in (0, 1)
    )
    done = fleet.phase("run", "tp8-canary", "--yes")
    assert done.returncode == 0, done.stdout
    assert not fleet.not_converged(fleet.digests["incumbent"])
    alias = call_it_localhost(fleet, 2)
    done = fleet.phase("run", "full-rollout", "--yes")
    assert done.returncode == 0, done.stdout
    assert f"{alias}@0" not in fleet.served_by(), "all of its entries were taken out before the switch"
    alias = call_it_localhost(fleet, 2)
    states = fleet.states()
    assert all(s.in_service and s.listed and not s.doubt and s.current == fleet.digests["candidate"] for s in states)
    with fleet.users(rate=60.0) as users, restarts_seen(fleet) as sent_to_the_dead:
        done = fleet.phase("rollback", "--yes")
    assert done.returncode == 0, done.stdout
    assert users[0].sent > 100 and users[0].failed == 0, f"{users[0]}\n{done.stdout}"
    assert not sent_to_the_dead, f"{sent_to_the_dead}\n{done.stdout}"
    assert not fleet.not_converged(fleet.digests["incumbent"]), done.stdout
    assert f"{alias}@0" not in fleet.served_by()


def test_an_entry_that_cannot_be_placed_is_named_by_status_doctor_and_adopt_and_nothing_moves(tmp_path: Path) -> None:
    """The router's side is a hook here: a real one has no worker whose name does not resolve on this very machine."""
    fleet = LightFleet(tmp_path / "light", ssh=0, count=2).prepare()
    listed = tmp_path / "listed"
    hooks = f"router: {{kind: none, add: ['true'], remove: ['true'], observe: [cat, {listed}]}}"
    try:
        fleet.configure(text=re.sub("router: .*", hooks, (fleet.repo / "playbook.yaml").read_text()))
        stranger = f"http://elsewhere.invalid:{fleet.ports[0]}"
        foreign = "http://foreign.invalid:1"
        listed.write_text(f"http://localhost:{fleet.ports[1]}@0\n{stranger}\n{foreign}\n")
        status = json.loads(fleet.phase("status", "--json", "--timeout", "60").stdout)["fleet"]
        assert [worker["in_service"] for worker in status["workers"]] == [None, True]
        assert stranger in status["note"] and "router_url" in status["note"] and foreign not in status["note"]
        doctor = fleet.phase("doctor").stdout
        assert stranger in doctor and "router_url" in doctor, doctor
        adopted = fleet.phase("fleet", "adopt", "--yes")
        assert adopted.returncode == 1 and stranger in adopted.stdout and "router_url" in adopted.stdout, adopted.stdout
        assert {state.current for state in fleet.states()} == {"none"}
    finally:
        fleet.close()
