"""Delivery in the background: retries, order, a target that hangs, and an end that is bounded."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from phases.notify.message import Event, Message
from phases.notify.notifier import QUEUE, Notifier
from phases.notify.settings import HookSettings, WebhookSettings
from phases.notify.targets import Hook, Webhook
from phases.notify.teller import Teller


def _notifier(targets, flush=20.0):
    said = []
    return Notifier(targets, warn=said.append, flush=flush, pause=0.01), said


def _webhook(receiver, **settings):
    return Webhook(WebhookSettings(url=receiver.url, **settings), Path(), {})


def test_a_second_attempt_after_a_server_error(receiver, message):
    receiver.answers = [500, 503, 200]
    notifier, said = _notifier([_webhook(receiver)])
    with notifier:
        notifier.send(message)
    assert len(receiver.requests) == 3 and not said
    (delivery,) = notifier.deliveries
    assert delivery.delivered and delivery.attempts == 3


def test_retries_end_and_are_told_in_one_line_without_the_address(receiver, message):
    receiver.answers = [500]
    notifier, said = _notifier([_webhook(receiver, retries=2)])
    with notifier:
        notifier.send(message)
    assert len(receiver.requests) == 3
    assert said == ["webhook 127.0.0.1 was not told of gate-failed after 3 attempts: it answered with status 500."]


@pytest.mark.parametrize("status", [404, 302])
def test_what_no_retry_can_mend_is_tried_once(receiver, message, status):
    receiver.answers = [status]
    notifier, said = _notifier([_webhook(receiver, retries=5)])
    with notifier:
        notifier.send(message)
    assert len(receiver.requests) == 1 and len(said) == 1


def test_only_the_events_asked_for_and_in_order(receiver, message):
    notifier, _ = _notifier([_webhook(receiver, events=(Event.ROLLBACK_STARTED, Event.ROLLBACK_ENDED))])
    with notifier:
        for event in (Event.ROLLBACK_STARTED, Event.GATE_FAILED, Event.ROLLBACK_ENDED):
            notifier.send(Message(event, "p", "k", "f", "h", 0.0))
    assert [body["event"] for body in receiver.bodies] == ["rollback-started", "rollback-ended"]


def test_a_target_that_hangs_keeps_nobody_waiting_and_the_end_is_bounded(receiver, message):
    """The sender goes on at once, the other target is told, and closing gives up after `flush`."""
    hanging = _Hanging()
    notifier, said = _notifier([hanging, _webhook(receiver)], flush=0.5)
    notifier.send(message)
    notifier.send(message)
    assert hanging.begun.wait(60)
    while len(notifier.deliveries) < 2:
        time.sleep(0.01)
    assert len(receiver.requests) == 2
    assert not hanging.ended.is_set()  # still hanging, and yet the other got both
    notifier.close()
    assert hanging.abandoned and len(said) == 2 and all("given up" in line for line in said)
    hanging.release.set()


class _Hanging:
    """Stands in for a target whose attempt never ends, which no real server can be made to be past every timeout."""

    name, events, retries = "webhook that hangs", (), 3

    def __init__(self):
        self.begun, self.ended, self.release, self.abandoned = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
            False,
        )

    def ready(self): ...

    def deliver(self, message):
        self.begun.set()
        self.release.wait(600)
        self.ended.set()

    def abandon(self):
        self.abandoned = True


def test_a_hook_still_running_at_the_end_is_stopped(message, tmp_path):
    begun = tmp_path / "begun"
    hook = Hook(
        HookSettings(
            (sys.executable, "-c", "import sys, time; open(sys.argv[1], 'w'); time.sleep(600)", str(begun)),
            timeout=600,
            retries=5,
        ),
        Path(),
    )
    notifier, said = _notifier([hook], flush=0.2)
    notifier.send(message)
    while not begun.exists():
        time.sleep(0.01)
    notifier.close()
    assert hook._process.poll() is not None and len(said) == 1 and "given up" in said[0]


def test_a_flood_is_dropped_and_said(message):
    hanging = _Hanging()
    notifier, said = _notifier([hanging], flush=0.0)
    for _ in range(QUEUE + 3):
        notifier.send(message)
    assert any("too many messages" in line for line in said)
    hanging.release.set()


def test_whatever_a_target_or_a_listener_does_the_sender_never_sees_it(message):
    class Broken(_Hanging):
        def deliver(self, message):
            raise KeyError("s3cret")

    def warn(line):
        lines.append(line)
        raise OSError("the terminal is gone")

    lines = []
    with Notifier([Broken()], warn=warn) as notifier:
        notifier.send(message)
    assert lines == ["webhook that hangs was not told of gate-failed: an unexpected KeyError."]
    Teller(notifier, clock=None).rollback_started("a clock that is none")  # type: ignore[arg-type]
    assert "could not be made" in lines[1]


def test_nothing_is_started_where_nothing_is_sent(receiver):
    before = set(threading.enumerate())
    with Notifier([_webhook(receiver)], warn=print):
        assert set(threading.enumerate()) <= before


def test_waiting_at_the_end_is_said_and_ctrl_c_ends_it(message, monkeypatch):
    """Ctrl-C is played by the wait itself; it is not passed on, since how the command ended was settled before."""
    monkeypatch.setattr("phases.notify.notifier.QUIET_SECONDS", 0.05)
    hanging = _Hanging()
    notifier, said = _notifier([hanging], flush=600.0)
    notifier.send(message)
    assert hanging.begun.wait(60)
    calls, wait = [], notifier._wait

    def interrupted(until):
        calls.append(until)
        if len(calls) == 2:
            raise KeyboardInterrupt
        wait(until)

    monkeypatch.setattr(notifier, "_wait", interrupted)
    notifier.close()
    assert (
        "waiting at most 600 s until webhook that hangs is told" in said[0]
        and "given up" in said[1]
        and hanging.abandoned
    )
    hanging.release.set()
