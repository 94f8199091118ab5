"""The journal of a run: append-only JSON lines, each durable before the work it speaks of goes on.

Every line carries its sequence number, the digest of the line before it and its own. So a line that was altered,
removed or brought in from another run is found; a last line cut off by a kill or a power cut is recognised as such,
dropped and overwritten. The journal only saves time: the truth is what the steps' `holds` observe.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phases.base.clock import Clock
from phases.base.errors import JournalError
from phases.base.files import explain, sync_directory

SCHEMA = "phasegate/journal/v1"

# Called with ("before" | "after", record): around the moment a record becomes durable. For fault injection in tests.
OnRecord = Callable[[str, "Record"], None]


@dataclass(frozen=True)
class Record:
    """One line: what happened, when (seconds since the epoch), and its facts."""

    number: int
    event: (
        str  # run-started | run-resumed | step-started | step-finished | step-failed | step-interrupted | run-finished
    )
    at: float
    data: dict[str, Any]

    @property
    def step(self) -> str:
        return str(self.data.get("step", ""))


class Journal:
    """An open journal. Use `create` for a new run and `reopen` to go on with one."""

    def __init__(
        self, path: Path, run_id: str, clock: Clock, records: list[Record], last: str, on_record: OnRecord | None
    ) -> None:
        self.path, self.run_id, self.clock, self.on_record = path, run_id, clock, on_record
        self.records = records
        self._last = last

    @classmethod
    def create(cls, path: Path, run_id: str, clock: Clock, on_record: OnRecord | None = None) -> Journal:
        """A new, empty journal. Raises JournalError when the file exists or cannot be made."""
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            sync_directory(path.parent)
        except FileExistsError:
            raise JournalError(f"{path} already exists.", hint="Continue that run with --resume.") from None
        except OSError as fault:
            raise JournalError(*_words(fault)) from fault
        return cls(path, run_id, clock, [], _root(run_id), on_record)

    @classmethod
    def reopen(cls, path: Path, run_id: str, clock: Clock, on_record: OnRecord | None = None) -> Journal:
        """The journal of an earlier process, without the torn line a kill may have left at its end."""
        records, last, good = _read(path, run_id)
        try:
            with path.open("r+b") as handle:
                handle.truncate(good)
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as fault:
            raise JournalError(*_words(fault)) from fault
        return cls(path, run_id, clock, records, last, on_record)

    def append(self, event: str, **data: Any) -> Record:
        """Write one record and return when it is on disk. Raises JournalError; the file then still ends in a whole line."""
        try:
            plain = json.loads(
                json.dumps(data, allow_nan=False)
            )  # as a later reader will see it: no tuples, no number keys
        except (TypeError, ValueError) as fault:
            raise JournalError(f"{event} {data.get('step', '')}: its facts are not plain JSON: {fault}.") from fault
        record = Record(len(self.records), event, self.clock.now(), plain)
        line, digest = _line(record, self._last)
        if self.on_record:
            self.on_record("before", record)
        size = None
        try:
            with self.path.open("r+b") as handle:
                size = handle.seek(0, os.SEEK_END)
                handle.write(line)
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as fault:
            _cut_back(self.path, size)
            raise JournalError(*_words(fault)) from fault
        self.records.append(record)
        self._last = digest
        if self.on_record:
            self.on_record("after", record)
        return record


def read(path: Path, run_id: str) -> tuple[Record, ...]:
    """The records of a journal, read-only; a torn last line is left out. Raises JournalError."""
    return tuple(_read(path, run_id)[0])


def _read(path: Path, run_id: str) -> tuple[list[Record], str, int]:
    """(records, digest of the last one, bytes that are good)."""
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise JournalError(f"cannot read the journal {path}: {fault.strerror}.", hint="Start a new run.") from fault
    records: list[Record] = []
    last, good = _root(run_id), 0
    lines = data.split(b"\n")
    for index, raw in enumerate(lines):
        if index == len(lines) - 1:
            break  # after the last newline: nothing, or a torn line
        entry = _parse(raw)
        if entry is None and not any(lines[index + 1 :]):
            break  # garbage at the very end, as a power cut leaves it
        if (
            entry is None
            or entry.get("digest") != _digest(entry)
            or entry["number"] != len(records)
            or entry["previous"] != last
        ):
            raise JournalError(
                f"{path}:{index + 1} does not follow from the line before it: the journal was altered or belongs to another run.",
                hint="Start a new run; the ledger is not touched by this.",
            )
        records.append(Record(entry["number"], entry["event"], entry["at"], entry["data"]))
        last, good = entry["digest"], good + len(raw) + 1
    return records, last, good


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(raw)
    except ValueError:
        return None
    wanted = {"number", "event", "at", "data", "previous", "digest"}
    return entry if isinstance(entry, dict) and set(entry) == wanted else None


def _line(record: Record, previous: str) -> tuple[bytes, str]:
    entry = {"number": record.number, "event": record.event, "at": record.at, "data": record.data, "previous": previous}
    entry["digest"] = _digest(entry)
    return json.dumps(entry, sort_keys=True, allow_nan=False).encode() + b"\n", entry["digest"]


def _digest(entry: dict[str, Any]) -> str:
    body = {key: value for key, value in entry.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _root(run_id: str) -> str:
    return hashlib.sha256(f"{SCHEMA} {run_id}".encode()).hexdigest()


def _cut_back(path: Path, size: int | None) -> None:
    """Take away what a failed write left behind; `reopen` would drop it too."""
    if size is not None:
        try:
            os.truncate(path, size)
        except OSError:
            pass


def _words(fault: OSError) -> tuple[str]:
    message, hint = explain(fault)
    return (f"the journal could not be written: {message} {hint}".strip(),)
