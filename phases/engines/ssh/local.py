"""This machine as a host: the interface of the others, without ssh."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
from collections.abc import Sequence

from phases.engines.ssh.errors import UnreachableError
from phases.engines.ssh.host import Host
from phases.engines.ssh.stream import CHUNK, Stream, as_user, silent


class LocalTransport:
    """This machine, with the interface of the others: each stream is a process of its own session."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._streams: list[_LocalStream] = []

    def open(self, argv: Sequence[str]) -> Stream:
        """Start the program; UnreachableError when it cannot be started."""
        try:
            stream = _LocalStream(self.host, as_user(self.host, argv))
        except OSError as fault:
            raise UnreachableError(
                f"cannot start {argv[0]}: {fault.strerror}.", hint="Check `python` of this host.", host=self.host.name
            ) from None
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()

    def fresh(self) -> LocalTransport:
        return LocalTransport(self.host)


def _ready(wanted: dict[int, int], timeout: float) -> set[int]:
    """The descriptors at which something can be done, or which have ended. `select` takes none above 1023."""
    poller = select.poll()
    for descriptor, events in wanted.items():
        poller.register(descriptor, events)
    return {descriptor for descriptor, _ in poller.poll(1000 * timeout)}


class _LocalStream:
    def __init__(self, host: Host, argv: list[str]) -> None:
        self.host = host
        self._stderr = tempfile.TemporaryFile()  # a file never fills up and blocks, whatever the program says
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        self._early = b""  # output that came while input was written

    def alive(self) -> bool:
        return self._process.poll() is None

    def latency(self) -> float:
        return 0.0

    def write(self, data: bytes | memoryview, timeout: float) -> None:
        view = memoryview(data)
        while view:
            ready = _ready({self._output.fileno(): select.POLLIN, self._input.fileno(): select.POLLOUT}, timeout)
            if not ready:
                raise silent(self.host, "taking data", timeout)
            if self._output.fileno() in ready:
                self._early += os.read(self._output.fileno(), CHUNK)
            try:
                view = view[os.write(self._input.fileno(), view[:CHUNK]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise UnreachableError(
                    f"the program ended while it was sent data: {self.errors()[-300:]}", host=self.host.name
                ) from None

    def read(self, timeout: float) -> bytes:
        if self._early:
            data, self._early = self._early, b""
            return data
        if not _ready({self._output.fileno(): select.POLLIN}, timeout):
            raise silent(self.host, "running a command", timeout)
        return os.read(self._output.fileno(), CHUNK)

    def finish_input(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()

    def wait(self, timeout: float) -> int:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise silent(self.host, "ending a command", timeout) from None

    def errors(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 4000))
        return self._stderr.read().decode("utf-8", "replace")

    def close(self) -> None:
        """Hang up, as a broken connection would: the program sees the end of its input and is not stopped half way."""
        self.finish_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._output.close()
        if not self._stderr.closed:
            self._stderr.close()
