"""Hosts, releases, locks and the ledger as they failed others: real directories, real services, real git, and a real sshd where it counts."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from phases.base.errors import FleetError, UsageError
from phases.base.verdict import Verdict
from phases.engines.ssh.deploy import Ready, Windows, first_release, guarded_switch, push, switch_back
from phases.engines.ssh.errors import LeaseError, RouterError
from phases.engines.ssh.host import Host, Timeouts
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.releases import ReleaseStore, read_inventory
from phases.engines.ssh.router import HookRouter, drain
from phases.engines.ssh.services import ProcessDriver
from phases.engines.ssh.session import HostSession
from phases.engines.ssh.ssh import SshTransport
from phases.engines.ssh.transport import connect
from phases.ledger import source
from phases.ledger.checkpoint import Draft
from phases.ledger.git import Git
from phases.ledger.ledger import Ledger
from phases.serving.in_flight import NOTHING
from phases.trial.arms import batches
from tests.engines.ssh.conftest import driver, local, lock, open_session, service_bundle, session, sshd  # noqa: F401 - fixtures
from tests.engines.ssh.sshfleet import SSHD, SshFleet

WINDOWS = Windows(300.0, 300.0)
needs_sshd = pytest.mark.skipif(not SSHD, reason="sshd is not installed (package openssh-server)")


def ready(host: Host, timeout: float = 90.0) -> Ready:
    return Ready(int(host.values["port"]), timeout=timeout)


def test_after_two_failures_in_a_row_the_way_back_is_still_the_good_release(
    local: Host, session: HostSession, lock: HostLock, driver: ProcessDriver
) -> None:  # noqa: F811
    """Not the directory before the newest, not the last one tried: the one recorded as good."""
    good, bad, worse = service_bundle(), service_bundle(crash=True), service_bundle(sick=True)
    for bundle in (good, bad, worse):
        push(session, lock, bundle)
    first_release(session, lock, driver, good.digest, ready(local))
    for bundle in (bad, worse):
        with pytest.raises(FleetError):
            guarded_switch(session, lock, driver, bundle.digest, ready(local, 2.0), WINDOWS)
        found = read_inventory(session)
        assert (found.current, found.last_good) == (good.digest, good.digest)
    assert switch_back(session, lock, driver, ready(local)) == good.digest


def test_going_back_where_nothing_was_ever_good_removes_nothing(
    local: Host, session: HostSession, lock: HostLock, driver: ProcessDriver
) -> None:  # noqa: F811
    bundle = service_bundle()
    push(session, lock, bundle)
    with pytest.raises(FleetError, match="no release has been recorded as good"):
        switch_back(session, lock, driver, ready(local))
    assert read_inventory(session).releases == (bundle.digest,)


def test_a_switch_to_what_runs_already_is_refused_not_repeated(
    local: Host, session: HostSession, lock: HostLock, driver: ProcessDriver
) -> None:  # noqa: F811
    """An automatic way back to the very release that failed would go on for ever."""
    bundle = service_bundle()
    push(session, lock, bundle)
    first_release(session, lock, driver, bundle.digest, ready(local))
    with pytest.raises(LeaseError, match="is what the host would go back to"):
        guarded_switch(session, lock, driver, bundle.digest, ready(local), WINDOWS)


def test_a_failed_start_is_told_long_before_its_deadline(
    local: Host, session: HostSession, lock: HostLock, driver: ProcessDriver
) -> None:  # noqa: F811
    good, bad = service_bundle(), service_bundle(crash=True)
    for bundle in (good, bad):
        push(session, lock, bundle)
    first_release(session, lock, driver, good.digest, ready(local))
    begun = time.monotonic()
    with pytest.raises(FleetError) as told:
        guarded_switch(session, lock, driver, bad.digest, ready(local, 200.0), WINDOWS)
    assert time.monotonic() - begun < 200.0  # the deadline of a start; a dead one is seen at once
    assert "no kernel image is available" in str(told.value)


def test_a_router_that_keeps_a_worker_it_was_told_to_drop_is_found_out(tmp_path: Path) -> None:
    """A weight that never goes back to zero: the abort is not over before the router says so."""

    class Clock:
        at = 0.0

        def now(self) -> float:
            return self.at

        monotonic = now

        def sleep(self, seconds: float) -> None:
            self.at += seconds

    listed = tmp_path / "in-service"
    listed.write_text("http://w1:1\nhttp://w2:1\n")
    router = HookRouter(["true"], ["true", "{url}"], ["cat", str(listed)], Clock(), timeout=5.0)
    with pytest.raises(RouterError, match=r"http://w1:1 is still in service 5 s after the remove hook ran"):
        drain(router, "http://w1:1", lambda: NOTHING, Clock(), 5.0)


@needs_sshd
@pytest.mark.fleet
@pytest.mark.slow
def test_every_connection_has_a_limit_on_connecting_and_keepalives(sshd: SshFleet) -> None:  # noqa: F811
    transport = connect(sshd.host(0, timeouts=Timeouts(connect=4, channel=4, command=4, keepalive=7)))
    assert isinstance(transport, SshTransport)
    with HostSession(transport) as held:
        held.do()
        connection = transport._connection
        assert connection.connect_timeout == 4
        assert connection.transport.packetizer._Packetizer__keepalive_interval == 7  # paramiko has no question for it


@needs_sshd
@pytest.mark.fleet
@pytest.mark.slow
def test_a_dead_connection_costs_no_processor(sshd: SshFleet) -> None:  # noqa: F811
    """A loop that reads from a closed socket for ever takes a whole core."""
    held = HostSession(connect(sshd.host(0, timeouts=Timeouts(connect=3, channel=3, command=3))))
    held.do()
    sshd.restart(sshd.hosts[0])  # ends the session without a word
    begun = time.process_time()
    time.sleep(1.5)
    assert time.process_time() - begun < 0.75  # seconds of processor time, not of the clock
    held.close()


def test_the_ledger_never_touches_what_a_person_is_editing(tmp_path: Path) -> None:
    """A checkpoint made with reset and checkout once dropped an operator's edits; ours is written beside the work tree."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q", "-b", "main")
    git("config", "user.name", "Ada")
    git("config", "user.email", "ada@example.org")
    (tmp_path / "kept").write_text("committed\n")
    git("add", ".")
    git("commit", "-qm", "begin")
    (tmp_path / "kept").write_text("half typed")
    (tmp_path / "new").write_text("not added")
    git("add", "new")
    (tmp_path / "new").write_text("added, then changed")
    before = git("status", "--porcelain"), git("diff"), git("diff", "--cached"), git("rev-parse", "HEAD")
    ledger = Ledger(tmp_path, "checkpoints", "", "never", "checkpoint/", lambda line: None)
    ledger.record(
        Draft(
            "build-parity",
            Verdict.PASS,
            "k",
            "run@1",
            {"results.json": b"{}"},
            source.describe(Git(tmp_path)),
            1.0,
            {},
            "p",
        )
    )
    assert (git("status", "--porcelain"), git("diff"), git("diff", "--cached"), git("rev-parse", "HEAD")) == before


def test_a_number_of_hosts_that_leaves_nobody_in_service_is_refused() -> None:
    with pytest.raises(UsageError, match="min_available"):
        batches([Host("w1", "local", "/srv/w1")], in_service=1, floor=1)


def test_replacing_the_link_is_one_rename(
    local: Host, session: HostSession, lock: HostLock, driver: ProcessDriver
) -> None:  # noqa: F811
    """`rm` and `ln` leave a moment without a release; here a reader in a tight loop always finds one."""
    first, second = service_bundle(), service_bundle()
    for bundle in (first, second):
        push(session, lock, bundle)
    store = ReleaseStore(session, lock)
    store.switch(first.digest)
    current, stop = Path(local.root, "current"), time.monotonic() + 1.0
    child = os.fork()
    if child == 0:
        while time.monotonic() < stop:
            try:
                os.stat(current / "manifest.json")
            except OSError:
                os._exit(1)
        os._exit(0)
    while time.monotonic() < stop:
        for bundle in (second, first):
            store.switch(bundle.digest)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
