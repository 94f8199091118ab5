"""The lock of a playbook: one holder, dead holders recognised, only one's own released."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from phases.base.clock import SystemClock
from phases.base.errors import Exit, LockedError
from phases.base.processes import Life
from phases.run.lock import Lock, is_dead, life


@pytest.fixture
def lock(tmp_path):
    return Lock(tmp_path, "local", SystemClock())


def _other(lock):
    return Lock(lock.path.parent.parent, "local", SystemClock())


def _edit(lock, **values):
    owner = json.loads(lock.path.read_text())
    lock.path.write_text(json.dumps({**owner, **values}))


def test_a_second_run_is_told_owner_and_age(lock):
    lock.acquire("phase run build-parity")
    with pytest.raises(LockedError) as caught:
        _other(lock).acquire("phase run")
    assert caught.value.exit_code is Exit.LOCKED
    for words in (f"process {os.getpid()}", "phase run build-parity", "s ago", "phase unlock"):
        assert words in str(caught.value)


def test_a_released_lock_is_free(lock):
    with lock.held("one"):
        assert _other(lock).owner().purpose == "one"
    assert lock.owner() is None
    _other(lock).acquire("two")


def test_only_ones_own_lock_is_released(lock):
    lock.acquire("one")
    _edit(lock, token="somebody else's")
    lock.release()
    assert lock.owner().token == "somebody else's"


def test_a_dead_owner_is_replaced(lock):
    code = "import sys; from pathlib import Path; from phases.run.lock import Lock; from phases.base.clock import SystemClock\n"
    code += "import os; Lock(Path(sys.argv[1]), 'local', SystemClock()).acquire('gone'); os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(lock.path.parent.parent)], check=False)
    assert lock.owner().purpose == "gone" and is_dead(lock.owner())
    lock.acquire("next")
    assert lock.took_over.purpose == "gone" and lock.owner().purpose == "next"


def test_a_number_reused_by_another_process_is_a_dead_owner(lock):
    lock.acquire("one")
    assert not is_dead(lock.owner())
    _edit(lock, process_start="1")
    assert is_dead(lock.owner())


def test_an_owner_before_a_reboot_is_dead(lock):
    lock.acquire("one")
    _edit(lock, boot="another boot")
    assert is_dead(lock.owner())


def test_an_owner_on_another_machine_is_never_presumed_dead(lock):
    lock.acquire("one")
    _edit(lock, host="elsewhere", pid=1 << 30, boot="another boot")
    with pytest.raises(LockedError, match="elsewhere"):
        _other(lock).acquire("two")


@pytest.mark.parametrize("content", ["", "{", '{"pid": 1}'])
def test_an_unreadable_lock_blocks_and_can_be_removed_by_a_person(lock, content):
    lock.path.parent.mkdir(parents=True)
    lock.path.write_text(content)
    with pytest.raises(LockedError, match="unreadable lock"):
        lock.acquire("one")
    assert lock.break_lock(lock.owner().token)
    lock.acquire("one")


def test_a_lock_is_broken_only_by_the_token_that_was_shown(lock):
    lock.acquire("one")
    assert _other(lock).break_lock("not it") is None
    assert _other(lock).break_lock(lock.token).purpose == "one"
    assert lock.owner() is None


def _race(state, start, results):
    mine = Lock(state, "local", SystemClock())
    start.wait()
    try:
        mine.acquire("race")
        results.put(1)
    except LockedError:
        results.put(0)
    start.wait()  # all have tried: nobody's process may end before and look dead


def test_of_many_at_once_one_gets_it_even_over_a_dead_owner(lock):
    lock.acquire("gone")
    _edit(lock, process_start="1")
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(6), context.Queue()
    racers = [context.Process(target=_race, args=(lock.path.parent.parent, start, results)) for _ in range(6)]
    for racer in racers:
        racer.start()
    won = sum(results.get(timeout=200) for _ in racers)
    for racer in racers:
        racer.join(200)
    assert won == 1


def test_names_stay_inside_the_directory(tmp_path):
    lock = Lock(tmp_path, "../../etc/x", SystemClock())
    lock.acquire("one")
    assert lock.path.parent == tmp_path / "locks"


def test_a_process_that_ended_and_was_not_waited_for_is_gone(lock):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    try:
        lock.acquire("one")
        _edit(lock, pid=child.pid, process_start="")
        deadline = time.monotonic() + 60
        while life(lock.owner()) is not Life.GONE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert life(lock.owner()) is Life.GONE
    finally:
        child.wait()
