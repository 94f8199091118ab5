"""The way to a host: itself, the hosts to jump through, each with its login and its key checked; built first, opened then."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import fabric
import paramiko

from phases.base.errors import FleetError
from phases.engines.ssh.authentication import Authentication
from phases.engines.ssh.causes import Peer, not_connected
from phases.engines.ssh.errors import SshConfigError
from phases.engines.ssh.host import Host
from phases.engines.ssh.known_hosts import read_known_hosts
from phases.engines.ssh.sshconfig import Login, login, parse_jump
from phases.engines.ssh.trust import Trust

MOST_JUMPS = 8
# The fastest in this client first; a server without them gets the rest of the library's list.
FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr")
# The library knows the exchange under its older name alone.
_SAME = {"curve25519-sha256@libssh.org": "curve25519-sha256"}


class Proxy:
    """A ProxyCommand: a program whose standard input and output are the connection.

    It gets one end of a socket pair, so that limits on waiting work; the library's own way spins for ever at its end.
    """

    def __init__(self, command: str) -> None:
        self.socket, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()
        with theirs:
            argv = [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"]
            self._process = subprocess.Popen(
                argv, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._errors, start_new_session=True
            )

    def said(self) -> str:
        """Its last line on standard error."""
        if self._errors.closed:
            return ""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        lines = [line for line in self._errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else ""

    def close(self) -> None:
        self.socket.close()
        with contextlib.suppress(OSError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors.close()


@dataclass
class Hop:
    """One machine on the way, the last one being the host itself."""

    login: Login
    connection: fabric.Connection
    proxy: Proxy | None = field(default=None)

    @property
    def where(self) -> str:
        return f"{self.login.user}@{self.login.hostname}:{self.login.port}"


class Route:
    """The hops to a host, the first to connect to first. `close` may be called from another thread at any time."""

    def __init__(self, host: Host) -> None:
        """Raises: SshConfigError. Nothing is connected yet."""
        self.host = host
        target = login(host, host.address, user=host.ssh.user, port=host.ssh.port, key_files=host.ssh.key_files)
        jumps = (host.ssh.gateway,) if host.ssh.gateway else target.jumps
        self.hops: list[Hop] = []
        for each in [*_before(host, jumps), target]:
            gateway = self.hops[-1].connection if self.hops else None
            self.hops.append(Hop(each, _connection(host, each, gateway)))

    @property
    def connection(self) -> fabric.Connection:
        """The connection to the host itself."""
        return self.hops[-1].connection

    def open(self) -> None:
        """Connect and log in, hop after hop, turning everything that can go wrong into one of our errors."""
        for hop in self.hops:
            deadline = threading.Timer(5 * self.host.timeouts.connect, hop.connection.client.close)
            deadline.daemon = True
            deadline.start()
            try:
                if hop.connection.gateway is None:
                    hop.connection.connect_kwargs["sock"] = self._first_socket(hop)
                hop.connection.open()
            except FleetError:
                raise
            except Exception as fault:  # noqa: BLE001 - the library's parsers have no one type for what a peer may send
                said = hop.proxy.said() if hop.proxy else ""
                raise not_connected(self.host, hop.where, fault, hop.connection.client.get_transport(), said) from None
            finally:
                deadline.cancel()

    def _first_socket(self, hop: Hop) -> socket.socket:
        if hop.login.proxy_command:
            hop.proxy = Proxy(hop.login.proxy_command)
            return hop.proxy.socket
        return _dial(hop.login, self.host.timeouts.connect)

    def close(self) -> None:
        for hop in reversed(self.hops):
            with contextlib.suppress(Exception):
                hop.connection.client.close()  # Fabric closes only what got as far as logging in
            if hop.proxy is not None:
                hop.proxy.close()


def _before(host: Host, jumps: Sequence[str], after: frozenset[str] = frozenset()) -> list[Login]:
    """The logins on the way, the first to connect to first. As with ssh, the first of them may have a way of its own."""
    logins: list[Login] = []
    for place, jump in enumerate([parse_jump(text, host) for text in jumps]):
        found = login(host, jump.name, user=jump.user, port=jump.port, key_files=host.ssh.key_files)
        if place == 0 and found.jumps:
            if jump.name in after or len(after) >= MOST_JUMPS:
                raise SshConfigError(
                    f"the ssh configuration jumps through {jump.name} to get to {jump.name}.",
                    hint="Set `ProxyJump none` for it.",
                    host=host.name,
                )
            logins += _before(host, found.jumps, after | {jump.name})
        logins.append(found)
    return logins


def _dial(login: Login, limit: float) -> socket.socket:
    """A TCP connection to the first of the host's addresses that takes one.

    Each is tried, also after one to which there is no route (IPv6 where the network has none): the library gives up there.
    """
    family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(login.family, socket.AF_UNSPEC)
    faults: list[OSError] = []
    for kind, _, _, _, address in socket.getaddrinfo(login.hostname, login.port, family, socket.SOCK_STREAM):
        made = socket.socket(kind, socket.SOCK_STREAM)
        try:
            made.settimeout(limit)
            if login.bind_address:
                made.bind((login.bind_address, 0))
            made.connect(address)
            return made
        except OSError as fault:
            made.close()
            faults.append(fault)
    raise faults[0]


def _connection(host: Host, login: Login, gateway: fabric.Connection | None) -> fabric.Connection:
    trust = Trust(host, login, read_known_hosts(host.ssh.known_hosts or login.known_hosts))
    options = {
        "banner_timeout": host.timeouts.connect,
        "auth_timeout": host.timeouts.connect,
        "channel_timeout": host.timeouts.channel,
        "transport_factory": functools.partial(_transport, host, login, trust),
        "auth_strategy": Authentication(host, login),
    }
    connection = fabric.Connection(
        login.hostname,
        user=login.user,
        port=login.port,
        gateway=gateway,
        forward_agent=False,
        connect_timeout=math.ceil(host.timeouts.connect),
        connect_kwargs=options,
        # Everything is decided already: neither ssh's files nor Fabric's own are read again.
        config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
    )
    connection.client.set_missing_host_key_policy(trust)
    return connection


def _transport(host: Host, login: Login, trust: Trust, sock: object, **options: object) -> Peer:
    transport = Peer(sock, **options)
    security = transport.get_security_options()
    fast = tuple(name for name in FAST_CIPHERS if name in security.ciphers)
    security.ciphers = _chosen(
        host, "Ciphers", (*fast, *(name for name in security.ciphers if name not in fast)), login.ciphers
    )
    security.digests = _chosen(host, "MACs", security.digests, login.macs)
    security.kex = _chosen(host, "KexAlgorithms", security.kex, login.key_exchanges)
    security.key_types = _chosen(host, "HostKeyAlgorithms", trust.order(security.key_types), login.host_key_algorithms)
    transport.handshake_timeout = host.timeouts.connect
    if isinstance(sock, socket.socket) and sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return transport


def _chosen(host: Host, setting: str, here: Sequence[str], chosen: Sequence[str]) -> tuple[str, ...]:
    """Of the library's algorithms those that the ssh configuration allows."""
    both = tuple(name for name in here if not chosen or name in chosen or _SAME.get(name) in chosen)
    if not both:
        raise SshConfigError(
            f"{setting} of the ssh configuration allows only {', '.join(chosen)}, and the toolkit has none of them.",
            hint=f"Allow one of {', '.join(here)} there too.",
            host=host.name,
        )
    return both
