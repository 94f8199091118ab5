"""What the toolkit does on a host: batches of operations over one stream, answered one line each.

    session = HostSession(connect(host))
    lock, inventory = session.do(op("lock.acquire", token=..., owner=...), op("inventory"))

Operations are listed in `onhost/agent.py`. A batch runs in order and stops at its first failure, which is raised here as
the matching error of `phases.engines.ssh.errors`. The batch is on the host before it starts, so a toolkit that dies meanwhile
leaves it finished, not half done.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterable
from typing import Any

from phases.base.errors import FleetError
from phases.engines.ssh.errors import SilentHostError, UnreachableError, from_host
from phases.engines.ssh.exits import exit_error
from phases.engines.ssh.host import Host
from phases.engines.ssh.kit import MARK, boot, kit
from phases.engines.ssh.stream import Stream, Transport

IDLE_SECONDS = 300.0  # how long the host waits for the next request before it drops this session's lock
MAX_LINE = 16 << 20
END_SECONDS = 2.0  # for the exit status of an agent whose output has ended
NOISE_KEPT = 4000  # bytes of what others print on the stream, for messages
ACK_BYTES = 32 << 10  # the host says so whenever it has taken this much of a body
# Bytes on the way at most. With 2 MB on the way to a reader slower than the line, sshd (OpenSSH 9.2) was seen to use 0.1 s
# more of the processor than with little; where it spends that was not profiled. A long line needs more to be filled.
MIN_WINDOW = 128 << 10
LINE_RATE = 200e6  # bytes/s that a line is taken to carry at most
ACK = b"+"

Operation = dict[str, Any]


def op(name: str, **arguments: Any) -> Operation:
    return {"op": name, **arguments}


class HostSession:
    """The agent on one host, started by the first `do` and again after a break. For one thread at a time."""

    def __init__(self, transport: Transport, *, idle: float = IDLE_SECONDS) -> None:
        self.transport, self.idle = transport, idle
        self._stream: Stream | None = None
        self._token, self._buffer, self._noise = b"", b"", b""
        self.greeting: dict[str, Any] = {}

    @property
    def host(self) -> Host:
        return self.transport.host

    def do(
        self, *operations: Operation, timeout: float | None = None, body: Iterable[bytes | memoryview] = ()
    ) -> list[Any]:
        """Run the operations and return their results.

        Args:
            timeout: seconds the host may take to answer; default: the host's command timeout.
            body: bytes that the last operation reads; each megabyte must be taken within the command timeout.

        Raises: the FleetError the host reports; SilentHostError or UnreachableError when it does not answer, and then
            it is not known how far the batch got: observe before acting again.
        """
        limit = self.host.timeouts.command if timeout is None else timeout
        if self._stream is not None and not self._stream.alive():
            self._drop()  # it ended while nothing was asked of it: idle for too long, killed, or the connection broke
        stream = self._stream or self._start()
        request = json.dumps({"do": list(operations), "ack": ACK_BYTES}).encode() + b"\n"
        try:
            stream.write(request, self.host.timeouts.command)
            reply = self._send_body(stream, body)
        except UnreachableError as fault:
            raise self._refusal(stream) or fault from None
        while not reply or reply == ACK:
            reply = self._line(stream, limit)
        answer = json.loads(reply)
        if answer["error"]:
            if any(item["op"] == "release.receive" for item in operations):
                self._drop()
            raise from_host(self.host.name, answer["error"])
        return list(answer["results"])

    def _send_body(self, stream: Stream, body: Iterable[bytes | memoryview]) -> bytes:
        """Send the body while the host takes it; its reply if one comes before the end (it refuses), else b""."""
        window, limit = max(MIN_WINDOW, int(stream.latency() * LINE_RATE)), self.host.timeouts.command
        on_the_way = 0
        for part in body:
            for start in range(0, len(part), ACK_BYTES):
                piece = part[start : start + ACK_BYTES]
                stream.write(piece, limit)
                on_the_way += len(piece)
                while on_the_way > window:
                    line = self._line(stream, limit)
                    if line != ACK:
                        return line
                    on_the_way -= ACK_BYTES
        return b""

    def fresh(self) -> HostSession:
        """Another session over a new connection."""
        return HostSession(self.transport.fresh(), idle=self.idle)

    def close(self) -> None:
        """End the session; the host drops the lock it stands behind unless a lease has taken it over."""
        self._drop()
        self.transport.close()

    def __enter__(self) -> HostSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Stream:
        """Start the agent. What is its own on the stream begins with a token that nobody else can know: the rest comes
        from login scripts, also without a line end, also later from what they left running."""
        limit, token = self.host.timeouts.command, f"{MARK}-{secrets.token_hex(8)}:"
        stream = self.transport.open(boot(self.host.python, self.host.root, token, self.idle))
        self._stream, self._token, self._buffer, self._noise = stream, token.encode(), b"", b""
        try:
            first = json.loads(self._line(stream, limit))
        except SilentHostError:
            raise self._not_started(limit) from None
        if first == "need":
            stream.write(kit().line, limit)
        elif first != "have":
            self._drop()
            raise from_host(self.host.name, first["error"])
        self.greeting = self.do(op("hello"), timeout=limit)[0]
        return stream

    def _line(self, stream: Stream, limit: float) -> bytes:
        """The agent's next line, without its token; what stands before the token is somebody else's."""
        until, strange = time.monotonic() + limit, 0
        while True:
            noise, token, mine = self._buffer.partition(self._token)
            if token and b"\n" in mine:
                line, _, self._buffer = mine.partition(b"\n")
                self._noise = (self._noise + noise)[-NOISE_KEPT:]
                return line
            if not token and len(noise) > len(self._token):
                self._buffer = noise[-len(self._token) :]  # may hold the beginning of a token
                self._noise = (self._noise + noise[: -len(self._token)])[-NOISE_KEPT:]
                strange += len(noise) - len(self._token)
            try:
                data = stream.read(max(0.0, until - time.monotonic()))
            except FleetError:
                self._noise = (self._noise + self._buffer)[-NOISE_KEPT:]
                self._drop()
                raise
            if not data:
                raise self._ended(stream)
            if len(self._buffer) + strange > MAX_LINE:
                raise self._endless()
            self._buffer += data

    def _refusal(self, stream: Stream) -> FleetError | None:
        """Writing failed: the host may have refused and hung up, and then its last line says why."""
        line = ACK
        try:
            while line == ACK:
                line = self._line(stream, 1.0)
        except FleetError:
            line = b""
        self._drop()
        reply = json.loads(line) if line else {}
        return from_host(self.host.name, reply["error"]) if reply.get("error") else None

    def _not_started(self, limit: float) -> FleetError:
        said = _last_line(self._noise)
        return SilentHostError(
            f"the login shell has not started {self.host.python} within {limit:g} s (it said: {said}).",
            hint="See whether `ssh` with a command (`true`) comes back: a login script that waits for input or starts "
            "another shell (`exec zsh`) must do so only for terminals.",
            host=self.host.name,
        )

    def _endless(self) -> FleetError:
        heard = self._noise + self._buffer
        said = _last_line(heard.rpartition(b"\n")[0] or heard)
        self._drop()
        return UnreachableError(
            f"the host prints without an end and says nothing of ours (last: {said}).",
            hint="See the startup files of the login shell there.",
            host=self.host.name,
        )

    def _ended(self, stream: Stream) -> FleetError:
        said = _last_line(self._noise + self._buffer + b"\n" + stream.errors().encode())
        code: int | None = None
        with contextlib.suppress(FleetError):  # no status: the connection is what ended
            code = stream.wait(END_SECONDS)
        self._drop()
        return exit_error(self.host, code, said)

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        self._buffer = b""
        if stream is not None:
            stream.close()


def _last_line(said: bytes) -> str:
    lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "nothing"
