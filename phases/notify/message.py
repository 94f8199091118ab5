"""What people are told: one event, as a line of text and as fields.

The JSON has a `text` that Slack, Mattermost and the like show as it is, and flat fields beside it for everything else. It holds
names, numbers and reasons that the ledger holds too, never the contents of settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from phases.base.clock import iso
from phases.base.errors import Exit

SCHEMA = "phasegate/notification/v1"
TEXT_LIMIT = 3000  # characters; Slack cuts longer messages into pieces


class Event(Enum):
    """What a target may ask to be told of."""

    GATE_WAITING = "gate-waiting"  # passed, and a person has to say yes
    GATE_PASSED = "gate-passed"  # passed, and no review wanted
    GATE_FAILED = "gate-failed"
    GATE_INCONCLUSIVE = "gate-inconclusive"
    RUN_STOPPED = "run-stopped"  # an error ended a run before its gate
    ROLLBACK_STARTED = "rollback-started"
    ROLLBACK_ENDED = "rollback-ended"
    REGRESSION = "regression"  # `phase watch` found one
    TEST = "test"


@dataclass(frozen=True)
class Message:
    """One notification.

    Attributes:
        headline: what happened, in one sentence.
        reasons: why, a line each.
        next: the command that shows more, or decides.
        fields: further facts for machines, flat: texts, numbers, lists of texts.
        at: seconds since the epoch.
    """

    event: Event
    playbook: str
    kernel: str
    phase: str
    headline: str
    at: float
    reasons: tuple[str, ...] = ()
    next: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Plain text: the headline, the reasons, what to do."""
        lines = [
            f"[{self.playbook}] {self.headline}",
            *(f"- {reason}" for reason in self.reasons),
            *filter(None, [self.next]),
        ]
        text = "\n".join(lines)
        return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"

    def to_json(self) -> dict[str, Any]:
        """The fields every message has come last: no further fact can take their place."""
        return {
            **self.fields,
            "schema": SCHEMA,
            "event": self.event.value,
            "text": self.text,
            "playbook": self.playbook,
            "kernel": self.kernel,
            "phase": self.phase,
            "headline": self.headline,
            "reasons": list(self.reasons),
            "next": self.next,
            "at": iso(self.at),
        }

    def environment(self) -> dict[str, str]:
        """A few of the fields as environment variables, for hooks that are one line of shell."""
        named = {
            "EVENT": self.event.value,
            "PLAYBOOK": self.playbook,
            "KERNEL": self.kernel,
            "PHASE": self.phase,
            "TEXT": self.text,
        }
        more = {
            name.upper(): str(self.fields[name]) for name in ("verdict", "checkpoint", "exit") if name in self.fields
        }
        return {f"PHASE_{name}": value.replace("\0", "") for name, value in {**named, **more}.items()}


def escaped(text: str) -> str:
    """Text in which Slack sees no markup: otherwise a reason with `<!channel>` in it would wake everybody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def gate_event(code: Exit, verdict: str) -> Event:
    """Which event a finished run is."""
    if code is Exit.WAITING_FOR_REVIEW:
        return Event.GATE_WAITING
    if code is Exit.PASSED:
        return Event.GATE_PASSED
    return Event.GATE_INCONCLUSIVE if code is Exit.INCONCLUSIVE or verdict == "INCONCLUSIVE" else Event.GATE_FAILED
