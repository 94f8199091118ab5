"""A fleet of real sshd with things going wrong: whatever happens, no host is left half switched, and no lock without an owner."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phases.engines.ssh.bundle import Bundle
from phases.engines.ssh.deploy import first_release, push
from phases.engines.ssh.errors import HostKeyError, ReleaseError, SilentHostError, UnreachableError
from phases.engines.ssh.fanout import Outcome
from phases.engines.ssh.fleet import Fleet
from phases.engines.ssh.host import Host, Timeouts
from phases.engines.ssh.locks import HostLock, show_lock
from phases.engines.ssh.releases import Pushed, ReleaseStore, read_audit, read_inventory
from phases.engines.ssh.services import ProcessDriver
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.transport import connect
from tests.engines.ssh.conftest import ready_of, service_bundle
from tests.engines.ssh.sshfleet import SshdHost, SshFleet, end_processes_of, free_port
from tests.engines.ssh.worker import eventually

SHORT = Timeouts(connect=8, channel=8, command=8, keepalive=1)  # for what meets the fault; the rest may take its time
REPO = Path(__file__).parents[3]


class Interrupted(Bundle):
    """A bundle that does something to the host after half of it has been sent."""

    def payload(self, offset: int = 0) -> Iterator[memoryview | bytes]:
        data = b"".join(bytes(part) for part in super().payload(offset))
        half = len(data) // 2
        for start in range(0, half, 65536):
            yield data[start : min(half, start + 65536)]
        self.event()  # type: ignore[attr-defined]
        for start in range(half, len(data), 65536):
            yield data[start : start + 65536]


def interrupted(bundle: Bundle, event: object) -> Interrupted:
    made = Interrupted(bundle.digest, bundle.manifest, bundle.files)
    object.__setattr__(made, "event", event)
    return made


@pytest.fixture
def worker(sshd: SshFleet, tmp_path: Path) -> Iterator[Host]:
    host = sshd.host(2, root=str(tmp_path / "w"), timeouts=SHORT, values={"port": str(free_port())})
    yield host
    end_processes_of(tmp_path / "w")


@pytest.mark.parametrize("fault", ["sigstop", "kill", "cable", "packets"])
def test_an_upload_that_meets_a_fault_leaves_the_host_whole_and_can_be_repeated(
    sshd: SshFleet, worker: Host, fault: str
) -> None:
    if fault in ("cable", "packets") and not sshd.namespaces:
        pytest.skip("needs the right to make network namespaces")
    machine = sshd.hosts[2]
    begin, end = _fault(sshd, machine, fault)
    bundle, small = service_bundle(12_000_000), service_bundle(1000)
    session = HostSession(connect(worker), idle=2.0)
    lock = HostLock(session, "test")
    lock.acquire()
    store = ReleaseStore(session, lock)
    store.push(small)
    store.switch(small.digest)
    try:
        # a lossy network may still let through the host's own word that the upload was cut off
        with pytest.raises((UnreachableError, ReleaseError), match="on h02"):
            store.push(interrupted(bundle, begin))
    finally:
        end()
    with HostSession(connect(patient(worker))) as fresh:
        found = read_inventory(fresh)
        assert found.current == small.digest and bundle.digest not in found.releases
        eventually(lambda: (held := show_lock(fresh)) is None or held.orphan)
        pushed = push(fresh, HostLock(fresh, "again"), bundle)
        assert pushed.sent <= bundle.size
        assert bundle.digest in read_inventory(fresh).releases
    session.close()


def patient(host: Host) -> Host:
    """The same host, for a machine that has much else to do."""
    return dataclasses.replace(host, timeouts=Timeouts(connect=60, channel=60, command=120))


def _fault(fleet: SshFleet, machine: SshdHost, fault: str) -> tuple[object, object]:
    if fault == "sigstop":
        return (lambda: machine.signal(signal.SIGSTOP)), (lambda: machine.signal(signal.SIGCONT))
    if fault == "kill":
        return (lambda: fleet.stop(machine)), (lambda: fleet.restart(machine))
    if fault == "cable":
        return machine.cut, machine.mend
    return (lambda: machine.drop(0.999)), machine.undrop


TOOLKIT = """
import pickle, sys
from phases.engines.ssh.deploy import *
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.services import ProcessDriver
from phases.engines.ssh.session import HostSession
from phases.engines.ssh.transport import connect
host, bundle, window = pickle.load(open(sys.argv[1], "rb"))
session = HostSession(connect(host))
lock = HostLock(session, "rollout")
push(session, lock, bundle)
print("pushed", flush=True)
ready = Ready(int(host.values["port"]), timeout=window / 2)
lease = guarded_switch(session, lock, ProcessDriver(5), bundle.digest, ready, Windows(window, window))
print("confirmed", flush=True)
while True:
    lease.renew(window)
"""


@pytest.mark.parametrize("moment", ["during the upload", "mid-switch", "while it bakes"])
def test_a_toolkit_killed_at_any_moment(worker: Host, moment: str, tmp_path: Path) -> None:
    """The lease is armed for minutes, so that a slow machine gets that far, and cut short once the toolkit is dead."""
    worker = patient(worker)
    old, new = service_bundle(1000), service_bundle(20_000_000)
    driver = ProcessDriver(5)
    with HostSession(connect(worker)) as session, HostLock(session, "setup") as lock:
        push(session, lock, old)
        first_release(session, lock, driver, old.digest, ready_of(worker))
    (tmp_path / "args").write_bytes(pickle.dumps((worker, new, 200.0)))
    toolkit = subprocess.Popen(
        [sys.executable, "-c", TOOLKIT, str(tmp_path / "args")], stdout=subprocess.PIPE, text=True, cwd=REPO
    )
    assert toolkit.stdout
    root = Path(worker.root)
    if moment == "during the upload":
        eventually(lambda: any(root.glob("releases/.incoming-*/objects/kernel.so")))
    elif moment == "mid-switch":
        eventually((root / "lease.json").exists)
    else:
        assert [toolkit.stdout.readline().strip() for _ in range(2)] == ["pushed", "confirmed"]
    toolkit.kill()
    toolkit.wait()
    if moment != "during the upload":
        eventually(lambda: _cut_short(root))
    eventually(lambda: not (root / "lock.json").exists())
    assert os.path.basename(os.readlink(root / "current")) == old.digest
    with HostSession(connect(worker)) as session:
        eventually(lambda: driver.status(session).running)
        assert session.do(op("service", action="status"))[0]["release"] == old.digest
        assert show_lock(session) is None
        events = [entry["event"] for entry in read_audit(session)[0]]
        assert ("lease_reverted" in events) == (moment != "during the upload")


def _cut_short(root: Path) -> bool:
    """Let the lease be over now: once it has its guard, under the mutex of the host's scripts."""
    with open(root / "run/mutex", "a") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        lease = json.loads((root / "lease.json").read_text())
        if lease["guard"] is None:
            return False
        (root / "changed.json").write_text(json.dumps({**lease, "deadline": time.clock_gettime(time.CLOCK_BOOTTIME)}))
        os.replace(root / "changed.json", root / "lease.json")
    return True


def test_a_dead_network_during_a_bake_reverts_without_anybody(namespaced: SshFleet, tmp_path: Path) -> None:
    """The machine runs, the toolkit runs, only the cable between them is gone."""
    from phases.engines.ssh.deploy import Ready, Windows, guarded_switch

    host = namespaced.host(3, root=str(tmp_path / "w"), timeouts=SHORT, values={"port": str(free_port())})
    driver, old, new = ProcessDriver(5), service_bundle(1000), service_bundle(1000)
    session = HostSession(connect(host))
    lock = HostLock(session, "test")
    push(session, lock, old)
    push(session, lock, new)
    first_release(session, lock, driver, old.digest, ready_of(host))
    lease = guarded_switch(
        session, lock, driver, new.digest, Ready(int(host.values["port"]), timeout=25), Windows(60, 3)
    )
    namespaced.hosts[3].cut()
    try:
        with pytest.raises(UnreachableError, match="on h03"):
            while True:
                lease.renew(3)
        eventually(lambda: json.loads((tmp_path / "w/lease.json").read_text())["state"] == "reverted")
        assert os.path.basename(os.readlink(tmp_path / "w/current")) == old.digest
    finally:
        namespaced.hosts[3].mend()
    with HostSession(connect(host)) as again:
        assert driver.status(again).running
        assert read_audit(again)[0][-1]["event"] in ("lease_reverted", "lock_dropped")
    end_processes_of(tmp_path / "w")


def test_one_bad_host_of_each_kind_and_the_good_one_still_gets_its_release(sshd: SshFleet, tmp_path: Path) -> None:
    """Fan-out over four hosts: one silent, one with another key, one whose Python is missing, one fine."""
    hosts = [sshd.host(n, root=str(tmp_path / f"w{n}"), timeouts=SHORT, values={"port": "1"}) for n in range(4)]
    hosts[0], hosts[1] = patient(hosts[0]), patient(hosts[1])
    hosts[1] = dataclasses.replace(hosts[1], python="/no/such/python")
    other = tmp_path / "known_hosts"
    foreign = sshd.hosts[0].host_key.with_suffix(".pub").read_text()
    other.write_text(f"[{hosts[3].address}]:{hosts[3].ssh.port} {foreign}")
    hosts[3] = dataclasses.replace(hosts[3], ssh=dataclasses.replace(hosts[3].ssh, known_hosts=(other,)))
    bundle = service_bundle(300_000)
    sshd.hosts[2].signal(signal.SIGSTOP)
    try:
        with Fleet(hosts, limit=4) as fleet:

            def act(session: HostSession) -> Pushed:
                lock = HostLock(session, "test")
                pushed = push(session, lock, bundle)
                lock.release()
                return pushed

            results = fleet.each(act, deadline=250)
    finally:
        sshd.hosts[2].signal(signal.SIGCONT)
    assert results["h00"].ok and results["h00"].value.sent == bundle.size
    assert isinstance(results["h01"].error, UnreachableError) and "`python`" in str(results["h01"].error)
    assert isinstance(results["h02"].error, SilentHostError)
    assert isinstance(results["h03"].error, HostKeyError)
    for name in ("h01", "h02", "h03"):
        assert f"on {name}" in results[name].reason


def test_the_deadline_of_the_whole_cuts_off_a_host_that_is_merely_slow(sshd: SshFleet, tmp_path: Path) -> None:
    hosts = [sshd.host(n, root=str(tmp_path / f"w{n}")) for n in range(2)]
    ended = threading.Event()

    def act(session: HostSession) -> str:
        if session.host.name == "h01":
            try:
                session.do(op("command", argv=["sleep", "120"], timeout=121))
            finally:
                ended.set()
        return "done"

    with Fleet(hosts) as fleet:
        results = fleet.each(act, deadline=8)
        assert results["h00"].value == "done"
        assert results["h01"].outcome is Outcome.TIMED_OUT
        assert ended.wait(100), "the abandoned connection was closed, and its thread ended before the command did"


def test_login_scripts_that_talk_do_not_disturb(sshd: SshFleet, remote: Host) -> None:
    chatter = sshd.home / ".bashrc"
    chatter.write_text("echo 'Welcome! 3 updates are available.'\necho >&2 'and something on stderr'\n")
    try:
        with HostSession(connect(remote)) as session:
            assert session.do(op("facts"))[0]["python"]
    finally:
        chatter.unlink()
