"""The ssh transport, on Fabric: strict about host keys, and with a limit on every wait.

Fabric's own defaults are not safe for a fleet: it accepts any host key, has no keepalive, and several of its waits have no
limit. Here an unknown or changed key is refused, and whatever does not answer in time is closed from outside, which ends
the wait (a stopped sshd keeps the TCP connection open and lets data pile up, so socket timeouts alone do not help).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fabric
import paramiko

from phases.base.errors import FleetError
from phases.engines.ssh.errors import HostKeyError, LoginError, UnreachableError
from phases.engines.ssh.host import Host
from phases.engines.ssh.stream import CHUNK, Stream, as_user, shell_line, silent

SLICE = 1 << 20  # bytes written under one time limit
WRITE_POLL = 0.05  # seconds a full window is waited for before looking what the program says
STDERR_KEPT = 4000
UNKNOWN_LATENCY = 0.1  # seconds
TCP_INFO_RTT = 68  # offset of the smoothed round trip time, in microseconds, in Linux's struct tcp_info
# The fastest in this client first; a server without them gets the rest of the library's list.
FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr")

# The library prints the tracebacks of refused connections; what matters of them is in our own exceptions.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False


class SshTransport:
    """One ssh connection, made by the first `open` and made again after a break. For one thread at a time."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._connection: fabric.Connection | None = None
        self._lock = threading.Lock()
        self.expired = False  # the current limit has closed the connection

    def open(self, argv: Sequence[str]) -> Stream:
        """Start a program.

        Raises: UnreachableError, SilentHostError, HostKeyError or LoginError, each with host and cure.
        """
        transport = self._connected()
        limit = self.host.timeouts.channel
        with self.limited(limit, "opening a channel"):
            channel = transport.open_session(timeout=limit)
            channel.exec_command(shell_line(as_user(self.host, argv)))
        return _SshStream(self, channel)

    def close(self) -> None:
        """Close the connection; safe from another thread, whose waits then end with UnreachableError."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is None:
            return
        with contextlib.suppress(Exception):
            connection.close()
        if connection.gateway is not None:
            with contextlib.suppress(Exception):
                connection.gateway.close()

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
        except (paramiko.SSHException, OSError, EOFError) as fault:
            if self.expired or isinstance(fault, TimeoutError):
                self.close()
                raise silent(self.host, what, seconds) from None
            self.close()
            raise lost(self.host, what, fault) from None
        finally:
            timer.cancel()

    def _connected(self) -> paramiko.Transport:
        with self._lock:
            connection = self._connection
        if connection is not None and connection.is_connected:
            return connection.transport
        self.close()
        connection = make_connection(self.host)
        with self._lock:
            self._connection = connection
        try:
            open_connection(self.host, connection)
        except BaseException:
            for hop in _hops(connection):  # Fabric closes only what got as far as logging in
                with contextlib.suppress(Exception):
                    hop.client.close()
            raise
        transport: paramiko.Transport = connection.transport
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
                "the connection was lost before the command had ended.", hint=_LOST_HINT, host=self.host.name
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


_LOST_HINT = "Check the host and the network, then repeat the command: it continues from what the host has."


def lost(host: Host, what: str, fault: BaseException) -> FleetError:
    reason = str(fault) or type(fault).__name__
    return UnreachableError(f"the connection broke while {what} ({reason}).", hint=_LOST_HINT, host=host.name)


# ---- making the connection


def make_connection(host: Host) -> fabric.Connection:
    """A Fabric connection, not yet open, that refuses unknown keys; the bastion's likewise."""
    config = fabric.Config(runtime_ssh_path=str(host.ssh.config_file)) if host.ssh.config_file else fabric.Config()
    options: dict[str, Any] = {
        "config": config,
        "connect_timeout": math.ceil(host.timeouts.connect),
        "connect_kwargs": _connect_options(host),
    }
    if host.ssh.gateway:
        gateway = dict(options, config=config.clone(), connect_kwargs=_connect_options(host))
        options["gateway"] = fabric.Connection(host.ssh.gateway, **gateway)
    connection = fabric.Connection(
        host.address, user=host.ssh.user or None, port=host.ssh.port or None, forward_agent=False, **options
    )
    for hop in _hops(connection):
        _trust_only_known(hop, host)
    return connection


def _hops(connection: fabric.Connection) -> Iterator[fabric.Connection]:
    while isinstance(connection, fabric.Connection):
        yield connection
        connection = connection.gateway


def _connect_options(host: Host) -> dict[str, Any]:
    options: dict[str, Any] = {
        "banner_timeout": host.timeouts.connect,
        "auth_timeout": host.timeouts.connect,
        "channel_timeout": host.timeouts.channel,
        "allow_agent": host.ssh.agent,
        "look_for_keys": not host.ssh.key_files,
        "transport_factory": functools.partial(_transport, host.timeouts.connect),
    }
    if host.ssh.key_files:
        options["key_filename"] = [str(path) for path in host.ssh.key_files]
    return options


def _transport(limit: float, sock: Any, **options: Any) -> paramiko.Transport:
    transport = paramiko.Transport(sock, **options)
    security = transport.get_security_options()
    fast = tuple(name for name in FAST_CIPHERS if name in security.ciphers)
    security.ciphers = fast + tuple(name for name in security.ciphers if name not in fast)
    transport.handshake_timeout = limit
    if isinstance(sock, socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return transport


def _trust_only_known(connection: fabric.Connection, host: Host) -> None:
    name = connection.host if connection.port == 22 else f"[{connection.host}]:{connection.port}"
    keys = _known_keys(_known_hosts_files(host))
    known = keys.lookup(name) or {}
    for kind in known:
        connection.client.get_host_keys().add(name, kind, known[kind])
    connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())


def _known_hosts_files(host: Host) -> tuple[tuple[str, float], ...]:
    paths = host.ssh.known_hosts or (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))
    found = []
    for path in paths:
        expanded = os.path.expanduser(path)
        with contextlib.suppress(OSError):
            found.append((expanded, os.stat(expanded).st_mtime_ns))
    return tuple(found)


@functools.lru_cache(maxsize=16)
def _known_keys(files: tuple[tuple[str, float], ...]) -> paramiko.HostKeys:
    keys = paramiko.HostKeys()
    for path, _ in files:
        keys.load(path)
    return keys


def open_connection(host: Host, connection: fabric.Connection) -> None:
    """Open it, turning everything that can go wrong into one of our errors."""
    where = f"{connection.user}@{connection.host}:{connection.port}"
    deadline = threading.Timer(5 * host.timeouts.connect, connection.client.close)
    deadline.daemon = True
    deadline.start()
    try:
        connection.open()
    except paramiko.BadHostKeyException as fault:
        raise HostKeyError(
            f"{where} shows another host key than the known one ({fingerprint(fault.key)} instead of {fingerprint(fault.expected_key)}).",
            hint=f"If the host was reinstalled, remove the old key (`ssh-keygen -R '{_known_name(connection)}'`) and add the new one after "
            "comparing fingerprints; otherwise somebody may be in between.",
            host=host.name,
        ) from None
    except paramiko.AuthenticationException as fault:
        raise LoginError(
            f"{where} refuses the login: {fault}",
            hint="Check `user`, `key_files` and the agent (`ssh-add -l`).",
            host=host.name,
        ) from None
    except paramiko.ssh_exception.NoValidConnectionsError as fault:
        raise UnreachableError(
            f"cannot connect to {where}: {_first(fault)}.",
            hint="Is sshd running there, and is the port right?",
            host=host.name,
        ) from None
    except TimeoutError:
        raise silent(host, f"connecting to {where}", host.timeouts.connect) from None
    except socket.gaierror as fault:
        raise UnreachableError(
            f"the name {connection.host} cannot be resolved: {fault.strerror}.", hint="Check `address`.", host=host.name
        ) from None
    except (paramiko.SSHException, OSError, EOFError) as fault:
        raise _explain(host, where, connection, fault) from None
    finally:
        deadline.cancel()


def _explain(host: Host, where: str, connection: fabric.Connection, fault: BaseException) -> FleetError:
    text = str(fault) or type(fault).__name__
    if "not found in known_hosts" in text:
        hop = next((hop for hop in _hops(connection) if _known_name(hop) in text), connection)
        return HostKeyError(
            f"no host key is known for {_known_name(hop)}.",
            hint=f"Get it with `ssh-keyscan -p {hop.port} {hop.host}`, compare the fingerprint with the host's own, and add it to known_hosts.",
            host=host.name,
        )
    # "No existing session" is what the library says when the key exchange has not ended in time.
    if any(sign in text.lower() for sign in ("timeout", "timed out", "banner", "no existing session")):
        return silent(host, f"connecting to {where} ({text})", host.timeouts.connect)
    return UnreachableError(f"cannot connect to {where}: {text}.", hint=_LOST_HINT, host=host.name)


def _known_name(connection: fabric.Connection) -> str:
    return connection.host if connection.port == 22 else f"[{connection.host}]:{connection.port}"


def _first(fault: paramiko.ssh_exception.NoValidConnectionsError) -> str:
    return str(next(iter(fault.errors.values())))


def fingerprint(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"
