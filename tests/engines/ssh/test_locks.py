"""The lock of a host: atomic, owned, released only by its owner, never left without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from phases.base.errors import Exit
from phases.engines.ssh.errors import HostLockedError, ReleaseError, TakenOverError
from phases.engines.ssh.host import Host
from phases.engines.ssh.locks import HostLock, break_lock, owner_name, show_lock, superseded_by
from phases.engines.ssh.releases import read_audit
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.transport import connect
from tests.engines.ssh.worker import eventually


def another(host: Host) -> HostSession:
    return HostSession(connect(host))


def test_the_second_is_told_who_holds_it_and_for_how_long(local: Host, lock: HostLock) -> None:
    with (
        another(local) as session,
        pytest.raises(
            HostLockedError, match=r"lock on here: locked by .*@.* pid \d+ for test, \d+ s ago.*phase unlock"
        ) as caught,
    ):
        HostLock(session, "mine").acquire()
    assert caught.value.exit_code is Exit.LOCKED


def test_the_second_is_told_that_the_process_of_the_first_is_gone(local: Host, session: HostSession) -> None:
    """As after a run that was killed while its canary was under a lease: here the session lives on instead."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    HostLock(session, "killed", owner=owner_name().rpartition(" ")[0] + f" {ended.pid}").acquire()
    with (
        another(local) as other,
        pytest.raises(HostLockedError, match=r"for killed.*process is gone.*--resume.*phase rollback.*lease") as caught,
    ):
        HostLock(other, "mine").acquire()
    assert "Wait for it" not in str(caught.value)


def test_only_its_own_token_releases_it(local: Host, lock: HostLock, session: HostSession) -> None:
    """Field failure: a second deploy that fails on the lock removes the first one's."""
    with another(local) as other:
        intruder = HostLock(other, "mine")
        with pytest.raises(HostLockedError):
            intruder.acquire()
        assert intruder.release() is False
    assert show_lock(session).token == lock.token


def test_taking_it_twice_with_the_same_token_is_taking_it_once(lock: HostLock, session: HostSession) -> None:
    since = show_lock(session).age
    lock.acquire()
    assert show_lock(session).age >= since
    assert lock.release() is True
    assert show_lock(session) is None


def test_a_resumed_run_takes_over_its_own_lock(local: Host, lock: HostLock) -> None:
    with another(local) as session:
        HostLock(session, "test", token=lock.token).acquire()
        lock.session.close()
        assert show_lock(session).token == lock.token, "the old session's end must not drop the new one's lock"


def test_a_session_that_ends_drops_its_lock_and_says_so(local: Host, lock: HostLock) -> None:
    lock.session.close()
    with another(local) as session:
        assert show_lock(session) is None
        assert read_audit(session)[0][-1]["event"] == "lock_dropped"


def test_a_killed_session_leaves_an_orphan_that_the_next_takes_over(
    local: Host, session: HostSession, lock: HostLock
) -> None:
    record = json.loads(Path(local.root, "lock.json").read_text())
    os.kill(record["session"]["pid"], signal.SIGKILL)
    with another(local) as other:
        until = time.monotonic() + 60
        while not show_lock(other).orphan and time.monotonic() < until:
            time.sleep(0.01)
        HostLock(other, "next").acquire()
        assert read_audit(other)[0][-1]["event"] == "lock_orphan_taken"
        with pytest.raises(HostLockedError):
            lock.acquire()


def test_breaking_takes_only_the_lock_that_was_seen(local: Host, lock: HostLock, session: HostSession) -> None:
    with another(local) as other:
        seen = show_lock(other)
        lock.release()
        HostLock(session, "somebody else").acquire()
        with pytest.raises(HostLockedError, match="changed hands"):
            break_lock(other, seen)
        assert break_lock(other, show_lock(other)) is True
        assert show_lock(other) is None
        assert read_audit(other)[0][-1]["event"] == "lock_broken"


def test_a_lock_of_before_a_reboot_is_an_orphan(local: Host, lock: HostLock) -> None:
    path = Path(local.root, "lock.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "boot": "another boot"}))
    with another(local) as session:
        HostLock(session, "next").acquire()


def test_a_damaged_lock_is_reported_not_ignored(local: Host, session: HostSession) -> None:
    session.do({"op": "hello"})
    Path(local.root, "lock.json").write_text("{half")
    with pytest.raises(Exception, match=r"on here: .*lock.json is not valid JSON.*move it away"):
        HostLock(session, "x").acquire()


def test_threads_racing_for_it_have_one_winner(local: Host) -> None:
    sessions = [another(local) for _ in range(8)]
    won, lost, start = [], [], threading.Barrier(len(sessions))

    def race(session: HostSession) -> None:
        session.do({"op": "hello"})
        start.wait(120)
        try:
            HostLock(session, "race").acquire()
            won.append(session)
        except HostLockedError:
            lost.append(session)

    threads = [threading.Thread(target=race, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in sessions:
        session.close()
    assert (len(won), len(lost)) == (1, 7)


TOOLKIT = """
import pickle, sys, time
from phases.engines.ssh.errors import HostLockedError
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.releases import ReleaseStore
from phases.engines.ssh.session import HostSession
from phases.engines.ssh.transport import connect
host, bundle = pickle.load(open(sys.argv[1], "rb"))
session = HostSession(connect(host))
lock = HostLock(session, "run " + sys.argv[2])
try:
    lock.acquire()
except HostLockedError:
    print("locked")
    sys.exit(6)
store = ReleaseStore(session, lock)
store.push(bundle)
store.switch(bundle.digest)
time.sleep(0.3)
print("done", lock.release())
session.close()
"""


def test_twenty_toolkits_at_once_against_one_host(remote: Host, tmp_path: Path) -> None:
    import pickle

    from tests.engines.ssh.conftest import service_bundle

    bundle = service_bundle(500_000)
    with open(tmp_path / "args", "wb") as file:
        pickle.dump((remote, bundle), file)
    argv = [sys.executable, "-c", TOOLKIT, str(tmp_path / "args")]
    running = [
        subprocess.Popen(
            [*argv, str(n)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
        )
        for n in range(20)
    ]
    ends = [(process.communicate(timeout=400), process.returncode) for process in running]
    problems = [err for (_, err), code in ends if code not in (0, 6)]
    assert not problems, problems[0]
    winners = [out for (out, _), code in ends if code == 0]
    assert winners and all(out == "done True\n" for out in winners)
    with another(remote) as session:
        assert show_lock(session) is None
        entries = [entry["event"] for entry in read_audit(session)[0]]
        assert entries.count("release_received") == 1, "pushed once, whoever came first"
        assert entries.count("switched") == len(winners)


def test_who_comes_back_after_somebody_else_had_it_is_refused_though_it_is_free(
    local: Host, session: HostSession
) -> None:
    first, second = HostLock(session, "rollout"), None
    first.acquire()
    first.acquire()  # a broken session takes it again: the same holder, the same epoch
    assert session.do(op("epoch.show", token=first.token))[0]["epoch"] == 1
    first.release()
    first.acquire()  # nobody came in between
    first.release()
    with another(local) as other:
        second = HostLock(other, "rollback: p99")
        second.acquire()
        second.release()
    assert show_lock(session) is None
    with pytest.raises(TakenOverError, match=r"on here: taken over by .* for rollback: p99, \d+ s ago"):
        first.acquire()
    for late in (
        op("release.begin", digest="0" * 64, manifest="", token=first.token),
        op("release.good", digest="0" * 64, token=first.token),
        op("release.collect", token=first.token),
    ):
        with pytest.raises((TakenOverError, ReleaseError)):
            session.do(late)
    assert superseded_by(session, first.token) and not superseded_by(session, second.token)
    assert not superseded_by(session, "never seen")


def test_an_epoch_outlives_the_lock_whoever_removes_that(local: Host, session: HostSession) -> None:
    first = HostLock(session, "rollout")
    first.acquire()
    break_lock(session, show_lock(session))
    with another(local) as other:
        HostLock(other, "next").acquire()
    eventually(lambda: show_lock(session) is None)  # its session has ended
    with pytest.raises(TakenOverError):
        first.acquire()
    assert json.loads(Path(local.root, "epoch.json").read_text())["epoch"] == 2
