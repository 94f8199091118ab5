"""The lease: what happens when nobody comes back, comes too early or too late, and when the guard or the host fails.

Deadlines here are short but real; what must not happen within one is checked against the state, not against a stopwatch.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from phases.base.clock import SystemClock
from phases.engines.ssh.deploy import end_service, push
from phases.engines.ssh.errors import LeaseError, ReleaseError, ServiceError, TakenOverError, code_of
from phases.engines.ssh.host import Host
from phases.engines.ssh.lease import Lease, read_lease
from phases.engines.ssh.locks import HostLock, break_lock, show_lock
from phases.engines.ssh.releases import NEVER, ReleaseStore, read_audit, read_inventory
from phases.engines.ssh.services import ProcessDriver, stop
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.transport import connect
from tests.engines.ssh.conftest import service_bundle
from tests.engines.ssh.worker import LONG, Worker, eventually

JUMP = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, now);
  FILE *file;
  if (id == CLOCK_REALTIME && (file = fopen(getenv("JUMP_FILE"), "r"))) {
    long offset = 0;
    if (fscanf(file, "%ld", &offset) == 1) now->tv_sec += offset;
    fclose(file);
  }
  return code;
}
"""
ONHOST = Path(__file__).parents[3] / "phases/engines/ssh/onhost"


@pytest.fixture
def worker(local: Host, driver: ProcessDriver) -> Worker:
    made = Worker(local, driver)
    yield made
    made.session.close()
    made.lease.session.close()


def test_nobody_confirms_and_the_host_goes_back_by_itself(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    assert worker.current() == worker.new.digest
    worker.run_out()
    eventually(lambda: worker.record()["state"] == "reverted")
    assert worker.current() == worker.old.digest
    eventually(lambda: worker.served() == worker.old.digest)
    assert worker.events()[-2:] == ["lease_reverting", "lease_reverted"]
    with pytest.raises(LeaseError, match="already reverted: nobody confirmed in 600 s"):
        worker.lease.confirm(LONG)


def test_confirmed_renewed_and_kept(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    assert worker.lease.confirm(LONG).state == "confirmed"
    before = worker.lease.observe().seconds_left
    assert worker.lease.renew(2 * LONG).seconds_left > before + LONG / 2
    assert worker.lease.keep().state == "kept"
    assert worker.lease.keep().state == "kept", "keeping twice is keeping once"
    found = read_inventory(worker.lease.session)
    assert found.current == found.last_good == worker.new.digest
    guard = worker.record()["guard"]["pid"]
    eventually(lambda: not Path(f"/proc/{guard}/cmdline").exists() or not Path(f"/proc/{guard}/cmdline").read_bytes())
    assert worker.events()[-3:] == ["switched", "lease_confirmed", "lease_kept"]


def test_a_confirmed_lease_that_is_not_renewed_goes_back(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    worker.lease.confirm(1.0)
    eventually(lambda: worker.record()["state"] == "reverted")
    assert worker.record()["reason"] == "nobody renewed in 1 s"
    with pytest.raises(LeaseError, match="already reverted"):
        worker.lease.renew(LONG)


def test_it_falls_back_hot_at_once_and_restarts_in_its_turn(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    worker.lease.confirm(LONG, turn=LONG)
    assert Path(worker.host.root, "control").read_bytes() == b"c"
    worker.run_out()
    eventually(lambda: worker.events()[-1] == "lease_ran_out")
    assert Path(worker.host.root, "control").read_bytes() == b"i"
    assert worker.record()["state"] == "confirmed" and worker.current() == worker.new.digest
    with pytest.raises(LeaseError, match="the lease ran out"):  # whoever comes back now puts it back rather than go on
        worker.lease.renew(LONG)
    worker.change(turn=0.0)
    eventually(lambda: worker.record()["state"] == "reverted")
    assert worker.current() == worker.old.digest and worker.events().count("lease_ran_out") == 1
    eventually(lambda: worker.served() == worker.old.digest)


def test_whoever_comes_back_before_its_turn_puts_it_back(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    worker.lease.confirm(LONG)
    worker.lease.renew(LONG, turn=LONG)
    worker.run_out()
    eventually(lambda: worker.events()[-1] == "lease_ran_out")
    assert worker.lease.cancel("a person came").state == "reverted"
    eventually(lambda: worker.served() == worker.old.digest)


@pytest.mark.parametrize("confirmed", [False, True])
def test_a_service_that_is_ended_takes_its_lease_along_and_nobody_starts_it_again(
    worker: Worker, confirmed: bool
) -> None:
    worker.arm()
    worker.switch()
    if confirmed:
        worker.lease.confirm(LONG)
    guard, pid = worker.record()["guard"]["pid"], worker.driver.status(worker.session).pid
    assert end_service(worker.session, worker.driver, SystemClock(), "the fleet was taken down") is True
    assert (
        worker.record()["state"] == "reverted"
        and worker.record()["reason"] == "the fleet was taken down"
        and worker.current() == worker.old.digest
    )
    assert not worker.driver.status(worker.session).running and not _runs(pid) and worker.served() == ""
    eventually(lambda: not _runs(guard))
    assert end_service(worker.session, worker.driver, SystemClock(), "again") is False
    assert worker.record()["reason"] == "the fleet was taken down"
    assert Path(worker.host.root, "run/service.log").read_text().count("starting") == 2, (
        "the old release, then the new one, and nothing since"
    )


class Waits(SystemClock):
    """What ends the wait of whoever sleeps by it: a file appears."""

    def __init__(self, path: Path) -> None:
        self.path, self.slept = path, 0

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.path.touch()
        super().sleep(seconds)


def restart_begun(worker: Worker, tmp_path: Path) -> Path:
    """A lease that has run out, its guard in the middle of a restart that goes on once the file returned exists."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    slow = [
        "sh",
        "-c",
        'touch "$1"; while [ ! -e "$2" ]; do sleep 0.05; done; shift 2; exec "$@"',
        "sh",
        str(begun),
        str(go),
        *worker.driver.restart_argv(worker.host),
    ]
    worker.lease.arm(worker.new.digest, worker.old.digest, LONG, slow, worker.driver.stop_argv(worker.host))
    worker.switch()
    worker.run_out()
    eventually(begun.exists)
    return go


def test_a_restart_that_a_guard_is_in_the_middle_of_is_waited_for_before_the_service_is_ended(
    worker: Worker, tmp_path: Path
) -> None:
    go = restart_begun(worker, tmp_path)
    clock = Waits(go)
    assert end_service(worker.session, worker.driver, clock, "the fleet was taken down") is True
    assert (
        clock.slept
        and worker.record()["reason"].startswith("nobody confirmed")
        and worker.record()["state"] == "reverted"
    )
    assert not worker.driver.status(worker.session).running and worker.served() == ""


def test_a_restart_whose_guard_was_killed_is_waited_for_too(worker: Worker, tmp_path: Path) -> None:
    """It goes on without the guard, and would start the service after it was ended."""
    go = restart_begun(worker, tmp_path)
    guard = int(worker.record()["guard"]["pid"])  # type: ignore[index]
    os.kill(guard, signal.SIGKILL)
    eventually(lambda: not _runs(guard))
    clock = Waits(go)
    try:
        assert end_service(worker.session, worker.driver, clock, "the fleet was taken down") is True
    finally:
        go.touch()
    assert clock.slept and worker.record()["state"] == "reverted"
    assert not worker.driver.status(worker.session).running and worker.served() == ""


def test_a_restart_that_a_killed_run_left_under_way_is_waited_for_though_no_lease_is_active(worker: Worker) -> None:
    with Path(worker.host.root, "run/restarting").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)  # as whoever restarts holds it, from the stop to the start
        with pytest.raises(ServiceError, match="restarted, for longer than that takes"):
            end_service(worker.session, worker.driver, Over(), "the fleet was taken down")
        assert worker.driver.status(worker.session).running
    assert (
        end_service(worker.session, worker.driver, SystemClock(), "the fleet was taken down") is True
        and worker.served() == ""
    )


class Over(SystemClock):
    """Each look at it finds an hour gone."""

    looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return 3600.0 * self.looks


def _runs(pid: int) -> bool:
    """Whether there is such a process that is no zombie: those have no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_guard_ends_with_the_host_it_guards(worker: Worker) -> None:
    worker.arm()
    guard = worker.record()["guard"]["pid"]
    stop(worker.driver, worker.session)
    shutil.rmtree(worker.host.root)
    eventually(lambda: not Path(f"/proc/{guard}/cmdline").exists() or not Path(f"/proc/{guard}/cmdline").read_bytes())


def test_the_arming_connection_cannot_confirm(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    with pytest.raises(LeaseError, match="over the connection that armed"):
        worker.session.do(op("lease.confirm", lease_id=worker.lease.id, window=LONG))
    assert worker.lease.observe().state == "armed"


def test_before_the_switch_a_confirmation_proves_nothing(worker: Worker) -> None:
    worker.arm()
    session = worker.session.fresh()
    with pytest.raises(LeaseError, match="not the leased release yet.*still armed") as caught:
        session.do(op("lease.confirm", lease_id=worker.lease.id, window=LONG))
    assert code_of(caught.value) == "lease_early"
    worker.switch()
    assert session.do(op("lease.confirm", lease_id=worker.lease.id, window=LONG))[0]["state"] == "confirmed"
    session.close()


def test_right_after_the_switch_a_confirmation_counts_even_if_the_guard_has_not_looked(worker: Worker) -> None:
    """Field failure: rolled back although activation succeeded, since the confirmation came before anybody watched."""
    worker.arm()
    guard = worker.record()["guard"]["pid"]
    os.kill(guard, signal.SIGSTOP)
    try:
        worker.switch()
        assert worker.lease.confirm(LONG).state == "confirmed"
    finally:
        os.kill(guard, signal.SIGCONT)
    time.sleep(1.0)  # the guard has had its look by now
    assert worker.record()["state"] == "confirmed" and worker.current() == worker.new.digest


def test_too_late_is_decided_by_the_clock_not_by_who_is_faster(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    worker.change(deadline=time.clock_gettime(time.CLOCK_BOOTTIME) - 0.001)
    with pytest.raises(LeaseError) as caught:
        worker.lease.confirm(LONG)
    assert code_of(caught.value) in ("lease_expired", "lease_over")
    eventually(lambda: worker.record()["state"] == "reverted")


def test_a_switch_after_the_lease_ran_out_is_refused(worker: Worker) -> None:
    worker.arm()
    worker.run_out()
    eventually(lambda: worker.record()["state"] == "reverted")
    with pytest.raises(LeaseError, match="already reverted"):
        worker.switch()
    assert worker.current() == worker.old.digest


def test_without_the_lease_nobody_switches_a_guarded_host(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    with pytest.raises(LeaseError, match="armed lease guards this host"):
        ReleaseStore(worker.session, worker.lock).switch(worker.old.digest)
    with pytest.raises(LeaseError, match="another lease is armed"):
        Lease(worker.session, worker.lock.token).arm(worker.new.digest, worker.old.digest, LONG, [], [])


def test_the_way_back_must_be_good_before_anything_moves(worker: Worker) -> None:
    Path(worker.host.root, "releases", worker.old.digest, "objects/kernel.so").write_bytes(b"rot")
    with pytest.raises(ReleaseError, match="is damaged"):
        worker.arm()
    assert worker.lease.observe() is None
    with pytest.raises(LeaseError, match="nothing to switch|go back to"):
        Lease(worker.session, worker.lock.token).arm(worker.new.digest, worker.new.digest, LONG, [], [])


def test_somebody_else_changed_the_host(worker: Worker) -> None:
    ReleaseStore(worker.session, worker.lock).switch(worker.new.digest)
    third = service_bundle()
    push(worker.session, worker.lock, third)
    with pytest.raises(ReleaseError, match="as the run expects.*Somebody else"):
        worker.arm(release=third)


def test_a_killed_guard_is_noticed_and_replaced_by_the_next_contact(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    worker.lease.confirm(LONG)
    first = worker.record()["guard"]["pid"]
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not worker.lease.observe().guard_works)
    state = worker.lease.renew(LONG)
    assert state.guard_works and worker.record()["guard"]["pid"] != first
    assert "guard_lost" in worker.events()
    worker.change(deadline=time.clock_gettime(time.CLOCK_BOOTTIME) + 0.2)
    eventually(lambda: worker.record()["state"] == "reverted")


def test_a_stopped_guard_counts_as_lost(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    worker.lease.confirm(LONG)
    first = worker.record()["guard"]["pid"]
    os.kill(first, signal.SIGSTOP)
    eventually(lambda: not worker.lease.observe().guard_works)
    assert worker.lease.renew(LONG).guard_works
    assert worker.record()["guard"]["pid"] != first


def test_guard_and_toolkit_both_gone_the_next_start_of_the_service_goes_back(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    os.kill(worker.record()["guard"]["pid"], signal.SIGKILL)
    worker.change(deadline=time.clock_gettime(time.CLOCK_BOOTTIME) - 1)
    subprocess.run(worker.driver.restart_argv(worker.host), check=True, capture_output=True)
    assert worker.current() == worker.old.digest and worker.record()["state"] == "reverted"
    eventually(lambda: worker.served() == worker.old.digest)


def test_after_a_reboot_the_service_starts_the_previous_release(worker: Worker) -> None:
    """A reboot is simulated by what it leaves: no process, and a lease with another boot's id."""
    worker.arm()
    worker.switch()
    worker.lease.confirm(LONG)
    worker.session.close()
    worker.lease.session.close()
    os.kill(worker.record()["guard"]["pid"], signal.SIGKILL)
    subprocess.run(worker.driver.stop_argv(worker.host), check=True, capture_output=True)
    worker.change(boot="0000-another-boot")
    start = [worker.host.python, str(ONHOST / "guard.py"), "exec", worker.host.root]
    service = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: worker.served() == worker.old.digest)
        assert "rebooted" in worker.record()["reason"] and worker.current() == worker.old.digest
    finally:
        service.kill()
        service.wait()


@pytest.mark.parametrize("damage", ["{damaged", None], ids=["damaged", "removed"])
def test_a_damaged_lease_file_does_not_stop_the_guard(worker: Worker, damage: str | None) -> None:
    worker.arm()
    worker.switch()
    path, beat = Path(worker.host.root, "lease.json"), Path(worker.host.root, "run/guard.beat")
    worker.run_out(6.0)
    changed = time.clock_gettime(time.CLOCK_BOOTTIME)
    eventually(lambda: float(beat.read_text() or 0) > changed)  # the guard has read it
    path.unlink() if damage is None else path.write_text(damage)
    eventually(lambda: worker.current() == worker.old.digest)
    eventually(lambda: worker.served() == worker.old.digest)
    eventually(lambda: path.exists() and worker.record()["state"] == "reverted")


def test_a_contact_while_the_lease_is_being_armed_does_not_take_its_guard_for_lost(worker: Worker) -> None:
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            with HostSession(connect(worker.host)) as session:
                session.do(op("lease.show"))

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for thread in lookers:
        thread.start()
    for _ in range(4):
        worker.arm()
        worker.lease.cancel("again")
        worker.lease = Lease(worker.session, worker.lock.token)
    stop.set()
    for thread in lookers:
        thread.join()
    assert "guard_lost" not in worker.events()


@pytest.mark.parametrize("late", [False, True])
def test_inside_a_container_the_guard_outside_is_judged_by_its_heartbeat(worker: Worker, late: bool) -> None:
    """Its process number means nothing in there: it must neither be taken for dead nor be replaced, nor somebody else killed."""
    worker.arm()
    worker.switch()
    guard = worker.record()["guard"]
    os.kill(guard["pid"], signal.SIGSTOP)  # so that it writes nothing while its record is changed
    worker.change(guard={**guard, "space": "pid:[1]"})
    if late:
        worker.change(deadline=time.clock_gettime(time.CLOCK_BOOTTIME) - 1)
        Path(worker.host.root, "run/guard.beat").write_text("0")
    subprocess.run(worker.driver.restart_argv(worker.host), check=True, capture_output=True)
    assert Path(f"/proc/{guard['pid']}").exists()
    assert worker.record()["state"] == ("reverted" if late else "armed")
    eventually(lambda: worker.served() == (worker.old if late else worker.new).digest)
    os.kill(guard["pid"], signal.SIGKILL)


def test_after_a_reboot_the_next_contact_goes_back_where_nothing_starts_by_itself(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    os.kill(worker.record()["guard"]["pid"], signal.SIGKILL)
    worker.change(boot="0000-another-boot")
    with HostSession(connect(worker.host)) as session:
        session.do(op("inventory"))
        eventually(lambda: read_lease(session).state == "reverted")
    assert worker.current() == worker.old.digest
    eventually(lambda: worker.served() == worker.old.digest)


def test_a_guard_killed_while_going_back_is_finished_by_the_next_contact(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    guard = worker.record()["guard"]["pid"]
    os.kill(guard, signal.SIGKILL)
    worker.change(state="reverting", reason="the test says so")
    with HostSession(connect(worker.host)) as session:
        session.do(op("inventory"))
        eventually(lambda: read_lease(session).state == "reverted")
    assert worker.current() == worker.old.digest


@pytest.mark.parametrize("jump", ["2592000", "-2592000"])
def test_setting_the_wall_clock_changes_nothing(worker: Worker, jump: str, tmp_path: Path) -> None:
    """The guard sees the wall clock jump by a month, forwards and backwards, while the lease runs.

    Only its own view is changed, by a small library in front of libc: the machine's clock belongs to everybody.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler here")
    clock, library = tmp_path / "offset", tmp_path / "jump.so"
    clock.write_text("0")
    (tmp_path / "jump.c").write_text(JUMP)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "jump.c", "-ldl"], check=True)
    worker.arm()
    worker.switch()
    os.kill(worker.record()["guard"]["pid"], signal.SIGKILL)
    faked = {"LD_PRELOAD": str(library), "JUMP_FILE": str(clock)}
    guard = subprocess.Popen(
        [worker.host.python, str(ONHOST / "guard.py"), "watch", worker.host.root, worker.lease.id],
        env={**os.environ, **faked},
    )
    try:
        eventually(lambda: worker.record()["guard"]["pid"] == guard.pid)
        clock.write_text(jump)
        time.sleep(1.5)  # several looks of the guard at the jumped clock
        assert worker.record()["state"] == "armed"
        eventually(lambda: worker.lease.observe().guard_works)
        worker.change(deadline=time.clock_gettime(time.CLOCK_BOOTTIME) + 0.5)
        eventually(lambda: worker.record()["state"] == "reverted")
        lines = Path(worker.host.root, "audit.log").read_text().splitlines()
        stamps = {entry["event"]: entry["time"] for entry in map(json.loads, lines)}
        assert abs(stamps["lease_reverting"] - stamps["lease_armed"]) > 86400 * 20, (
            "the jump must really have been seen"
        )
    finally:
        guard.kill()
        guard.wait()


def test_cancel_goes_back_at_once(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    state = worker.lease.cancel("the canary is slower")
    assert (state.state, state.reason, state.current) == ("reverted", "the canary is slower", worker.old.digest)
    eventually(lambda: worker.served() == worker.old.digest)
    assert worker.lease.cancel("again").state == "reverted"


def test_a_first_release_that_is_not_confirmed_leaves_nothing_running(local: Host, driver: ProcessDriver) -> None:
    with HostSession(connect(local)) as session:
        lock, bundle = HostLock(session, "test"), service_bundle()
        push(session, lock, bundle)
        lease = Lease(session, lock.token)
        lease.arm(bundle.digest, NEVER, LONG, driver.restart_argv(local), driver.stop_argv(local))
        session.do(ReleaseStore(session, lock).switching(bundle.digest, lease=lease.id), driver.restarting(local))
        assert driver.status(session).running
        assert lease.cancel("no").state == "reverted"
        assert read_inventory(session).current == NEVER and not driver.status(session).running


def test_a_service_that_will_not_restart_is_reported_as_such(worker: Worker) -> None:
    worker.lease.arm(worker.new.digest, worker.old.digest, LONG, ["false"], ["false"])
    worker.switch()
    state = worker.lease.cancel("go back")
    assert state.state == "revert_failed" and "did not restart" in state.reason
    assert state.current == worker.old.digest, "the link is back even so: any later start is the old release"


def test_the_lease_keeps_the_lock_when_the_toolkit_is_gone_and_frees_it_afterwards(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    worker.session.close()
    with HostSession(connect(worker.host)) as session:
        held = show_lock(session)
        assert held and not held.orphan and held.token == worker.lock.token
        worker.run_out()
        eventually(lambda: read_lease(session).state == "reverted")
        assert show_lock(session) is None
        assert "lock_dropped" in [entry["event"] for entry in read_audit(session)[0]]


def test_a_full_disk_does_not_keep_the_host_from_going_back(worker: Worker, tmp_path: Path) -> None:
    """Writing fails everywhere below the root (a read-only view would do as well); the link and the service still go back."""
    if os.geteuid() != 0:
        pytest.skip("needs the right to mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", small], check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    host = Host("here", "local", str(small / "w"), python=worker.host.python, values=worker.host.values)
    worker.driver.stop_argv(worker.host)
    subprocess.run(worker.driver.stop_argv(worker.host), check=True, capture_output=True)
    other = Worker(host, worker.driver)
    try:
        other.arm()
        other.switch()
        other.run_out(2.0)
        with open(small / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(bytes(4096))
        eventually(lambda: other.current() == other.old.digest)
        eventually(lambda: other.served() == other.old.digest)
    finally:
        from tests.engines.ssh.sshfleet import end_processes_of

        other.session.close()
        end_processes_of(small / "w")
        subprocess.run(["umount", "--lazy", small], check=True)


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.12", "3.13"])
def test_the_host_scripts_run_on_old_and_new_pythons(version: str, local: Host, driver: ProcessDriver) -> None:
    import dataclasses

    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")) + [
        Path(p) for p in [shutil.which(f"python{version}")] if p and "shims" not in p
    ]
    if not found:
        pytest.skip(f"no Python {version} here")
    worker = Worker(dataclasses.replace(local, python=str(found[0])), driver)
    worker.arm()
    worker.switch()
    worker.run_out()
    eventually(lambda: worker.record()["state"] == "reverted")
    eventually(lambda: worker.served() == worker.old.digest)
    worker.session.close()
    assert sys.version_info >= (3, 11)


def test_a_lease_is_neither_renewed_nor_kept_by_who_was_taken_over(worker: Worker) -> None:
    """Field failure: a suspended run woke up after a rollback and made the candidate last-good."""
    worker.arm()
    worker.switch()
    worker.lease.confirm(LONG)
    with HostSession(connect(worker.host)) as other:
        break_lock(other, show_lock(other))
        HostLock(other, "rollback: p99").acquire()
        for late in (worker.lease.keep, lambda: worker.lease.renew(LONG)):
            with pytest.raises(TakenOverError, match="rollback: p99"):
                late()
        assert read_inventory(other).last_good == worker.old.digest


def test_what_is_under_a_lease_becomes_last_good_by_keeping_it_and_not_otherwise(worker: Worker) -> None:
    worker.arm()
    worker.switch()
    worker.lease.confirm(LONG)
    good = op("release.good", digest=worker.new.digest, token=worker.lock.token)
    with pytest.raises(LeaseError, match="a lease guards this host"):
        worker.lease.session.do(good)
    worker.lease.cancel("no")
    with pytest.raises(ReleaseError, match="was never good here"):
        worker.lease.session.do(good)
    assert read_inventory(worker.lease.session).last_good == worker.old.digest
