"""Status, notifications and metrics beside a real rollback: stand-in workers on real hosts, behind a real router and a real sshd."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.engines.ssh.sshfleet import end_processes_of
from tests.notify.conftest import Receiver
from tests.production.light_fleet import LightFleet
from tests.status.test_textfile import _read

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def receiver():
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, receiver):
    made = LightFleet(tmp_path_factory.mktemp("light"))
    try:
        yield made.up()
    finally:
        made.close()


def _status(fleet, *arguments):
    command = [
        sys.executable,
        "-m",
        "phases.cli.main",
        "status",
        "-p",
        str(fleet.repo / "playbook.yaml"),
        "--timeout",
        "30",
        *arguments,
    ]
    done = subprocess.run(command, cwd=fleet.repo, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


def test_a_canary_that_is_rolled_back_is_told_shown_and_measured(fleet, receiver, monkeypatch):
    """A candidate slower than the margin: exit 7, and everybody who should hear of it does."""
    monkeypatch.setenv("PAGER_URL", receiver.url)
    receiver.answers = [500, 200]  # the first attempt of the first message fails
    fleet.configure(
        candidate={"SLOW": 40},
        deadline=200.0,
        more="notify: {webhooks: [{url_env: PAGER_URL, timeout: 60, events: [gate-failed, rollback-started, rollback-ended]}]}\nmetrics: {textfile: ../state.prom}\n",
    )
    done = fleet.phase("run", "tp8-canary", "--yes")
    assert done.returncode == 7, done.stdout
    events = [body["event"] for body in receiver.bodies]
    assert events == ["rollback-started", "rollback-started", "rollback-ended", "gate-failed"]
    ended, gate = receiver.bodies[2:]
    assert ended["verified"] is True and ended["not_restored"] == [] and gate["exit"] == 7 and gate["verdict"] == "FAIL"
    assert "s3cret" not in done.stdout and all(
        b"s3cret" not in path.read_bytes() for path in (fleet.repo / ".phase").rglob("*") if path.is_file()
    )

    shown = _status(fleet, "--json")
    assert shown["rolled_back"]["verified"] is True and "tp8-canary" in shown["rolled_back"]["checkpoint"]
    workers = {worker["name"]: worker for worker in shown["fleet"]["workers"]}
    assert len(workers) == 4 and all(
        w["serving"] and w["in_service"] and w["current"] == w["last_good"] == fleet.digests["incumbent"]
        for w in workers.values()
    )
    text = _status(fleet)
    assert fleet.digests["incumbent"][:12] in text and "Rolled back: " in text and "verified" in text

    name = shown["rolled_back"]["checkpoint"]
    found = _read(fleet.directory / "state.prom")  # kept written by the run itself
    assert (
        found["phasegate_rollback_verified", (("checkpoint", name),)] == 1
        and found["phasegate_last_exit_code", (("phase", "tp8-canary"),)] == 7
    )
    _status(fleet, "--textfile", str(fleet.directory / "now.prom"))
    found = _read(fleet.directory / "now.prom")
    assert (
        found["phasegate_worker_in_service", (("worker", "w4"),)] == 1
        and found["phasegate_worker_on_last_good", (("worker", "w1"),)] == 1
    )


def test_workers_and_router_that_are_gone_are_said_to_be(fleet):
    end_processes_of(fleet.root(1))
    shown = _status(fleet, "--json")
    workers = {worker["name"]: worker for worker in shown["fleet"]["workers"]}
    assert (
        workers["w1"]["serving"] is False
        and "does not answer" in workers["w1"]["problem"]
        and workers["w2"]["problem"] == ""
    )
    os.killpg(fleet.router.pid, signal.SIGSTOP)  # it takes connections and says nothing
    try:
        shown = _status(fleet, "--json", "--timeout", "12")
        assert "router cannot be asked" in shown["fleet"]["note"] and {
            w["in_service"] for w in shown["fleet"]["workers"]
        } == {None}
        assert {w["name"] for w in shown["fleet"]["workers"] if w["current"]} == {
            "w1",
            "w2",
            "w3",
            "w4",
        }  # the hosts are asked all the same
    finally:
        os.killpg(fleet.router.pid, signal.SIGCONT)


def test_the_watch_tells_what_it_found_and_what_it_did(fleet, receiver, monkeypatch):
    monkeypatch.setenv("PAGER_URL", receiver.url)
    receiver.requests.clear()
    fleet.configure(more="notify: {webhooks: [{url_env: PAGER_URL, timeout: 60}]}\n")
    end_processes_of(fleet.root(1))
    done = fleet.phase("watch", "--once")
    assert done.returncode == 7, done.stdout
    assert [body["event"] for body in receiver.bodies] == ["regression", "rollback-started", "rollback-ended"]
    assert (
        receiver.bodies[0]["rolls_back"] is True
        and "w1" in receiver.bodies[0]["reasons"][0]
        and receiver.bodies[2]["verified"] is True
    )
    assert "watch" in _status(fleet, "--json")["rolled_back"]["reason"]
