"""Fan-out: a result for every host, a bounded number at once, a deadline for all. Times are events, not clocks."""

from __future__ import annotations

import threading
import time

import pytest

from phases.base.errors import FleetError
from phases.engines.ssh.fanout import FanOutError, Outcome, fan_out
from phases.engines.ssh.host import Host

HOSTS = [Host(f"h{n}", "local", f"/nowhere/{n}") for n in range(12)]


def test_every_host_has_its_own_result_in_the_given_order() -> None:
    def act(host: Host) -> str:
        if host.name == "h3":
            raise FleetError("no space.", host=host.name)
        if host.name == "h5":
            raise KeyError("a bug")
        return host.root

    results = fan_out(HOSTS, act, limit=4)
    assert list(results) == [host.name for host in HOSTS]
    assert results["h0"].value == "/nowhere/0"
    assert [r.host.name for r in results.bad] == ["h3", "h5"]
    assert isinstance(results["h5"].error, FleetError) and isinstance(results["h5"].error.__cause__, KeyError)
    assert "fleet on h5: KeyError: 'a bug' (test_fanout.py:" in results["h5"].reason
    with pytest.raises(
        FanOutError, match=r"2 of 12 hosts did not succeed:\n  h3: failed: fleet on h3: no space.\n  h5"
    ):
        results.check()


def test_a_single_failure_is_raised_as_itself() -> None:
    def act(host: Host) -> None:
        if host.name == "h1":
            raise FleetError("no space.", host=host.name)

    with pytest.raises(FleetError, match="fleet on h1: no space"):
        fan_out(HOSTS, act).check()


def test_at_most_the_limit_at_once_and_that_many_really() -> None:
    running, most, lock = 0, 0, threading.Lock()
    full = threading.Barrier(4)

    def act(host: Host) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(90)  # breaks unless four are here together
        with lock:
            running -= 1

    assert fan_out(HOSTS, act, limit=4).ok
    assert most == 4


def test_a_hanging_host_does_not_hold_the_others_and_is_abandoned() -> None:
    release, abandoned = threading.Event(), []
    done: list[str] = []

    def act(host: Host) -> str:
        if host.name == "h0":
            release.wait(300)
        return host.name

    def abandon(host: Host) -> None:
        abandoned.append(host.name)
        release.set()

    results = fan_out(HOSTS, act, limit=2, deadline=3.0, abandon=abandon, on_result=lambda r: done.append(r.host.name))
    assert results["h0"].outcome is Outcome.TIMED_OUT
    assert all(results[host.name].ok for host in HOSTS[1:])
    assert release.wait(60)
    assert abandoned == ["h0"]
    assert sorted(done) == sorted(host.name for host in HOSTS), "every host is reported once"


def test_hosts_never_begun_are_told_apart_from_those_cut_off() -> None:
    release = threading.Event()
    results = fan_out(
        HOSTS[:3], lambda host: release.wait(30), limit=1, deadline=2.0, abandon=lambda host: release.set()
    )
    assert [result.outcome for result in results.values()] == [
        Outcome.TIMED_OUT,
        Outcome.NOT_STARTED,
        Outcome.NOT_STARTED,
    ]


def test_no_hosts_is_not_success() -> None:
    assert not fan_out([], lambda host: None).ok


def test_an_interrupt_abandons_what_runs_and_is_raised() -> None:
    release, abandoned = threading.Event(), []

    def interrupt(result: object) -> None:
        raise KeyboardInterrupt

    def act(host: Host) -> None:
        if host.name != "h0":
            release.wait(300)

    with pytest.raises(KeyboardInterrupt):
        fan_out(HOSTS[:3], act, limit=3, abandon=lambda host: abandoned.append(host.name), on_result=interrupt)
    until = time.monotonic() + 60
    while len(abandoned) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    release.set()
    assert sorted(abandoned) == ["h1", "h2"]
