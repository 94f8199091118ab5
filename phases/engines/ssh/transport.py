"""The way to a host: over ssh, or on this machine."""

from __future__ import annotations

from collections.abc import Callable

from phases.engines.ssh.host import Host
from phases.engines.ssh.local import LocalTransport
from phases.engines.ssh.ssh import SshTransport
from phases.engines.ssh.stream import Transport

Connect = Callable[[Host], Transport]


def connect(host: Host) -> Transport:
    """The transport for a host. The connection is made by the first `open`."""
    return LocalTransport(host) if host.local else SshTransport(host)
