"""A worker's place with a running old release and a pushed new one, looked at from outside."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from phases.engines.ssh.bundle import Bundle
from phases.engines.ssh.deploy import first_release, push
from phases.engines.ssh.host import Host
from phases.engines.ssh.lease import Lease, LeaseState
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.releases import ReleaseStore
from phases.engines.ssh.services import ProcessDriver
from phases.engines.ssh.session import HostSession
from phases.engines.ssh.transport import connect
from tests.engines.ssh.conftest import ready_of, service_bundle

LONG = 600.0  # a window no test waits for


def eventually(true: Callable[[], object], seconds: float = 200.0) -> None:
    """Wait until something holds; the limit is only there so that a failure ends."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it never came to hold"
        time.sleep(0.05)


class Worker:
    """A host with a running old release and a pushed new one."""

    def __init__(self, host: Host, driver: ProcessDriver) -> None:
        self.host, self.driver, self.session = host, driver, HostSession(connect(host))
        self.lock = HostLock(self.session, "test")
        self.old, self.new = service_bundle(), service_bundle()
        for bundle in (self.old, self.new):
            push(self.session, self.lock, bundle)
        first_release(self.session, self.lock, driver, self.old.digest, ready_of(host))
        self.lease = Lease(self.session, self.lock.token)

    def arm(self, window: float = LONG, release: Bundle | None = None) -> LeaseState:
        host = self.host
        return self.lease.arm(
            (release or self.new).digest,
            self.old.digest,
            window,
            self.driver.restart_argv(host),
            self.driver.stop_argv(host),
        )

    def switch(self) -> None:
        self.session.do(
            ReleaseStore(self.session, self.lock).switching(self.new.digest, lease=self.lease.id),
            self.driver.restarting(self.host),
        )

    def record(self) -> dict[str, object]:
        return json.loads(Path(self.host.root, "lease.json").read_text())

    def change(self, **fields: object) -> None:
        """Change the lease behind the guard's back, in one step: it reads whenever it likes."""
        path = Path(self.host.root, "lease.json")
        path.with_name("changed.json").write_text(json.dumps({**self.record(), **fields}))
        os.replace(path.with_name("changed.json"), path)

    def run_out(self, seconds: float = 0.3) -> None:
        """Let the lease's time be over in so many seconds: a short window from the start could end before its switch."""
        self.change(deadline=time.clock_gettime(time.CLOCK_BOOTTIME) + seconds)

    def current(self) -> str:
        return os.path.basename(os.readlink(Path(self.host.root, "current")))

    def served(self) -> str:
        """The release that the running service says it is."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.host.values['port']}/", timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    def events(self) -> list[str]:
        lines = Path(self.host.root, "audit.log").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines]
