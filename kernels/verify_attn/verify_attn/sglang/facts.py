"""What this rank does, as a JSON file the toolkit reads: `$VERIFY_ATTN_FACTS/rank-<n>.json`.

Written when the backend is made and whenever a counter moved, at most once a second, and at once when the control byte was
acknowledged; by renaming a finished file into place, so a reader never sees half of one. Without news its modification time
is set every second: a file that grew old belongs to a process that is gone or stuck. Schema verify_attn/facts/v1:

    pid, rank, ranks          the process and its place in the tensor-parallel group
    backend, device           `verify_attn` or `verify_attn_torch`; cpu or cuda
    variant, build            kernel variant in use and the digest of its compiled object
    release                   digest of the release, from VERIFY_ATTN_RELEASE
    choice                    candidate or incumbent, what the next forward runs
    hot                       the acknowledgement: able (whether the control byte switches this rank; else `reason`), file, choice,
                              from_forward, at (seconds since the epoch), confirmed (first forward that began with it, null
                              until one has), why, tripped (why the shadow fell back by itself, or ""), graphs (CUDA)
    shadow                    rate, steps, layers, worst (largest error), tripped (evidence of a mismatch, or null)
    counters                  forwards, verify_forwards (tree-verify forwards of the target), verify_calls (our kernel, per
                              layer; under CUDA graphs counted by the GPU), incumbent_calls (verify layers that the
                              engine's own attention ran instead), verify_seconds (CPU: time inside either)
    started, updated          seconds since the epoch
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from verify_attn.sglang.control import Control

SCHEMA = "verify_attn/facts/v1"
INTERVAL = 1.0  # seconds between writes
POLL = 0.05  # seconds between looks at the control file


@dataclass
class Counters:
    """Counted by the scheduler's main thread only."""

    forwards: int = 0
    verify_forwards: int = 0
    verify_calls: int = 0
    incumbent_calls: int = 0
    verify_seconds: float = 0.0


class FactFile:
    """Keeps one rank's file current from a daemon thread.

    Args:
        directory: where to write; None keeps the facts in memory only.
        identity: what does not change: rank, ranks, backend, device, release ...
        current: called at every write for what does change; must be cheap and must not wait for a device.
        control: whose file this thread follows and whose acknowledgements are written at once.
    """

    def __init__(self, directory: str | None, identity: dict, current: Callable[[], dict], control: Control | None = None) -> None:
        self._identity = {"schema": SCHEMA, "pid": os.getpid(), **identity, "started": time.time()}
        self._current = current
        self._control = control
        self._written: dict | None = None
        self.path = Path(directory) / f"rank-{identity['rank']}.json" if directory else None
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.write()
            atexit.register(self.write)
        if self.path or (control and control.path):
            threading.Thread(target=self._keep_current, name="verify_attn facts", daemon=True).start()

    def snapshot(self) -> dict:
        """The facts as they are now: plain JSON."""
        return {**self._identity, **self._current(), "updated": time.time()}

    def write(self) -> None:
        current = self._current()
        if self.path is None:
            return
        if current == self._written:
            os.utime(self.path)
            return
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps({**self._identity, **current, "updated": time.time()}, indent=1))
        os.replace(partial, self.path)
        self._written = current

    def _keep_current(self) -> None:
        """Look at the control file every POLL; write at once what it said, everything else every INTERVAL."""
        due = time.monotonic() + INTERVAL
        while True:
            if self._control is None:
                time.sleep(INTERVAL)
            else:
                self._control.changed.wait(POLL)
                self._control.follow()
            news = self._control is not None and self._control.changed.is_set()
            if not news and time.monotonic() < due:
                continue
            if self._control is not None:
                self._control.changed.clear()
            due = time.monotonic() + INTERVAL
            try:
                self.write()
            except OSError:
                pass  # a full disk must not disturb serving; the reader sees an old file


def counters_json(counters: Counters) -> dict:
    return asdict(counters)
