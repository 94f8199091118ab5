"""What an older toolkit wrote is still understood, a stranger on the worker's port is not taken for the worker, and a service that is
still ending not for one that is gone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from phases.engines.ssh.deploy import first_release, push
from phases.engines.ssh.errors import ServiceError
from phases.engines.ssh.host import Host
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.services import ProcessDriver
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.transport import connect
from tests.engines.ssh.conftest import ready_of, service_bundle
from tests.engines.ssh.worker import eventually

ONHOST = Path(__file__).parents[3] / "phases/engines/ssh/onhost"
LEADERLESS = "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start(); ctypes.CDLL(None).pthread_exit(None)"


def test_a_service_recorded_by_an_older_toolkit_is_still_stopped(local: Host, driver: ProcessDriver) -> None:
    with HostSession(connect(local)) as session, HostLock(session, "test") as lock:
        old = service_bundle()
        push(session, lock, old)
        first_release(session, lock, driver, old.digest, ready_of(local))
        path = Path(local.root) / "run" / "service.json"
        record = json.loads(path.read_text())
        first = record["process"]["pid"]
        del record["process"]["space"]  # what versions before it did not record
        path.write_text(json.dumps(record))
        assert driver.status(session).running
        session.do(driver.restarting(local))
        assert driver.status(session).pid != first and not Path(f"/proc/{first}").exists()
        session.do(driver.stopping(local))


@pytest.mark.parametrize(
    "record",
    [
        None,
        "",
        "{",
        "[]",
        "{}",
        *(
            '{RECORDED, "%s": %s}' % garbled
            for garbled in [
                ("process", "null"),
                ("process", "5"),
                ("process", '{"pid": "1", "start": 1}'),
                ("group", "1"),
                ("release", "null"),
                ("started", "[]"),
            ]
        ),
    ],
)
def test_a_service_whose_record_is_lost_is_found_by_its_environment(
    local: Host, driver: ProcessDriver, record: str | None
) -> None:
    with HostSession(connect(local)) as session, HostLock(session, "test") as lock:
        bundle = service_bundle()
        push(session, lock, bundle)
        first_release(session, lock, driver, bundle.digest, ready_of(local))
        path = Path(local.root) / "run" / "service.json"
        known = json.loads(path.read_text())
        path.unlink() if record is None else path.write_text(record.replace("RECORDED", json.dumps(known)[1:-1]))
        found = session.do(op("service", action="status"))[0]
        assert (found["running"], found["pid"], found["release"]) == (True, known["process"]["pid"], bundle.digest)
        assert abs(found["started"] - known["started"]) < 5
        session.do(driver.stopping(local))
        assert (
            not Path(f"/proc/{found['pid']}/exe").exists() and not path.exists() and not driver.status(session).running
        )


@pytest.mark.parametrize(
    ("environment", "leader"),
    [
        ({"PHASEGATE_ROOT": "{root}-2", "PHASEGATE_RELEASE": "a"}, True),
        ({"PHASEGATE_ROOT": "{root}"}, True),
        ({"PHASEGATE_RELEASE": "a"}, True),
        ({"PHASEGATE_ROOT": "{root}", "PHASEGATE_RELEASE": "a"}, False),
    ],
)
def test_a_process_that_is_not_shown_to_be_the_service_is_left_alone(
    local: Host, driver: ProcessDriver, environment: dict[str, str], leader: bool
) -> None:
    given = {name: value.format(root=local.root) for name, value in environment.items()}
    Path(local.root).mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=given, cwd=local.root, start_new_session=leader
    ) as stranger:
        with HostSession(connect(local)) as session:
            assert not driver.status(session).running
            session.do(driver.stopping(local))
        assert stranger.poll() is None
        stranger.communicate(b"\n")
    assert stranger.returncode == 0


def test_a_port_that_answers_already_is_refused(local: Host, driver: ProcessDriver) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", int(local.values["port"])))
        stranger.listen()
        with HostSession(connect(local)) as session, HostLock(session, "test") as lock:
            bundle = service_bundle()
            push(session, lock, bundle)
            with pytest.raises(ServiceError, match="already answers, and it is not this service"):
                first_release(session, lock, driver, bundle.digest, ready_of(local))
            assert not driver.status(session).running


def test_a_process_counts_until_its_last_thread_has_ended() -> None:
    """Killed under load, a threaded server was a zombie by its first thread's state while its port still answered."""
    with subprocess.Popen([sys.executable, "-c", LEADERLESS], stdin=subprocess.PIPE) as process:
        assert process.stdin
        eventually(lambda: _state(process.pid) == "Z")
        assert _alive(process.pid)
        process.stdin.close()
        eventually(lambda: not _alive(process.pid))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _alive(pid: int) -> bool:
    """As the scripts on a host see it."""
    asked = f"import place; print(place.alive(place.process_identity({pid})))"
    done = subprocess.run([sys.executable, "-B", "-c", asked], cwd=ONHOST, capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"
