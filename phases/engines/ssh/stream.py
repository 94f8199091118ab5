"""Running programs on a host: what a transport is, whichever way it goes.

A transport opens streams: a program given as an argv list, with standard input and output as bytes and a limit on every
wait. What the toolkit does on hosts goes through one stream per connection (`phases.engines.ssh.session`).
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phases.base.errors import FleetError
from phases.engines.ssh.errors import CommandError, SilentHostError
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


_PLAIN = re.compile(r"[A-Za-z0-9_./:@+,-]+")
_PIECES = re.compile(r"[^'\\!]+|.", re.DOTALL)
_ESCAPED = {"'": '"\'"', "\\": "\\\\", "!": "\\!"}


def shell_line(argv: Sequence[str]) -> str:
    """The one place where an argv becomes text for a remote shell, which may be any: sh, bash, zsh, dash, ash, csh or fish.

    They agree on what stands in single quotes except for a backslash (fish), an exclamation mark (csh) and the quote
    itself, which stand outside. A line break has no form that csh reads too; `kit.boot` has none.
    """
    return " ".join(map(_quoted, argv))


def _quoted(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    return "".join(_ESCAPED.get(piece, f"'{piece}'") for piece in _PIECES.findall(word)) or "''"


def silent(host: Host, what: str, seconds: float) -> FleetError:
    return SilentHostError(
        f"did not answer within {seconds:g} s while {what}.",
        hint="Check the host and the network; nothing was left half done, the same command can be repeated.",
        host=host.name,
    )
