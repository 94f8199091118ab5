"""Service drivers: the process driver for real, systemd and docker by their exact argv and, where they exist, for real."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phases.engines.ssh.deploy import push
from phases.engines.ssh.errors import CommandError, FleetError, ServiceError
from phases.engines.ssh.host import Host
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.releases import ReleaseStore
from phases.engines.ssh.services import (
    DockerDriver,
    ProcessDriver,
    ServiceStatus,
    SystemdDriver,
    restart,
    start,
    stop,
    wait_ready,
)
from phases.engines.ssh.session import HostSession
from tests.engines.ssh.conftest import service_bundle
from tests.engines.ssh.worker import eventually


def put(session: HostSession, lock: HostLock, **settings: object) -> str:
    bundle = service_bundle(**settings)
    push(session, lock, bundle)
    ReleaseStore(session, lock).switch(bundle.digest)
    return bundle.digest


def _listens(number: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", number)) == 0


def port(host: Host) -> int:
    return int(host.values["port"])


def test_start_restart_stop_and_status(
    session: HostSession, lock: HostLock, driver: ProcessDriver, local: Host
) -> None:
    put(session, lock)
    assert not driver.status(session).running
    start(driver, session)
    wait_ready(driver, session, port(local), timeout=200)
    first = driver.status(session)
    start(driver, session)
    assert driver.status(session).pid == first.pid, "starting what runs changes nothing"
    restart(driver, session)
    wait_ready(driver, session, port(local), timeout=200)
    assert driver.status(session).pid not in (0, first.pid)
    stop(driver, session)
    assert driver.status(session) == ServiceStatus(False, 0, "stopped")
    stop(driver, session)


def test_what_cannot_be_recorded_is_not_left_running(
    session: HostSession, lock: HostLock, driver: ProcessDriver, local: Host
) -> None:
    """A disk that is full by then, here a limit on the size of files: the port would be taken from the release that a host goes back to."""
    put(session, lock)
    script = [part if part != "stop" else "start" for part in driver.stop_argv(local)][:-1]
    limited = subprocess.run(
        script,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150)),
    )
    assert limited.returncode != 0 and "File too large" in limited.stderr, limited.stderr
    assert not driver.status(session).running and not [
        entry for entry in Path("/proc").glob("[0-9]*/environ") if f"PHASEGATE_ROOT={local.root}\0" in _text(entry)
    ]
    start(driver, session)
    wait_ready(driver, session, port(local), timeout=200)
    stop(driver, session)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_it_outlives_the_session_and_is_found_by_the_next(
    session: HostSession, lock: HostLock, driver: ProcessDriver
) -> None:
    put(session, lock)
    start(driver, session)
    pid = driver.status(session).pid
    session.close()
    assert driver.status(session).pid == pid


def test_a_stop_lets_requests_finish(session: HostSession, lock: HostLock, driver: ProcessDriver, local: Host) -> None:
    put(session, lock, drain=0.5)
    start(driver, session)
    wait_ready(driver, session, port(local), timeout=200)
    stop(driver, session)
    assert driver.logs(session).splitlines()[-2:] == ["draining", "drained"]


def test_what_does_not_end_in_time_is_ended_with_all_it_started(
    session: HostSession, lock: HostLock, local: Host
) -> None:
    impatient = ProcessDriver(drain=0.2)
    put(session, lock, drain=60)
    start(impatient, session)
    wait_ready(impatient, session, port(local), timeout=200)
    pid = impatient.status(session).pid
    stop(impatient, session)
    assert "drained" not in impatient.logs(session)
    assert not Path(f"/proc/{pid}/exe").exists()


def test_a_killed_service_is_seen_as_stopped(session: HostSession, lock: HostLock, driver: ProcessDriver) -> None:
    put(session, lock)
    start(driver, session)
    os.kill(driver.status(session).pid, 9)
    eventually(lambda: not driver.status(session).running)
    record = json.loads(Path(session.host.root, "run/service.json").read_text())
    record["process"]["pid"] = os.getpid()
    Path(session.host.root, "run/service.json").write_text(json.dumps(record))
    assert not driver.status(session).running, "another process under the old number is not the service"


def test_a_service_that_dies_or_stays_sick_shows_its_log(
    session: HostSession, lock: HostLock, driver: ProcessDriver, local: Host
) -> None:
    put(session, lock, crash=True)
    with pytest.raises(ServiceError, match="no kernel image is available"):
        start(driver, session)
        wait_ready(driver, session, port(local), timeout=200)
    put(session, lock, sick=True)
    start(driver, session)
    eventually(lambda: _listens(port(local)))
    with pytest.raises(ServiceError, match=r"on here: .*did not answer 200 in 4 s \(status 503\)(.|\n)*starting"):
        wait_ready(driver, session, port(local), timeout=4)


def test_launch_arguments_need_their_values(
    local: Host, session: HostSession, lock: HostLock, driver: ProcessDriver
) -> None:
    put(session, lock)
    Path(local.root, "host.json").write_text("{}")
    with pytest.raises(ServiceError, match="needs a value for port.*vars"):
        start(driver, session)


class Recorded:
    """A session that notes operations and answers as the host would."""

    def __init__(self, host: Host, answer: dict[str, Any]) -> None:
        self.host, self.answer, self.asked = host, answer, []

    def do(self, *operations: dict[str, Any], **_: object) -> list[Any]:
        self.asked += operations
        return [self.answer for _ in operations]


HOST = Host("w", "node", "/srv/w")


def test_systemd_argv() -> None:
    driver = SystemdDriver("sglang-w.service", drain=20)
    assert driver.starting(HOST) == {"op": "command", "argv": ["systemctl", "start", "sglang-w.service"], "timeout": 50}
    assert driver.stopping(HOST)["argv"] == ["systemctl", "stop", "sglang-w.service"]
    assert driver.restarting(HOST)["argv"] == driver.restart_argv(HOST) == ["systemctl", "restart", "sglang-w.service"]
    assert SystemdDriver("u", user=True).stop_argv(HOST) == ["systemctl", "--user", "stop", "u"]
    shown = Recorded(HOST, {"out": "LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=42\n"})
    assert driver.status(shown) == ServiceStatus(True, 42, "active (running)")
    assert shown.asked[0]["argv"] == [
        "systemctl",
        "show",
        "sglang-w.service",
        "--property=ActiveState,SubState,MainPID,LoadState",
    ]
    failed = Recorded(HOST, {"out": "LoadState=loaded\nActiveState=failed\nSubState=failed\nMainPID=0\n"})
    assert driver.status(failed) == ServiceStatus(False, 0, "failed (failed)")
    with pytest.raises(ServiceError, match="on w: there is no unit"):
        driver.status(Recorded(HOST, {"out": "LoadState=not-found\nActiveState=inactive\n"}))
    logs = Recorded(HOST, {"out": "line"})
    driver.logs(logs, 7)
    assert logs.asked[0]["argv"] == [
        "journalctl",
        "--unit",
        "sglang-w.service",
        "--lines",
        "7",
        "--no-pager",
        "--output",
        "short-iso",
    ]


def test_the_systemd_unit_starts_through_the_guard() -> None:
    text = SystemdDriver("u", drain=20).unit_text(HOST)
    assert (
        "ExecStart=/usr/bin/python3 -E -s -S /srv/w/bin/kit/guard.py exec /srv/w\n" in text
        and "TimeoutStopSec=20" in text
    )
    if shutil.which("systemd-analyze"):
        unit = Path("/tmp") / f"phasegate-test-{os.getpid()}.service"
        unit.write_text(text.replace("/srv/w/bin/kit/guard.py", __file__))
        done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
        unit.unlink()
        assert "Unknown" not in done.stderr and "Failed to parse" not in done.stderr


def test_docker_argv() -> None:
    driver = DockerDriver("sglang", drain=20)
    assert driver.starting(HOST)["argv"] == ["docker", "start", "sglang"]
    assert driver.stopping(HOST)["argv"] == driver.stop_argv(HOST) == ["docker", "stop", "--time", "20", "sglang"]
    assert (
        driver.restarting(HOST)["argv"] == driver.restart_argv(HOST) == ["docker", "restart", "--time", "20", "sglang"]
    )
    state = Recorded(HOST, {"out": json.dumps({"Status": "running", "Running": True, "Pid": 7, "ExitCode": 0})})
    assert driver.status(state) == ServiceStatus(True, 7, "running")
    gone = Recorded(HOST, {"out": json.dumps({"Status": "exited", "Running": False, "Pid": 0, "ExitCode": 137})})
    assert driver.status(gone) == ServiceStatus(False, 0, "exited (137)")
    logs = Recorded(HOST, {"out": "a", "err": "b"})
    assert driver.logs(logs, 5) == "ab"
    assert logs.asked[0]["argv"] == ["docker", "logs", "--tail", "5", "sglang"]


def test_a_missing_program_or_a_failing_one_is_named(session: HostSession) -> None:
    with pytest.raises(CommandError, match="on here: .*is not installed"):
        session.do({"op": "command", "argv": ["no-such-program"], "timeout": 5})
    with pytest.raises(CommandError, match="exit status 3: broken"):
        session.do({"op": "command", "argv": ["sh", "-c", "echo broken >&2; exit 3"], "timeout": 5})


@pytest.mark.skipif(not os.path.isdir("/run/systemd/system") or os.geteuid() != 0, reason="systemd does not run here")
def test_systemd_for_real(session: HostSession, lock: HostLock, local: Host) -> None:
    put(session, lock)
    name = f"phasegate-test-{os.getpid()}.service"
    driver, unit = SystemdDriver(name, drain=5), Path("/run/systemd/system") / name
    unit.write_text(driver.unit_text(local))
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    try:
        start(driver, session)
        wait_ready(driver, session, port(local), timeout=200)
        first = driver.status(session)
        restart(driver, session)
        wait_ready(driver, session, port(local), timeout=200)
        assert driver.status(session).running and driver.status(session).pid != first.pid
        stop(driver, session)
        assert not driver.status(session).running
    finally:
        subprocess.run(["systemctl", "stop", name], check=False)
        unit.unlink()
        subprocess.run(["systemctl", "daemon-reload"], check=True)


@pytest.mark.skipif(
    not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0,
    reason="docker does not run here",
)
def test_docker_for_real(session: HostSession) -> None:
    name = f"phasegate-test-{os.getpid()}"
    made = subprocess.run(
        ["docker", "create", "--name", name, "busybox", "sleep", "600"], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no image to be had: {made.stderr[-100:]}")
    driver = DockerDriver(name, drain=1)
    try:
        start(driver, session)
        first = driver.status(session)
        restart(driver, session)
        assert driver.status(session).running and driver.status(session).pid != first.pid
        stop(driver, session)
        assert not driver.status(session).running
    finally:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False)


def test_what_the_host_reports_keeps_host_and_cure(session: HostSession) -> None:
    with pytest.raises(FleetError, match=r"fleet on here: .* is not a release digest"):
        session.do({"op": "release.verify", "digest": "../../etc"})
