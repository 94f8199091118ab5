"""The audit log on a host: bounded, read by offset across rotations, whole after a kill at any moment."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
from pathlib import Path
from types import ModuleType

import pytest

from phases.engines.ssh.host import Host
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.releases import ReleaseStore, read_audit
from phases.engines.ssh.session import HostSession
from tests.engines.ssh.conftest import service_bundle

ONHOST = Path(__file__).parents[3] / "phases/engines/ssh/onhost"
WHEN = {"time": 1.0, "uptime": 2.0, "boot": "b"}


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The host's module with a log of at most a few entries."""
    spec = importlib.util.spec_from_file_location("onhost_audit", ONHOST / "audit.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LIMIT", 1000)
    return module


def numbers(entries: list[dict]) -> list[int]:
    return [entry["n"] for entry in entries if "n" in entry]


def everything(audit: ModuleType, path: str, offset: int = 0) -> tuple[list[dict], int]:
    found = []
    while True:
        part = audit.read(path, offset)
        found += part["entries"]
        if part["offset"] == offset:
            return found, offset
        offset = part["offset"]


def test_it_stays_small_and_a_reader_that_keeps_up_misses_nothing(audit: ModuleType, tmp_path: Path) -> None:
    path, seen, offset = str(tmp_path / "audit.log"), [], 0
    for n in range(200):
        audit.append(path, {**WHEN, "event": "x", "n": n})
        if n % 7 == 0:
            entries, offset = everything(audit, path, offset)
            seen += entries
    entries, offset = everything(audit, path, offset)
    assert numbers(seen + entries) == list(range(200)) and not [
        e for e in seen + entries if e["event"] == "log_dropped"
    ]
    assert sum(p.stat().st_size for p in tmp_path.glob("audit.log*")) < 2500
    assert everything(audit, path, offset) == ([], offset)


def test_a_reader_that_comes_late_is_told_what_it_missed(audit: ModuleType, tmp_path: Path) -> None:
    path = str(tmp_path / "audit.log")
    for n in range(200):
        audit.append(path, {**WHEN, "event": "x", "n": n})
    entries, offset = everything(audit, path)
    assert entries[0]["event"] == "log_dropped" and (entries[0]["from"], entries[0]["to"]) < (1, offset)
    kept = numbers(entries)
    assert kept == list(range(kept[0], 200)) and len(kept) > 10
    Path(path).write_text("")  # somebody emptied it
    assert audit.read(path, offset)["entries"] == [{"event": "log_dropped", "from": offset, "to": 0}]


@pytest.mark.parametrize("call", ["link", "replace", "second replace", "unlink"])
def test_a_rotation_cut_off_anywhere_loses_no_entry(
    audit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Killed (here: an exception nothing catches) just before one of its system calls, twice in a row; then all goes on."""
    path, killed = str(tmp_path / "audit.log"), []
    name, wanted = call.split()[-1], 2 if call.startswith("second") else 1

    class Killed(BaseException):
        pass

    def die(*arguments: str, real=getattr(os, name), seen=[0]) -> None:  # noqa: B006  counts the calls of one rotation
        seen[0] += 1
        if len(killed) < 2 and seen[0] == wanted:
            seen[0] = 0
            killed.append(call)
            raise Killed
        real(*arguments)

    monkeypatch.setattr(audit.os, name, die)
    found, offset = [], 0
    for n in range(60):
        try:
            audit.append(path, {**WHEN, "event": "x", "n": n})
        except Killed:
            pass
        entries, offset = everything(audit, path, offset)
        found += entries
    assert (
        len(killed) == 2 and numbers(found) == list(range(60)) and not [e for e in found if e["event"] == "log_dropped"]
    )
    assert Path(path + ".1").stat().st_ino != Path(path).stat().st_ino


def test_several_writers_at_once(audit: ModuleType, tmp_path: Path) -> None:
    path = str(tmp_path / "audit.log")

    def write(who: int) -> None:
        for n in range(100):
            audit.append(path, {**WHEN, "event": "x", "n": 100 * who + n})

    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write, args=(who,)) for who in range(4)]
    for writer in writers:
        writer.start()
    seen, offset = [], 0
    while any(writer.is_alive() for writer in writers):
        entries, offset = everything(audit, path, offset)
        seen += entries
    seen += everything(audit, path, offset)[0]
    assert [writer.exitcode for writer in writers] == [0] * 4
    dropped = any(entry["event"] == "log_dropped" for entry in seen)  # this reader may have been too slow
    assert len(set(numbers(seen))) == len(numbers(seen)) and (dropped or sorted(numbers(seen)) == list(range(400)))
    assert not [entry for entry in seen if entry["event"] == "unreadable"]


def test_the_toolkit_reads_on_after_a_rotation(session: HostSession, lock: HostLock, local: Host) -> None:
    store = ReleaseStore(session, lock)
    log = Path(local.root, "audit.log")
    line = json.dumps({**WHEN, "event": "old", "text": "x" * 200}) + "\n"
    log.write_text(line * ((4 << 20) // len(line)))
    before, offset = read_audit(session)
    bundle = service_bundle()
    store.push(bundle)
    store.switch(bundle.digest)
    entries, later = read_audit(session, offset)
    assert {entry["event"] for entry in before} == {"old"} and later > offset
    assert [entry["event"] for entry in entries if entry["event"] != "log_rotated"] == ["release_received", "switched"]
    assert log.stat().st_size < 2000 and Path(local.root, "audit.log.1").stat().st_size < (4 << 20) + 1000
