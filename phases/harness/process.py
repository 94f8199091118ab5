"""Running kernel code in a worker process, so that whatever a kernel does is an outcome and never the toolkit's end.

The worker (`python -m phases.harness.worker`) gets its job as JSON on stdin and answers with JSON lines on a pipe of its
own; its stdout and stderr are only noise, of which the last lines are kept for messages. A few bytes of shared memory
say which case and variant it is at (the *pulse*), at no cost to what is being timed, so that after a crash or a hang
the culprit is known.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import phases
from phases.base.errors import KernelContractError, PhaseError
from phases.base.extras import Extra

PULSE = struct.Struct("<Qii")  # beats, item, variant; -1 outside any
SILENCE_SECONDS = 300.0  # without a message or a beat for this long a worker counts as hung
_TAIL_LINES = 80  # kept; the last few that say something are shown
_SHOWN_LINES = 6
_NOISE = ("/phases/harness/", "<frozen runpy>", "Extension modules:", "(most recent call first)")
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0

Message = dict[str, Any]


@dataclass(frozen=True)
class Death:
    """How a worker ended before its job was done."""

    reason: str  # one sentence with the last lines it printed
    item: int  # index of the item it was at, -1 outside any
    variant: int  # index of the variant it was at, -1 outside any


class WorkerError(PhaseError):
    """A worker could not do its job for a reason that is not the kernel's."""

    stage = "kernel worker"


def run(
    job: Message,
    on_message: Callable[[Message], None],
    *,
    silence: float = SILENCE_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> Death | None:
    """Run one job in a fresh worker and hand over its messages as they come.

    Args:
        job: plain JSON with `op` and what that operation needs.
        on_message: called in this process for every message but `error` and `done`.
        silence: seconds inside one run of a variant without any sign of life after which the worker is killed; outside
            a variant (importing, references) it has SILENCE_SECONDS at least.
        environment: variables the worker gets beside this process's own.

    Returns:
        None when the job was done, else how the worker died.

    Raises:
        KernelContractError: the worker found the contract broken.
        WorkerError: it reported another foreseeable failure, such as a missing device.
        MissingExtra: this installation has no torch.
    """
    Extra.BENCH.require("Running a kernel")
    worker = _Worker(job, environment or {})
    try:
        return worker.listen(on_message, silence)
    finally:
        worker.kill()


class _Worker:
    """One worker process: its pipe, its pulse, and the tail of what it printed."""

    def __init__(self, job: Message, environment: Mapping[str, str]) -> None:
        pulse_fd = os.memfd_create("pulse")
        os.ftruncate(pulse_fd, PULSE.size)
        self.pulse = mmap.mmap(pulse_fd, PULSE.size)
        PULSE.pack_into(self.pulse, 0, 0, -1, -1)
        self.reading, writing = os.pipe()
        argv = [sys.executable, "-P", "-m", "phases.harness.worker", str(writing), str(pulse_fd)]
        self.child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(writing, pulse_fd),
            start_new_session=True,
            env={**_environment(), **environment},
        )
        os.close(writing)
        os.close(pulse_fd)
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.drain = threading.Thread(target=self._drain, daemon=True)
        self.drain.start()
        try:
            self.child.stdin.write(json.dumps(job).encode())
            self.child.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: listen() tells why

    def listen(self, on_message: Callable[[Message], None], silence: float) -> Death | None:
        buffer, beat, alive = b"", -1, time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self.reading, selectors.EVENT_READ)
            while True:
                ready = selector.select(timeout=min(_POLL_SECONDS, silence / 4))
                now_beat, _, variant = PULSE.unpack_from(self.pulse)
                patience = (
                    silence if variant >= 0 else max(silence, SILENCE_SECONDS)
                )  # imports and references may be slow
                if ready or now_beat != beat:
                    beat, alive = now_beat, time.monotonic()
                if not ready:
                    if time.monotonic() - alive > patience:
                        return self._died(f"gave no sign of life for {patience:g} s and was killed")
                    if self.child.poll() is not None:  # dead, while a grandchild may still hold the pipe
                        return self._died(self._exit_reason())
                    continue
                data = os.read(self.reading, 1 << 16)
                if not data:
                    return self._died(self._exit_reason())
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if message["type"] == "done":
                        return None
                    if message["type"] == "error":
                        kind = KernelContractError if message["contract"] else WorkerError
                        raise kind(message["message"], hint=message["hint"])
                    on_message(message)

    def _exit_reason(self) -> str:
        try:
            code = self.child.wait(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its channel to the toolkit and was killed"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended the process with exit code {code}"

    def _died(self, reason: str) -> Death:
        _, item, variant = PULSE.unpack_from(self.pulse)
        self.kill()
        self.drain.join(timeout=1.0)
        lines = [line.strip() for line in self.tail if line.strip() and not any(noise in line for noise in _NOISE)][
            -_SHOWN_LINES:
        ]
        printed = "; last lines: " + " | ".join(lines) if lines else ""
        return Death(reason + printed, item, variant)

    def _drain(self) -> None:
        for line in iter(lambda: self.child.stdout.readline(2000), b""):
            self.tail.append(line.decode(errors="replace").rstrip()[:300])

    def kill(self) -> None:
        """End the worker and whatever it started in its session; harmless when all are gone."""
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.child.wait()
        if self.reading >= 0:
            os.close(self.reading)
            self.reading = -1


def _environment() -> dict[str, str]:
    """The toolkit's environment, with this very package first on the path and a Python stack printed on a crash."""
    here = str(Path(phases.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
