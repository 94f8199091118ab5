"""A host as the toolkit sees it: one worker's place on a machine, how to get there, and the limits on waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Timeouts:
    """Seconds. Nothing ever waits without a limit."""

    connect: float = 10.0  # TCP, banner, key exchange and login, each
    channel: float = 10.0  # opening a channel on an established connection
    command: float = 60.0  # one request to the host, unless it is given its own
    keepalive: float = 15.0  # between keepalives on an idle connection


@dataclass(frozen=True)
class SshOptions:
    """How to log in. Unset values come from the user's ssh configuration, as with `ssh` itself (see sshconfig)."""

    user: str = ""
    port: int = 0
    key_files: tuple[Path, ...] = ()
    known_hosts: tuple[Path, ...] = ()  # empty: those that the ssh configuration names
    gateway: str = ""  # user@host:port of a bastion
    agent: bool = True  # use keys of a running ssh agent
    config_file: Path | None = None  # None: the user's own ~/.ssh/config


@dataclass(frozen=True)
class Host:
    """One worker's place.

    Attributes:
        name: unique in the fleet; what every message, table and journal calls it.
        address: host name or address to connect to; `local` runs on this machine without ssh.
        root: the worker's directory there; several workers on one machine have several roots.
        python: the Python (3.8 or newer) there that runs the toolkit's host-side scripts.
        sudo: run as this user through `sudo -n`; "" as the user who logs in.
        url: where the worker answers us. router_url: where it answers the router, if that is written otherwise; else empty.
        labels: for choosing hosts (role, arch ...); values: what {name} in launch arguments means here.
    """

    name: str
    address: str
    root: str
    python: str = "python3"
    sudo: str = ""
    url: str = ""
    ssh: SshOptions = field(default_factory=SshOptions)
    timeouts: Timeouts = field(default_factory=Timeouts)
    labels: dict[str, str] = field(default_factory=dict, hash=False)
    values: dict[str, str] = field(default_factory=dict, hash=False)
    router_url: str = ""

    @property
    def at_router(self) -> str:
        """The worker's address as it is told to the router."""
        return self.router_url or self.url

    @property
    def local(self) -> bool:
        return self.address == "local"
