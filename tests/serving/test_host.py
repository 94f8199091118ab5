"""Servers as processes of this machine: started in their own session, found again, ended with everything they started."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from phases.base.errors import ServingError
from phases.engines.ssh.bundle import Launch, make_bundle
from phases.serving.host import LocalHost, Server, shown

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN_CHILD = """
import signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"])
time.sleep(600)
"""


@pytest.fixture
def host(tmp_path):
    made = LocalHost(tmp_path)
    yield made
    for server in made.left_running():
        made.stop(server)


def wait_for(condition, seconds=120.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def start(host: LocalHost, code: str, **environment: str) -> Server:
    return host.start("one", [sys.executable, "-c", code], environment, 12345)


def test_started_found_again_and_stopped(host, tmp_path):
    server = start(host, SLEEPER)
    wait_for(lambda: host.log_lines(server) == ["up"])
    assert host.alive(server)
    another = LocalHost(tmp_path)  # as a later process of the toolkit sees it
    assert another.left_running() == [server] and another.alive(server)
    another.stop(server)
    wait_for(lambda: not host.alive(server))
    assert host.left_running() == []
    host.stop(server)  # again: nothing to do


def test_children_that_ignore_the_signal_are_ended_too(host, monkeypatch):
    monkeypatch.setattr("phases.serving.host.TERM_SECONDS", 5.0)  # how long they are asked first
    server = start(host, STUBBORN_CHILD)
    wait_for(lambda: "child" in host.log_lines(server))
    members = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _session(p) == server.pid]
    assert len(members) == 2
    host.stop(server)
    assert not any(_alive(pid) for pid in members)


def test_exit_code_of_a_server_that_ended(host):
    server = start(host, "import sys; print('no memory'); sys.exit(3)")
    wait_for(lambda: not host.alive(server))
    assert host.exit_code(server) == 3
    assert host.log_lines(server) == ["no memory"]


def test_a_server_that_cannot_be_recorded_is_ended(host, monkeypatch):
    def full(path, value):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("phases.serving.host.write_json", full)
    with pytest.raises(ServingError, match="one cannot be recorded: No space left"):
        start(host, SLEEPER)
    assert not [
        entry for entry in Path("/proc").glob("[0-9]*/cwd") if _cwd(entry) == str(host.root / "servers" / "one")
    ]


def _cwd(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""


def test_a_reused_pid_is_not_the_server(host):
    server = Server("old", os.getpid(), "1", 1, "log", "facts", "http://127.0.0.1:1")
    assert not host.alive(server)


def test_facts_directory_is_filled_in_and_starts_empty(host):
    code = "import os, pathlib; p = pathlib.Path(os.environ['WHERE']); p.mkdir(); (p / 'rank-0.json').write_text('{\"rank\": 0}')"
    server = start(host, code, WHERE="{facts}")
    wait_for(lambda: not host.alive(server))
    assert host.read_facts(server) == [{"rank": 0}]
    assert host.read_facts(start(host, SLEEPER)) == []


def test_the_toolkit_does_not_leak_its_own_python(host, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    server = start(
        host, "import os; print(os.environ.get('PYTHONPATH'), os.environ['PATH'].split(':')[0])", PATH_PREFIX="/first"
    )
    wait_for(lambda: host.log_lines(server))
    assert host.log_lines(server) == ["None /first"]


def test_ports(host):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert host.port_taken(taken.getsockname()[1])
    assert not host.port_taken(host.free_port())


def test_missing_program_is_one_clear_error(host):
    with pytest.raises(ServingError, match="cannot start /no/such/python: No such file"):
        host.start("one", ["/no/such/python"], {}, 1)
    with pytest.raises(ServingError, match="did not end within"):
        host.run([sys.executable, "-c", SLEEPER], {}, 0.3)


def test_release_is_installed_whole_or_not_at_all(host, tmp_path):
    source = tmp_path / "tool.sh"
    source.write_text("#!/bin/sh\n")
    source.chmod(0o755)
    bundle = make_bundle({"site/a.py": b"a = 1\n", "objects/tool.sh": source}, Launch(()))
    target = host.install(bundle)
    assert (target / "site" / "a.py").read_bytes() == b"a = 1\n"
    assert os.access(target / "objects" / "tool.sh", os.X_OK) and target.name == bundle.digest
    (target / ".complete").unlink()
    (target / "site" / "a.py").write_text("half")
    os.rename(target, target.with_name(f".{bundle.digest}.partial"))  # what a killed install leaves
    assert (host.install(bundle) / "site" / "a.py").read_bytes() == b"a = 1\n"


def test_long_log_lines_are_cut(host):
    server = start(host, "print('x' * 5000)")
    wait_for(lambda: host.log_lines(server))
    assert len(host.log_lines(server)[0]) == 400


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("--api-key abcd1234 --port 1", "--api-key *** --port 1"),
        ("'admin_api_key': 'sk-123456', 'port': 1", "'admin_api_key': '***', 'port': 1"),
        ("HF_TOKEN=hf_abcdef", "HF_TOKEN=***"),
        ("Authorization: Bearer abcdef", "Authorization: Bearer ***"),
        (
            "#token: 12345, token usage: 0.02, max_total_num_tokens=16384",
            "#token: 12345, token usage: 0.02, max_total_num_tokens=16384",
        ),
        ("'api_key': None", "'api_key': ***"),
    ],
)
def test_secrets_do_not_get_into_evidence(line, kept):
    assert shown(line) == kept


def _session(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[3])
    except OSError:
        return -1


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
