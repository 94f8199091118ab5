from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phases.engines.ssh.bundle import Bundle, Launch, make_bundle
from phases.engines.ssh.deploy import Ready
from phases.engines.ssh.host import Host
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.services import ProcessDriver
from phases.engines.ssh.session import HostSession
from phases.engines.ssh.transport import connect
from tests.engines.ssh.sshfleet import PYTHON, SSHD, SshFleet, can_make_namespaces, end_processes_of, free_port

# A service that answers /health with its release, drains on SIGTERM, and refuses to start when its release says so.
SERVICE = b"""
import http.server, json, os, signal, sys, time
settings = json.load(open(os.path.join(os.environ["PHASEGATE_RELEASE_DIR"], "site", "settings.json")))
print("service", os.environ["PHASEGATE_RELEASE"][:12], "starting", flush=True)
if settings.get("crash"):
    sys.exit("no kernel image is available")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if settings.get("sick") else 200)
        self.end_headers()
        self.wfile.write(os.environ["PHASEGATE_RELEASE"].encode())
    def log_message(self, *arguments):
        pass
class Server(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
def drain(*_):
    print("draining", flush=True)
    time.sleep(settings.get("drain", 0))
    print("drained", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, drain)
server.serve_forever()
"""


def service_bundle(size: int = 1000, **settings: object) -> Bundle:
    """A release of the small service; every call makes another one, unless `same` is given."""
    import json

    blob = secrets.token_bytes(size)
    files = {"site/service.py": SERVICE, "site/settings.json": json.dumps(settings).encode(), "objects/kernel.so": blob}
    launch = Launch(("{python}", "{release}/site/service.py", "{port}"), {"PHASEGATE_RELEASE_DIR": "{release}"})
    return make_bundle(files, launch, {"kernel": "test"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engines/ssh" not in str(item.path):
            continue
        used = set(getattr(item, "fixturenames", ()))
        if used & {"sshd", "namespaced", "local", "router_url"}:
            item.add_marker(pytest.mark.fleet)
        if used & {"sshd", "namespaced"}:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.skipif(not SSHD, reason="sshd is not installed (package openssh-server)"))


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshFleet]:
    """Four sshd on addresses of their own, or on loopback ports where namespaces cannot be made."""
    fleet = SshFleet(tmp_path_factory.mktemp("fleet") / "f", 4, namespaces=can_make_namespaces())
    yield fleet
    fleet.close()


@pytest.fixture
def namespaced(sshd: SshFleet) -> SshFleet:
    if not sshd.namespaces:
        pytest.skip("needs the right to make network namespaces")
    return sshd


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Host]:
    """A worker's place on this machine, without ssh."""
    host = Host("here", "local", str(tmp_path / "worker"), python=PYTHON, values={"port": str(free_port())})
    yield host
    end_processes_of(tmp_path / "worker")


@pytest.fixture
def remote(sshd: SshFleet, tmp_path: Path) -> Iterator[Host]:
    """A worker's place behind the first sshd."""
    yield sshd.host(0, root=str(tmp_path / "worker"), values={"port": str(free_port())})
    end_processes_of(tmp_path / "worker")


@pytest.fixture
def open_session() -> Iterator[Callable[[Host], HostSession]]:
    """Sessions that are closed at the end of the test."""
    made: list[HostSession] = []

    def open_one(host: Host) -> HostSession:
        made.append(HostSession(connect(host)))
        return made[-1]

    yield open_one
    for session in made:
        session.close()


@pytest.fixture
def session(local: Host, open_session: Callable[[Host], HostSession]) -> HostSession:
    return open_session(local)


@pytest.fixture
def lock(session: HostSession) -> HostLock:
    lock = HostLock(session, "test")
    lock.acquire()
    return lock


@pytest.fixture
def driver() -> ProcessDriver:
    return ProcessDriver(drain=20)


def ready_of(host: Host, timeout: float = 120) -> Ready:
    return Ready(int(host.values["port"]), timeout=timeout)
