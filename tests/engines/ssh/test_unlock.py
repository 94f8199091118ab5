"""`phase unlock` and `phase doctor` as a user calls them, on workers of this machine."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phases.base.clock import SystemClock
from phases.engines.ssh.host import Host
from phases.engines.ssh.locks import HostLock, show_lock
from phases.engines.ssh.session import HostSession
from phases.engines.ssh.transport import connect
from phases.run.lock import Lock
from tests.engines.ssh.sshfleet import PYTHON
from tests.run.conftest import Repository

SECTION = """
fleet:
  hosts:
    - {{name: w0, address: local, root: {root}/w0, port: 30000, python: {python}}}
    - {{name: w1, address: local, root: {root}/w1, port: 30001, python: {python}}}
    - {{name: gone, address: no-such-host.invalid, root: /srv/w, port: 30002}}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "mine")
    with open(made.path / "playbook.yaml", "a") as file:
        file.write(SECTION.format(root=tmp_path, python=PYTHON))
    return made


@pytest.fixture
def held(tmp_path: Path, repository: Repository) -> Iterator[HostLock]:
    """The lock of w0, held by a run."""
    with HostSession(connect(Host("w0", "local", str(tmp_path / "w0"), python=PYTHON))) as session:
        lock = HostLock(session, "phase run tp8-canary", owner="ada@ops pid 7")
        lock.acquire()
        yield lock


def phase(repository: Repository, *arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "phases.cli.main", *arguments]
    done = subprocess.run(
        argv,
        cwd=repository.path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=200,
        check=False,
        **more,
    )  # type: ignore[call-overload]
    assert "Traceback" not in done.stderr
    return done


def test_it_shows_whose_lock_it_is_and_does_nothing_unasked(repository: Repository, held: HostLock) -> None:
    done = phase(repository, "unlock", "w0", "w1")
    assert done.returncode == 6
    assert re.search(r"w0 is locked: ada@ops pid 7, for phase run tp8-canary, taken \d+ (s|min) ago", done.stdout), (
        done.stdout
    )
    assert "w1 is not locked." in done.stdout and "--yes" in done.stderr
    assert show_lock(held.session).token == held.token


def test_yes_removes_exactly_that_lock(repository: Repository, held: HostLock) -> None:
    done = phase(repository, "unlock", "w0", "--yes", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["locks"][0]["state"] == "removed"
    assert show_lock(held.session) is None
    assert held.release() is False


@pytest.mark.parametrize("answer, code", [("y\n", 0), ("n\n", 6)])
def test_a_person_is_asked(repository: Repository, held: HostLock, answer: str, code: int) -> None:
    """On a terminal: the question is put, and the answer counts."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "phases.cli.main", "unlock", "w0"]
    process = subprocess.Popen(
        argv, cwd=repository.path, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    os.write(ours, answer.encode())
    out, err = process.communicate(timeout=200)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == code, (out, err)
    assert "Remove the lock of w0?" in err
    assert (show_lock(held.session) is None) is (code == 0)


def test_a_host_that_cannot_be_reached_does_not_hide_the_others(repository: Repository, held: HostLock) -> None:
    done = phase(repository, "unlock", "--all-hosts", "--yes")
    assert done.returncode == 1
    assert "gone" in done.stderr and "cannot be resolved" in done.stderr
    assert "Removed." in done.stdout and show_lock(held.session) is None


def test_it_says_whether_the_owner_is_alive_where_that_can_be_known(repository: Repository, held: HostLock) -> None:
    sleeper = subprocess.Popen(["sleep", "300"])
    here = socket.gethostname()
    try:
        known = {f"ada@{here} pid {sleeper.pid}": True, f"ada@elsewhere pid {sleeper.pid}": None}
        for owner, alive in known.items():
            assert _owner_alive(repository, held, owner) is alive
    finally:
        sleeper.kill()
        sleeper.wait()
    assert _owner_alive(repository, held, f"ada@{here} pid {sleeper.pid}") is False
    assert (
        _owner_alive(repository, held, f"ada@{here} pid 1", age=30 * 365 * 86400.0) is False
    )  # began after the lock was taken
    assert "its process is gone" in phase(repository, "unlock", "w0").stdout


def _owner_alive(repository: Repository, held: HostLock, owner: str, age: float = 0.0) -> bool | None:
    path = Path(held.session.host.root, "lock.json")
    lock = json.loads(path.read_text())
    path.write_text(json.dumps({**lock, "owner": owner, "since_uptime": lock["since_uptime"] - age}))
    return json.loads(phase(repository, "unlock", "w0", "--json").stdout)["locks"][0]["owner_alive"]


def test_a_wrong_name_and_a_playbook_without_a_fleet(repository: Repository) -> None:
    done = phase(repository, "unlock", "w9")
    assert done.returncode == 2 and "no host w9" in done.stderr and "w0" in done.stderr
    repository.write_playbook()
    assert "no fleet section" in phase(repository, "unlock", "w0").stderr


def test_the_local_lock(repository: Repository) -> None:
    done = phase(repository, "unlock")
    assert done.returncode == 0 and "light is not locked here" in done.stdout
    lock = Lock(repository.path / ".phase", "light", SystemClock())
    with lock.held("phase run build-parity"):
        done = phase(repository, "unlock")
        assert (
            done.returncode == 6
            and f"process {os.getpid()} on" in done.stdout
            and "its process is alive" in done.stdout
        )
        owner = json.loads(lock.path.read_text())
        for change, alive in (({"process_start": "1"}, False), ({"host": "elsewhere"}, None)):
            lock.path.write_text(json.dumps({**owner, **change}))
            assert json.loads(phase(repository, "unlock", "--json").stdout)["locks"][0]["owner_alive"] is alive
        lock.path.write_text(json.dumps(owner))


def test_the_doctor_sees_the_fleet(repository: Repository, held: HostLock) -> None:
    done = phase(repository, "doctor", "--json")
    rows = json.loads(done.stdout)["findings"]
    by_host = {(row["host"], row["name"]): row for row in rows}
    assert done.returncode == 1
    assert by_host[("gone", "reachability")]["health"] == "problem" and by_host[("gone", "reachability")]["cure"]
    assert "ada@ops" in by_host[("w0", "lock")]["found"]
    assert all(row["cure"] for row in rows if row["health"] == "problem")
    assert "w0" in phase(repository, "doctor").stdout
