"""The events of a rollback as a person can take them in: each one while they are few, one line a kind of event when they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST = 40  # events, or kinds of event, that are shown one by one
COLUMNS = ("after", "event", "host", "note")
KIND_COLUMNS = ("event", "times", "first after", "last after")


@dataclass(frozen=True)
class Kind:
    """All events of one name.

    Attributes:
        first, last: seconds since the rollback's first event.
    """

    event: str
    times: int
    first: float
    last: float

    def row(self) -> tuple[str, ...]:
        return (self.event, str(self.times), f"{self.first:.1f} s", f"{self.last:.1f} s")

    @property
    def label(self) -> str:
        return self.event if self.times == 1 else f"{self.event} ×{self.times}"


def rows(events: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row an event, for COLUMNS."""
    return [(f"{event['at']:.1f} s", event["event"], event.get("host", ""), event.get("note", "")) for event in events]


def kinds(events: Sequence[dict[str, Any]]) -> list[Kind]:
    """One entry a name, in the order in which each was first seen; at most MOST, the last then holds all that is left."""
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event["event"], []).append(event["at"])
    if len(times) > MOST:
        names = list(times)
        left = [at for name in names[MOST - 1 :] for at in times.pop(name)]
        times[f"{len(names) - MOST + 1} other kinds"] = left
    return [Kind(name, len(found), min(found), max(found)) for name, found in times.items()]
