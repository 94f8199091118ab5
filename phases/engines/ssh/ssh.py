"""The ssh transport, on Fabric: strict about host keys, and with a limit on every wait.

Fabric's own defaults are not safe for a fleet: it accepts any host key, has no keepalive, and several of its waits have no
limit. Here an unknown or changed key is refused (`trust`), and whatever does not answer in time is closed from outside, which
ends the wait (a stopped sshd keeps the TCP connection open and lets data pile up, so socket timeouts alone do not help).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import fabric
import paramiko

from phases.base.errors import FleetError
from phases.engines.ssh.causes import AGAIN, OPENING, lost, not_connected
from phases.engines.ssh.errors import UnreachableError
from phases.engines.ssh.host import Host
from phases.engines.ssh.route import Route
from phases.engines.ssh.stream import CHUNK, Stream, as_user, shell_line, silent

SLICE = 1 << 20  # bytes written under one time limit
WRITE_POLL = 0.05  # seconds a full window is waited for before looking what the program says
STDERR_KEPT = 4000
UNKNOWN_LATENCY = 0.1  # seconds
TCP_INFO_RTT = 68  # offset of the smoothed round trip time, in microseconds, in Linux's struct tcp_info

# The library prints the tracebacks of refused connections; what matters of them is in our own exceptions.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False


class SshTransport:
    """One ssh connection, made by the first `open` and made again after a break. For one thread at a time."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._route: Route | None = None
        self._lock = threading.Lock()
        self.expired = False  # the current limit has closed the connection

    def open(self, argv: Sequence[str]) -> Stream:
        """Start a program.

        Raises: UnreachableError, SilentHostError, HostKeyError or LoginError, each with host and cure.
        """
        transport = self._connected()
        limit = self.host.timeouts.channel
        with self.limited(limit, OPENING):
            channel = transport.open_session(timeout=limit)
            channel.exec_command(shell_line(as_user(self.host, argv)))
        return _SshStream(self, channel)

    def close(self) -> None:
        """Close the connection; safe from another thread, whose waits then end with UnreachableError."""
        with self._lock:
            route, self._route = self._route, None
        if route is not None:
            route.close()

    def fresh(self) -> SshTransport:
        return SshTransport(self.host)

    @contextlib.contextmanager
    def limited(self, seconds: float, what: str) -> Iterator[None]:
        """Close the connection when the block takes longer than `seconds`, and name what was waited for."""
        self.expired = False

        def expire() -> None:
            self.expired = True
            self.close()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        except FleetError:
            raise
        except Exception as fault:  # noqa: BLE001 - the library's parsers have no one type for what a peer may send
            if self.expired or isinstance(fault, TimeoutError):
                self.close()
                raise silent(self.host, what, seconds) from None
            peer = self._connection.transport if self._connection else None
            self.close()
            raise lost(self.host, what, fault, peer) from None
        finally:
            timer.cancel()

    @property
    def _connection(self) -> fabric.Connection | None:
        route = self._route
        return route.connection if route else None

    def _connected(self) -> paramiko.Transport:
        connection = self._connection
        if connection is not None and connection.is_connected:
            return connection.transport
        self.close()
        try:
            route = Route(self.host)
        except OSError as fault:  # no file, process or memory left to ask for the way
            raise not_connected(self.host, self.host.address, fault, None, "") from None
        with self._lock:
            self._route = route
        try:
            route.open()
        except BaseException:
            route.close()
            raise
        transport: paramiko.Transport = route.connection.transport
        transport.set_keepalive(max(1, int(self.host.timeouts.keepalive)))
        return transport


class _SshStream:
    def __init__(self, owner: SshTransport, channel: paramiko.Channel) -> None:
        self.owner, self.host, self.channel = owner, owner.host, channel
        self._errors, self._early = b"", b""

    def alive(self) -> bool:
        transport = self.channel.get_transport()
        return transport.is_active() and not self.channel.closed and not self.channel.exit_status_ready()

    def latency(self) -> float:
        sock = self.channel.get_transport().sock
        if not isinstance(sock, socket.socket):
            return UNKNOWN_LATENCY  # through a bastion
        with contextlib.suppress(OSError, struct.error):
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_RTT + 4)
            return struct.unpack_from("I", info, TCP_INFO_RTT)[0] / 1e6
        return UNKNOWN_LATENCY

    def write(self, data: bytes | memoryview, timeout: float) -> None:
        """Send everything; each megabyte has `timeout` seconds."""
        view = memoryview(data)
        for start in range(0, len(view), SLICE):
            with self.owner.limited(timeout, "taking data"):
                self._send(view[start : start + SLICE])

    def _send(self, view: memoryview) -> None:
        """Send while listening: a program that first wants its output taken must not wait for us, nor we for it."""
        self.channel.settimeout(WRITE_POLL)
        while view:
            try:
                view = view[self.channel.send(view) :]
            except TimeoutError:
                self._drain_errors()
                while self.channel.recv_ready():
                    self._early += self.channel.recv(CHUNK)
                if self.owner.expired:
                    raise

    def read(self, timeout: float) -> bytes:
        if self._early:
            data, self._early = self._early, b""
            return data
        until = time.monotonic() + timeout
        while True:
            self._drain_errors()
            remaining = until - time.monotonic()
            if remaining <= 0 and not self.channel.recv_ready():
                self.owner.close()
                raise silent(self.host, "running a command", timeout)
            self.channel.settimeout(max(0.001, min(1.0, remaining)))
            try:
                return self.channel.recv(CHUNK)
            except TimeoutError:
                continue

    def finish_input(self) -> None:
        with self.owner.limited(self.host.timeouts.channel, "ending a command's input"):
            self.channel.shutdown_write()

    def wait(self, timeout: float) -> int:
        self._drain_errors()
        if not self.channel.status_event.wait(timeout):
            self.owner.close()
            raise silent(self.host, "ending a command", timeout)
        self._drain_errors()
        code = self.channel.recv_exit_status()
        if code == -1:
            self.owner.close()
            raise UnreachableError(
                "the connection was lost before the command had ended.", hint=AGAIN, host=self.host.name
            )
        return code

    def errors(self) -> str:
        self._drain_errors()
        return self._errors.decode("utf-8", "replace")

    def _drain_errors(self) -> None:
        while self.channel.recv_stderr_ready():
            self._errors = (self._errors + self.channel.recv_stderr(CHUNK))[-STDERR_KEPT:]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.channel.close()
