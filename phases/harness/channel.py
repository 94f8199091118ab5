"""The worker's side of the pipe to the toolkit, and its pulse."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
from typing import Any

from phases.harness.process import PULSE


class Channel:
    """Sends messages to the toolkit.

    The descriptors are moved out of the way and not inherited, so that a kernel which prints, closes stdout or starts
    processes does not meet them by accident.
    """

    def __init__(self, pipe_fd: int, pulse_fd: int) -> None:
        self._pipe = os.dup(pipe_fd)  # not inheritable
        os.close(pipe_fd)
        self._pulse = mmap.mmap(pulse_fd, PULSE.size)
        os.close(pulse_fd)
        self._beats = 0
        self._item = -1

    def send(self, type_: str, /, **fields: Any) -> None:
        data = json.dumps({"type": type_, **fields}).encode() + b"\n"
        while data:
            data = data[os.write(self._pipe, data) :]

    def progress(self, text: str) -> None:
        self.send("progress", text=text)

    def at(self, item: int, variant: int = -1) -> None:
        """Say which item and variant is being worked on: a few bytes of shared memory, no system call."""
        self._beats += 1
        self._item = item
        PULSE.pack_into(self._pulse, 0, self._beats, item, variant)

    def variant(self, variant: int) -> None:
        self.at(self._item, variant)


def die_with_parent() -> None:
    """Have the kernel end this process when the toolkit is killed (Linux; elsewhere the closed pipe ends it later)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        pass
