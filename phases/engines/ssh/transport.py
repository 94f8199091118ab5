"""Running programs on a host: one interface, over ssh or on this machine.

A transport opens streams: a program given as an argv list, with standard input and output as bytes and a limit on every
wait. What the toolkit does on hosts goes through one stream per connection (`phases.engines.ssh.session`).
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from phases.base.errors import FleetError
from phases.engines.ssh.errors import CommandError, SilentHostError, UnreachableError
from phases.engines.ssh.host import Host

CHUNK = 1 << 16


@dataclass(frozen=True)
class Completed:
    """A program that ended on a host; `out` and `err` are text."""

    host: str
    argv: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float

    def check(self) -> Completed:
        """Self, or CommandError with the last lines of what the program said."""
        if self.code != 0:
            said = (self.err or self.out).strip()[-500:]
            raise CommandError(f"`{shlex.join(self.argv)}` ended with status {self.code}: {said}", host=self.host)
        return self


class Stream(Protocol):
    """A running program's standard input and output."""

    def alive(self) -> bool:
        """False once the program is known to have ended or the connection to be gone."""
        ...

    def latency(self) -> float:
        """Seconds a round trip takes as far as known; a large value where it is not."""
        ...

    def write(self, data: bytes | memoryview, timeout: float) -> None: ...

    def read(self, timeout: float) -> bytes:
        """Some bytes of standard output; b"" at its end. SilentHostError when nothing comes in time."""
        ...

    def finish_input(self) -> None: ...

    def wait(self, timeout: float) -> int:
        """Exit status once the output has ended."""
        ...

    def errors(self) -> str:
        """What came on standard error so far, the last few thousand characters."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """A way to a host. Not for use by two threads at once; `fresh` gives another one over a new connection."""

    host: Host

    def open(self, argv: Sequence[str]) -> Stream: ...

    def close(self) -> None: ...

    def fresh(self) -> Transport: ...


def run(transport: Transport, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None) -> Completed:
    """Run a program to its end.

    Raises: SilentHostError when it takes longer than `timeout` seconds; UnreachableError when the connection breaks.
    """
    limit = transport.host.timeouts.command if timeout is None else timeout
    started = time.monotonic()
    stream = transport.open(argv)
    try:
        if stdin:
            stream.write(stdin, limit)
        stream.finish_input()
        out = []
        while data := stream.read(max(0.0, limit - (time.monotonic() - started))):
            out.append(data)
        code = stream.wait(max(0.1, limit - (time.monotonic() - started)))
        text = b"".join(out).decode("utf-8", "replace")
        return Completed(transport.host.name, tuple(argv), code, text, stream.errors(), time.monotonic() - started)
    finally:
        stream.close()


def as_user(host: Host, argv: Sequence[str]) -> list[str]:
    """The argv with `sudo` in front where the host wants it. Never asks for a password: nobody is there to answer."""
    return ["sudo", "-n", "-u", host.sudo, "--", *argv] if host.sudo else list(argv)


def shell_line(argv: Sequence[str]) -> str:
    """The one place where an argv becomes text for a remote shell."""
    return shlex.join(argv)


def silent(host: Host, what: str, seconds: float) -> FleetError:
    return SilentHostError(
        f"did not answer within {seconds:g} s while {what}.",
        hint="Check the host and the network; nothing was left half done, the same command can be repeated.",
        host=host.name,
    )


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
            heard, ready, _ = select.select([self._output], [self._input], [], timeout)
            if not heard and not ready:
                raise silent(self.host, "taking data", timeout)
            if heard:
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
        if not select.select([self._output], [], [], timeout)[0]:
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


Connect = Callable[[Host], Transport]


def connect(host: Host) -> Transport:
    """The transport for a host. The connection is made by the first `open`."""
    if host.local:
        return LocalTransport(host)
    from phases.engines.ssh.ssh import SshTransport  # fabric takes a while to import

    return SshTransport(host)
