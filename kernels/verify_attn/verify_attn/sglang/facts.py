"""What this rank does, as a JSON file the toolkit reads: `$VERIFY_ATTN_FACTS/rank-<n>.json`.

Written when the backend is made and whenever a counter moved, at most once a second, by renaming a finished file into
place, so a reader never sees half of one. Schema verify_attn/facts/v1:

    pid, rank, ranks          the process and its place in the tensor-parallel group
    backend, device           `verify_attn` or `verify_attn_torch`; cpu or cuda
    variant, build            kernel variant in use and the digest of its compiled object
    release                   digest of the release, from VERIFY_ATTN_RELEASE
    choice                    candidate or incumbent, see `control`
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

SCHEMA = "verify_attn/facts/v1"
INTERVAL = 1.0  # seconds between writes


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
    """

    def __init__(self, directory: str | None, identity: dict, current: Callable[[], dict]) -> None:
        self._identity = {"schema": SCHEMA, "pid": os.getpid(), **identity, "started": time.time()}
        self._current = current
        self._written: dict | None = None
        self.path = Path(directory) / f"rank-{identity['rank']}.json" if directory else None
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.write()
            threading.Thread(target=self._keep_current, name="verify_attn facts", daemon=True).start()
            atexit.register(self.write)

    def snapshot(self) -> dict:
        """The facts as they are now: plain JSON."""
        return {**self._identity, **self._current(), "updated": time.time()}

    def write(self) -> None:
        current = self._current()
        if self.path is None or current == self._written:
            return
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps({**self._identity, **current, "updated": time.time()}, indent=1))
        os.replace(partial, self.path)
        self._written = current

    def _keep_current(self) -> None:
        while True:
            time.sleep(INTERVAL)
            try:
                self.write()
            except OSError:
                pass  # a full disk must not disturb serving; the reader sees an old `updated`


def counters_json(counters: Counters) -> dict:
    return asdict(counters)
