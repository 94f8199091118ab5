"""That an embedded fleet was taken down: when and by whom, kept beside the fleet's directory, which a purge removes."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from phases.base.errors import UsageError
from phases.base.files import write_json
from phases.engines.embedded.provision import cache_directory
from phases.ledger.repository import repository_of
from phases.playbook.schema import Playbook


def home_of(repo: Path, name: str) -> Path:
    """Where the fleet of this repository and playbook keeps its workers."""
    key = hashlib.sha256(f"{repo.resolve()}\0{name}".encode()).hexdigest()[:12]
    return cache_directory() / "fleets" / f"{name}-{key}"


@dataclass(frozen=True)
class TakenDown:
    """The latest time that somebody took the fleet down; times in seconds since the epoch.

    Attributes:
        ended: None: it was cut short. purged: the workers' directories are gone, and with them what they ran.
        started: when a later run started the fleet anew; None: none has.
    """

    begun: float
    by: str
    ended: float | None = None
    purged: bool = False
    started: float | None = None

    @property
    def is_down(self) -> bool:
        return self.ended is not None and self.started is None

    def settles(self, moment: float) -> bool:
        """Whether what a worker was left in at that moment is over: it was taken down since, and has not come back as it was."""
        return self.ended is not None and self.ended > moment and (self.purged or self.started is None)

    def describe(self) -> str:
        if self.ended is None:
            return f"{_moment(self.begun)} {self.by} began to take the fleet down, and that has not ended: `phase fleet down` finishes it"
        return f"the fleet was taken down {_moment(self.ended)} by {self.by}"


def read(home: Path) -> TakenDown | None:
    """Of the fleet with this directory, whether or not that is still there; None when nobody has, or the record cannot be read."""
    try:
        record = TakenDown(**json.loads(_path(home).read_text(encoding="utf-8")))
        return (
            record
            if all(isinstance(at, int | float) for at in (record.begun, record.ended or 0, record.started or 0))
            else None
        )
    except (OSError, ValueError, TypeError):
        return None


def of_playbook(playbook: Playbook) -> TakenDown | None:
    """As `read`, of the playbook's embedded fleet as this clone knows it; None too where the playbook has none."""
    if playbook.sections.get("embedded_fleet") is None:
        return None
    return read(home_of(repository_of(playbook.path), playbook.name))


def require_up(playbook: Playbook, *, going_down: bool = False) -> None:
    """UsageError where the playbook's fleet was taken down: to act on its workers would start some, or make new ones in their place.

    Args:
        going_down: also while it is being taken down, or that was cut short.
    """
    record = of_playbook(playbook)
    if record is not None and (record.is_down or (going_down and record.ended is None)):
        raise UsageError(f"{record.describe()}: there is no production to act on.", hint="Phase 3 starts it again.")


def write(home: Path, record: TakenDown) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    write_json(_path(home), asdict(record))


def note_start(home: Path, now: float) -> None:
    """The fleet is being started. Workers that were only stopped come back as they were, so of them nothing is over."""
    record = read(home)
    if record is None or record.started is not None:
        return
    if record.purged and record.ended is not None:
        write(home, replace(record, started=now))
    else:
        _path(home).unlink(missing_ok=True)


def _path(home: Path) -> Path:
    return home.with_name(f"{home.name}.down.json")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
