"""`phase fleet down`: leases first, then workers and router; killed half way; and what `phase status` says afterwards.

Hosts, leases, guards and services are the real ones; the service is a small one, and the router a process that only sleeps.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phases.base.clock import SystemClock
from phases.base.errors import UsageError
from phases.base.processes import Life, life_of
from phases.base.verdict import Verdict
from phases.engines.embedded import taken_down
from phases.engines.embedded.down import down
from phases.engines.embedded.fleet import fleet_of, home_of
from phases.engines.embedded.taken_down import TakenDown
from phases.engines.ssh.lease import read_lease
from phases.engines.ssh.services import ProcessDriver
from phases.fleet.live import Live
from phases.run.lock import Lock
from phases.run.run_directory import state_directory
from phases.run.session import plan_run
from phases.run.steps import StepContext
from phases.serving.host import LocalHost
from tests.cli.conftest import Phase
from tests.engines.embedded.test_plan_is_pure import CANARY, PRODUCTION
from tests.engines.ssh.sshfleet import end_processes_of
from tests.engines.ssh.worker import LONG, Worker, eventually
from tests.run.conftest import Repository
from tests.status.test_status import _record

pytestmark = pytest.mark.fleet

KILLED = """
import os, shutil, signal, sys
from phases.engines.embedded import down
from phases.cli.main import cli
{when}
cli(["fleet", "down", "--purge"], standalone_mode=False)
"""
DIES = "lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)"
WHEN = {
    "between workers": "real = down.end_service\n"
    "down.end_service = lambda session, *more: real(session, *more) if session.host.name == 'w1' else (real_wait(), os.kill(os.getpid(), signal.SIGKILL))\n"
    "def real_wait():\n    import json, time\n    path = os.path.join(os.environ['W1'], 'lease.json')\n"
    "    while json.load(open(path))['state'] != 'reverted': time.sleep(0.05)",
    "before the router": f"down.LocalHost = {DIES}",
    "before its directories go": f"import types\ndown.os = types.SimpleNamespace(getpid=os.getpid, replace={DIES})",
    "while its directories go": "down.shutil.rmtree = lambda path, **k: (os.unlink(path / 'ports.json'), os.kill(os.getpid(), signal.SIGKILL)) if path.exists() else None",
}


class Small:
    """The embedded fleet of a playbook: w1 on the candidate under a confirmed lease, w2 on the incumbent, a router."""

    def __init__(self, path: Path) -> None:
        self.repository = Repository(path / "mine")
        playbook = self.repository.path / "playbook.yaml"
        playbook.write_text(playbook.read_text().replace("name: light\n", f"name: light\n{PRODUCTION}") + CANARY)
        self.phase = Phase(self.repository.path)
        self.home = home_of(self.repository.path, "light")
        self.hosts = fleet_of(self.settings, self.repository.path, "light", choose_ports=True).workers()
        self.workers = [Worker(host, ProcessDriver(drain=5.0)) for host in self.hosts]
        self.workers[0].arm()
        self.workers[0].switch()
        self.workers[0].lease.confirm(LONG)
        self.router = LocalHost(self.home / "router")
        self.router.start("router", [sys.executable, "-c", "import time; time.sleep(3600)"], {}, 0)
        gone = subprocess.Popen(["true"])
        gone.wait()
        self.workers[
            0
        ].lock.owner = f"ada@{socket.gethostname()} pid {gone.pid}"  # as after a kill: the lease of w1 holds on to the lock of a run that is gone
        self.workers[0].lock.acquire()
        for worker in self.workers:
            worker.session.close()
            worker.lease.session.close()

    @property
    def settings(self):  # type: ignore[no-untyped-def]
        return self.repository.playbook.sections["embedded_fleet"]

    def running(self) -> list[str]:
        """Who still answers, or lives."""
        return [worker.host.name for worker in self.workers if worker.served()] + [
            server.name for server in self.router.left_running() if self.router.alive(server)
        ]

    def close(self) -> None:
        for host in self.hosts:
            end_processes_of(Path(host.root))
        for server in self.router.left_running():
            self.router.stop(server)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Small]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Small(tmp_path)
    yield made
    made.close()


def test_leases_end_with_their_services_and_status_tells_when_and_by_whom(small: Small) -> None:
    assert small.running() == ["w1", "w2", "router"]
    guard = small.workers[0].record()["guard"]["pid"]  # type: ignore[index]
    assert small.phase("fleet", "down").stdout == "Stopped w1, w2, router.\n"
    assert small.running() == [] and small.workers[0].record()["reason"] == "the fleet was taken down"
    assert small.workers[0].current() == small.workers[0].old.digest and "lease_reverted" in small.workers[0].events()
    eventually(lambda: life_of(guard) is Life.GONE)
    assert "The fleet was taken down 2" in small.phase("fleet", "status").stdout
    shown = small.phase("status").stdout
    assert "by Ada <ada@example.org>; Phase 3 starts it again." in shown and "does not answer" not in shown
    first = small.phase.json("status")["taken_down"]
    assert (
        small.phase("fleet", "down").stdout == "Nothing was running.\n"
        and small.phase.json("status")["taken_down"] == first
    )
    assert small.phase("fleet", "down", "--purge").stdout == "Nothing was running.\n" and not small.home.exists()
    assert small.phase.json("status")["taken_down"] == {**first, "purged": True}


def test_a_hot_fallback_taken_back_leaves_nothing_to_restore(small: Small) -> None:
    _record(
        small.repository,
        "rollback",
        Verdict.PASS,
        {"rollback": {"verified": False, "state": "safe", "reason": "asked for"}},
    )
    assert "NOT restored" in small.phase("status", "--no-fleet").stdout
    _record(
        small.repository,
        "rollback",
        Verdict.PASS,
        {"rollback": {"verified": True, "state": "undone", "reason": "false alarm"}},
    )
    shown = small.phase("status", "--no-fleet", "--textfile", "state.prom").stdout
    assert "NOT restored" not in shown and "hot fallback taken back: false alarm" in shown
    text = (small.repository.path / "state.prom").read_text()
    [verified] = [line for line in text.splitlines() if line.startswith("phasegate_rollback_verified{")]
    assert "0002-rollback-PASS" in verified and float(verified.split()[-1]) == 1


def test_what_a_rollback_left_to_restore_alarms_nobody_once_its_workers_are_gone(small: Small) -> None:
    _record(
        small.repository,
        "rollback",
        Verdict.PASS,
        {"rollback": {"verified": False, "state": "safe", "reason": "asked for"}},
    )
    assert "NOT restored" in small.phase("status", "--no-fleet").stdout
    small.phase("fleet", "down", "--purge")
    shown = small.phase("status", "--textfile", "state.prom").stdout
    assert (
        "NOT" not in shown
        and "not restored before the fleet was taken down 2" in shown
        and "so that nothing is left to restore: asked for" in shown
    )
    assert shown.count("by Ada <ada@example.org>") == 2  # of the fleet, and of what it means for the rollback
    assert "phasegate_rollback_verified{" not in (small.repository.path / "state.prom").read_text()
    for command in (("rollback", "--yes"), ("rollback", "--hot", "--yes"), ("watch", "--once")):
        assert "the fleet was taken down 2" in small.phase(*command, code=2).stderr
    assert not small.home.exists(), "nobody made a fleet by asking for the old one"
    taken_down.note_start(small.home, time.time())  # as Phase 3 does
    assert (
        "NOT" not in small.phase("status", "--no-fleet").stdout
        and "is not running; Phase 3 starts it" in small.phase("fleet", "status").stdout
    )


def test_workers_that_were_only_stopped_come_back_as_they_were(tmp_path: Path) -> None:
    home = tmp_path / "fleets" / "light"
    stopped, purged = TakenDown(10.0, "Ada", 20.0), TakenDown(10.0, "Ada", 20.0, purged=True)
    assert stopped.settles(15.0) and not stopped.settles(25.0) and not TakenDown(10.0, "Ada").settles(5.0)
    taken_down.write(home, stopped)
    taken_down.note_start(home, 30.0)
    assert taken_down.read(home) is None
    taken_down.write(home, purged)
    taken_down.note_start(home, 30.0)
    taken_down.note_start(home, 40.0)
    again = taken_down.read(home)
    assert again and again.started == 30.0 and again.settles(15.0) and not again.is_down


def test_a_run_does_not_go_on_with_a_fleet_that_was_taken_down_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repository = Repository(tmp_path / "mine")
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("name: light\n", f"name: light\n{PRODUCTION}") + CANARY)
    home, playbook = home_of(repository.path, "light"), repository.playbook
    live = Live(plan_run(playbook, playbook.phase("tp8-canary"), SystemClock()))
    resumed = StepContext(tmp_path, {"look at the fleet": {}}, lambda line: None, SystemClock())
    taken_down.write(home, TakenDown(10.0, "Ada", 20.0, purged=True))
    with pytest.raises(
        UsageError, match="taken down 1970-01-01 00:00 UTC by Ada, and with it what this run had begun"
    ) as refused:
        live.production(resumed)
    assert "without --resume" in refused.value.hint and not home.exists(), (
        "nobody made a fleet by asking for the old one"
    )


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        "{",
        '{"begun": "now", "by": "Ada"}',
        '{"begun": 1, "by": "Ada", "ended": "then"}',
        '{"begun": 1, "by": "Ada", "more": 1}',
    ],
)
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, record: str) -> None:
    (tmp_path / "light.down.json").write_text(record)
    assert taken_down.read(tmp_path / "light") is None


def test_damaged_records_of_a_fleet_are_named(small: Small) -> None:
    path, ports = small.home / "router" / "servers" / "router" / "server.json", small.home / "ports.json"
    kept, known = path.read_text(), ports.read_text()
    path.write_text("")
    assert f"{path} is damaged" in small.phase("fleet", "down", code=1).stderr
    path.write_text(kept)
    for damage in ("", "[1]", '{"w1": "x"}'):
        ports.write_text(damage)
        assert f"{ports} is damaged" in small.phase("fleet", "down", "--purge", code=1).stderr
    ports.write_text(known)
    assert small.phase("fleet", "down").stdout == "Stopped router.\n"


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("")])
def test_workers_whose_records_are_lost_are_stopped_all_the_same(
    small: Small, damage: Callable[[Path], object]
) -> None:
    for host in small.hosts:
        damage(Path(host.root) / "run" / "service.json")
    assert small.phase("fleet", "down").stdout == "Stopped w1, w2, router.\n" and small.running() == []


def test_what_listens_on_a_workers_port_and_is_not_shown_to_be_it_is_named_and_lives(small: Small) -> None:
    worker, port = small.workers[1], int(small.hosts[1].values["port"])
    os.kill(json.loads((Path(worker.host.root) / "run" / "service.json").read_text())["process"]["pid"], signal.SIGKILL)
    eventually(lambda: not worker.served())
    with socket.create_server(("127.0.0.1", port), backlog=16):  # in this process, which goes on
        for more in ((), ("--purge",)):
            refused = small.phase("fleet", "down", *more, code=1)
            assert (
                f"on w2: something still listens on port {port} of w2" in refused.stderr
                and f"ss -ltnp 'sport = :{port}'" in refused.stderr
            )
            assert small.home.exists() and not small.phase.json("status")["taken_down"]["ended"]
    assert small.phase("fleet", "down").stdout == "Nothing was running.\n"
    with socket.create_server(("127.0.0.1", port), backlog=16):  # the fleet is down: the port is anybody's
        assert small.phase("fleet", "down", "--purge").stdout == "Nothing was running.\n" and not small.home.exists()


def test_a_watch_acts_on_no_fleet_that_is_being_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken_down, "of_playbook", lambda playbook: TakenDown(10.0, "Ada"))
    taken_down.require_up(None)  # type: ignore[arg-type] # a rollback by hand may: that is cut short, or somebody wants it back
    with pytest.raises(UsageError, match="Ada began to take the fleet down"):
        taken_down.require_up(None, going_down=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("when", list(WHEN))
def test_killed_half_way_the_next_one_finishes_it(small: Small, when: str) -> None:
    program = KILLED.format(when=WHEN[when])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=small.repository.path,
        env={**os.environ, "W1": small.hosts[0].root},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    shown = small.phase("status").stdout
    said = "Ada <ada@example.org> began to take the fleet down, and that has not ended: `phase fleet down` finishes it"
    assert said in shown
    finished = small.phase("fleet", "down", "--purge")
    assert said in finished.stderr
    assert small.running() == [] and not list(small.home.parent.glob("light-*/")), finished.stdout
    assert (
        small.phase.json("status")["taken_down"]["purged"] is True
        and "taken down 2" in small.phase("fleet", "status").stdout
    )


def test_nothing_is_stopped_while_a_run_or_a_rollback_is_at_work(small: Small) -> None:
    with Lock(state_directory(small.repository.path), "light", SystemClock()).held("phase run tp8-canary"):
        assert "is locked: phase run tp8-canary by" in small.phase("fleet", "down", code=6).stderr
    worker = small.workers[1]
    worker.lock.purpose = "rollback: asked for"
    worker.lock.acquire()  # in this process, which lives
    refused = small.phase("fleet", "down", "--purge", code=6)
    assert "lock on w2: locked by" in refused.stderr and "for rollback: asked for" in refused.stderr
    assert small.running() == ["w1", "w2", "router"] and small.phase.json("status")["taken_down"] is None
    lease = read_lease(small.workers[0].session)
    assert lease and lease.active
    worker.lock.release()


def test_a_worker_that_cannot_be_asked_is_named_and_a_purge_ends_it_all_the_same(small: Small) -> None:
    (Path(small.hosts[1].root) / "lease.json").write_text("{damaged")
    refused = small.phase("fleet", "down", code=1)
    assert "w2 could not be stopped" in refused.stderr and "--purge" in refused.stderr and small.running() == ["w2"]
    purged = small.phase("fleet", "down", "--purge")
    assert (
        "w2: its records cannot be read" in purged.stderr
        and "w2" in purged.stdout
        and small.running() == []
        and not small.home.exists()
    )


def test_a_purge_works_on_a_disk_that_is_full(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    real = taken_down.write

    def full(home: Path, record: TakenDown) -> None:  # until the directories are gone
        if home.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(home, record)

    monkeypatch.setattr(taken_down, "write", full)
    took = lambda **purge: down(
        small.repository.path, "light", small.settings, by="Ada", clock=SystemClock(), progress=print, **purge
    )  # noqa: E731
    with pytest.raises(OSError, match="No space left"):
        took()
    assert small.running() == ["w1", "w2", "router"]
    assert took(purge=True) == ["w1", "w2", "router"] and not small.home.exists()
    record = taken_down.read(small.home)
    assert record and record.is_down and record.purged


def test_workers_that_the_playbook_names_no_more_are_ended_too(small: Small) -> None:
    playbook = small.repository.path / "playbook.yaml"
    playbook.write_text(playbook.read_text().replace("{count: 2}", "{count: 1}"))
    assert json.loads(small.phase("fleet", "down", "--json").stdout) == {"stopped": ["w1", "w2", "router"]}
    assert small.running() == []
