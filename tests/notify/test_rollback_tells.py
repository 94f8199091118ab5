"""What a rollback says, and that no target can delay it or make it fail. The fleet itself is in tests/production; here its part is played."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from phases.base.clock import SystemClock
from phases.base.errors import FleetError
from phases.notify.notifier import Notifier
from phases.notify.settings import WebhookSettings
from phases.notify.targets import Webhook
from phases.notify.teller import Teller
from phases.rollback import steps as rollback
from phases.rollback.steps import Rollback, roll_back


@pytest.fixture
def production(receiver):
    said = []
    notifier = Notifier(
        [Webhook(WebhookSettings(url=receiver.url, timeout=30.0), Path(), {})], warn=said.append, flush=0.2, pause=0.01
    )
    return types.SimpleNamespace(
        clock=SystemClock(), teller=Teller(notifier, "prod", "verify_attn", "tp8-canary"), said=said, notifier=notifier
    )


def _ends(monkeypatch, back):
    def played(*_):
        if isinstance(back, BaseException):
            raise back
        return back

    monkeypatch.setattr(rollback, "_roll_back", played)


def _back(left=None, **more):
    return Rollback("itl p95 slower", not left, (), left or {}, ("w1", "w2"), **more)


def _told(production, receiver, **more):
    production.notifier.flush = 20.0
    result = roll_back(production, "itl p95 slower", detected=production.clock.now() - 41.0, **more)
    production.teller.close()
    return result, receiver.bodies


def test_start_and_end(production, receiver, monkeypatch):
    _ends(monkeypatch, _back())
    _, (start, end) = _told(production, receiver)
    assert (start["event"], start["reasons"], start["phase"]) == ("rollback-started", ["itl p95 slower"], "tp8-canary")
    assert (
        end["event"] == "rollback-ended"
        and end["verified"] is True
        and end["workers"] == ["w1", "w2"]
        and 40 < end["seconds"] < 60
    )
    assert "2 workers restored and verified" in end["headline"]


def test_incomplete_says_that_a_person_is_needed_and_where(production, receiver, monkeypatch):
    _ends(monkeypatch, _back({"w2": "does not answer"}))
    _, (_, end) = _told(production, receiver)
    assert (
        "INCOMPLETE, a person is needed" in end["headline"]
        and end["not_restored"] == ["w2"]
        and "w2: does not answer" in end["reasons"]
        and not end["verified"]
    )


def test_only_safe_is_neither_done_nor_incomplete(production, receiver, monkeypatch):
    safe = types.SimpleNamespace(safe=True)
    _ends(monkeypatch, _back({"w1": "on the incumbent's kernel"}, hot=safe, restores=False))
    _, (_, end) = _told(production, receiver)
    assert "safe by hot fallback" in end["headline"] and "NOT restored" in end["headline"] and end["only_safe"] is True


def test_one_that_breaks_off_is_told_and_raised(production, receiver, monkeypatch):
    _ends(monkeypatch, FleetError("the router does not answer."))
    with pytest.raises(FleetError):
        roll_back(production, "itl p95 slower", detected=production.clock.now())
    production.notifier.flush = 20.0
    production.teller.close()
    assert "INCOMPLETE" in receiver.bodies[1]["headline"] and any(
        "router does not answer" in reason for reason in receiver.bodies[1]["reasons"]
    )


def test_the_planned_end_of_a_canary_is_no_news(production, receiver, monkeypatch):
    _ends(monkeypatch, _back())
    assert _told(production, receiver, planned=True)[1] == []


def test_unless_it_does_not_succeed(production, receiver, monkeypatch):
    _ends(monkeypatch, _back({"w2": "does not answer"}))
    (end,) = _told(production, receiver, planned=True)[1]
    assert end["event"] == "rollback-ended" and "INCOMPLETE" in end["headline"]


def test_a_server_that_never_answers_is_not_waited_for(production, receiver, monkeypatch):
    receiver.answers = [receiver.HANG]
    _ends(monkeypatch, _back())
    back = roll_back(
        production, "itl p95 slower", detected=production.clock.now()
    )  # returns while the first message hangs
    assert back.verified and not production.said
    production.teller.close()
    assert len(production.said) == 2 and all("given up" in line for line in production.said)
