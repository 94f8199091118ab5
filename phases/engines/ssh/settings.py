"""The playbook's `fleet` section."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from phases.engines.ssh.host import Host, SshOptions, Timeouts
from phases.engines.ssh.services import DockerDriver, ProcessDriver, ServiceDriver, SystemdDriver
from phases.playbook.located import Mistakes, Node
from phases.playbook.typed import setting
from phases.serving.address import WorkerAddress, canonical

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


@dataclass(frozen=True)
class SshSettings:
    """How to log in; what is not given comes from the user's ssh configuration."""

    user: str = setting("", help="user to log in as")
    port: int = setting(0, help="port of sshd; 0: as the ssh configuration says, else 22", at_least=0, at_most=65535)
    key_files: tuple[Path, ...] = setting(
        (), help="private keys to try after the agent's and before those of the ssh configuration"
    )
    known_hosts: tuple[Path, ...] = setting((), help="files with the hosts' keys; none: those of the ssh configuration")
    gateway: str = setting("", help="bastion, as user@host:port")
    agent: bool = setting(True, help="use the keys of a running ssh agent")
    config_file: Path | None = setting(None, help="ssh configuration to read instead of the user's own")


@dataclass(frozen=True)
class TimeoutSettings:
    """Limits on waiting."""

    connect: float = setting(10.0, help="connecting and logging in", duration=True, above=0)
    channel: float = setting(10.0, help="opening a channel", duration=True, above=0)
    command: float = setting(60.0, help="one request to a host", duration=True, above=0)
    keepalive: float = setting(15.0, help="between keepalives", duration=True, at_least=1)


@dataclass(frozen=True)
class HostSettings:
    """One worker."""

    name: str = setting(help="unique name of the worker", pattern=_NAME)
    address: str = setting(help="host name or address, or `local` for this machine", not_empty=True)
    root: str = setting(help="absolute path of the worker's directory on the host", pattern=r"/.+")
    port: int = setting(help="port the worker listens on; {port} in launch arguments", at_least=1, at_most=65535)
    url: str = setting(
        "", help="where the worker answers; empty: http at its address and port", pattern=r"|https?://[^/\s]+/?"
    )
    router_url: str = setting(
        "",
        help="the worker's address as the router is to know it, where that is another than `url`",
        pattern=r"|https?://[^/\s]+/?",
    )
    health: str = setting("/health", help="path that answers 200 when the worker is up", pattern=r"/.*")
    python: str = setting("python3", help="Python 3.8 or newer on the host", not_empty=True)
    sudo: str = setting("", help="user to become with `sudo -n`")
    labels: dict[str, str] = setting(help="for choosing workers: role, arch ...", factory=dict)
    vars: dict[str, str] = setting(
        help='values of {name} in launch arguments and environment, such as gpus: "0,1,2,3"', factory=dict
    )
    ssh: SshSettings | None = setting(None, help="login of this worker; default: the fleet's")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        for name in sorted({"port", "release", "root"} & set(self.vars)):
            mistakes.add(
                node.get("vars") or node, f"{node.path}: `vars` cannot give another {name} than the worker has"
            )

        for name, url in (("url", self.url), ("router_url", self.router_url)):
            if problem := _address_problem(url):
                mistakes.add(node.get(name) or node, f"{node.path}: `{name}` {problem}")
        if not self.url and (problem := _address_problem("", self.address)):
            mistakes.add(node.get("address") or node, f"{node.path}: `address` {problem}")

    @property
    def served_at(self) -> str:
        """Where the worker answers us."""
        if self.url:
            return self.url.rstrip("/")
        try:
            return WorkerAddress.of("127.0.0.1" if self.address == "local" else self.address, self.port).url
        except ValueError:  # which `check` has told
            return self.address

    @property
    def routed_at(self) -> str:
        """Its address as the router is to know it, as the playbook writes it; empty where that is `served_at`."""
        return self.router_url.rstrip("/")


class ServiceKind(Enum):
    PROCESS = "process"
    SYSTEMD = "systemd"
    DOCKER = "docker"


@dataclass(frozen=True)
class ServiceSettings:
    """How the worker's server is started and stopped on its host."""

    kind: ServiceKind = setting(ServiceKind.PROCESS, help="process, systemd or docker")
    name: str = setting("", help="systemd unit or container; {name} is the worker's name")
    user_manager: bool = setting(False, help="systemd: the user's own manager instead of the system's")
    drain: float = setting(30.0, help="time requests in flight get at a stop", duration=True, at_least=0)
    ready: float = setting(300.0, help="time a start may take until it answers", duration=True, above=0)

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if self.kind is not ServiceKind.PROCESS and not self.name:
            mistakes.add(node, f"{node.path}: a {self.kind.value} service needs its `name`")
        if self.name.startswith("-"):
            mistakes.add(
                node.get("name") or node, f"{node.path}: `name` {self.name!r} would be an option to systemctl or docker"
            )

    def driver(self, host: Host) -> ServiceDriver:
        """The driver for one worker."""
        name = self.name.replace("{name}", host.name)
        if self.kind is ServiceKind.SYSTEMD:
            return SystemdDriver(name, self.user_manager, self.drain)
        return DockerDriver(name, self.drain) if self.kind is ServiceKind.DOCKER else ProcessDriver(self.drain)


@dataclass(frozen=True)
class LeaseSettings:
    """How long a host waits for the toolkit before it goes back by itself."""

    arm: float = setting(600.0, help="from arming until the confirmation; must cover a restart", duration=True, above=0)
    bake: float = setting(120.0, help="from each renewal on, while a canary bakes", duration=True, at_least=5)


class RouterKind(Enum):
    NONE = "none"
    SGLANG = "sglang"


@dataclass(frozen=True)
class RouterSettings:
    """What spreads requests over the workers."""

    kind: RouterKind = setting(RouterKind.NONE, help="sglang (sglang-router over HTTP) or none (hooks)")
    url: str = setting("", help="address of sglang-router", pattern=r"|https?://\S+")
    api_key_env: str = setting("", help="environment variable that holds the router's key")
    metrics: str = setting(
        "",
        help="address whose /metrics are the router's own, to count the requests it repeats; empty: not counted",
        pattern=r"|https?://\S+",
    )
    timeout: float = setting(60.0, help="time an addition or removal may take to be seen", duration=True, above=0)
    add: tuple[str, ...] = setting((), help="none: argv that puts {url} into service")
    remove: tuple[str, ...] = setting((), help="none: argv that takes {url} out of service")
    observe: tuple[str, ...] = setting(
        (), help="none: argv that prints the URLs in service, as a JSON list or one a line"
    )

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if self.kind is RouterKind.SGLANG and not self.url:
            mistakes.add(node, f"{node.path}: an sglang router needs its `url`")
        hooks = [name for name in ("add", "remove", "observe") if getattr(self, name)]
        if self.kind is RouterKind.SGLANG and hooks:
            mistakes.add(node, f"{node.path}: `{hooks[0]}` is for `kind: none`")
        if self.kind is RouterKind.NONE and 0 < len(hooks) < 3:
            missing = next(name for name in ("add", "remove", "observe") if name not in hooks)
            mistakes.add(node, f"{node.path}: hooks need all of add, remove and observe; `{missing}` is missing")


@dataclass(frozen=True)
class FleetSettings:
    """The workers and how to reach, run and route to them."""

    hosts: tuple[HostSettings, ...] = setting(help="one entry a worker", not_empty=True)
    ssh: SshSettings = setting(help="login of every worker that has none of its own", factory=SshSettings)
    timeouts: TimeoutSettings = setting(help="limits on waiting", factory=TimeoutSettings)
    service: ServiceSettings = setting(help="how the worker's server is started", factory=ServiceSettings)
    lease: LeaseSettings = setting(help="the timer that reverts by itself", factory=LeaseSettings)
    router: RouterSettings = setting(help="what spreads requests", factory=RouterSettings)
    at_once: int = setting(16, help="hosts worked on at the same time", at_least=1, at_most=512)
    keep_releases: int = setting(2, help="old releases left on a host besides those in use", at_least=0)

    def check(self, node: Node, mistakes: Mistakes) -> None:
        listed = node.get("hosts")
        places = listed.elements() if listed else []
        for kind in ("name", "place", "url", "router_url"):
            seen: set[str] = set()
            for host, at in zip(self.hosts, places, strict=False):
                value = {
                    "name": host.name,
                    "place": f"{host.address}:{host.root}",
                    "url": canonical(host.served_at),
                    "router_url": canonical(host.routed_at or host.served_at),
                }[kind]
                if value in seen:
                    mistakes.add(at, f"{at.path}: the {kind} {value!r} is used twice")
                seen.add(value)
        if self.lease.arm <= self.service.ready + self.service.drain:
            text = f"lease.arm ({self.lease.arm:g} s) must be longer than service.ready + service.drain ({self.service.ready + self.service.drain:g} s)"
            mistakes.add(node.get("lease") or node, f"{node.path}: {text}, or a slow start is taken for a dead toolkit")

    def workers(self) -> tuple[Host, ...]:
        """The workers as the fleet code uses them."""
        timeouts = Timeouts(**dataclasses.asdict(self.timeouts))
        return tuple(_worker(host, host.ssh or self.ssh, timeouts) for host in self.hosts)


def _worker(host: HostSettings, ssh: SshSettings, timeouts: Timeouts) -> Host:
    values = {"port": str(host.port), **host.vars}
    options = SshOptions(ssh.user, ssh.port, ssh.key_files, ssh.known_hosts, ssh.gateway, ssh.agent, ssh.config_file)
    labels = {**host.labels, "health": host.health}
    return Host(
        host.name,
        host.address,
        host.root,
        host.python,
        host.sudo,
        host.served_at,
        options,
        timeouts,
        labels,
        values,
        router_url=host.routed_at,
    )


def _address_problem(url: str, address: str = "local") -> str:
    """What is wrong with a worker's URL, or with its host where it has none; else empty."""
    try:
        found = WorkerAddress.parse(url) if url else WorkerAddress.of("local" if address == "local" else address, 1)
    except ValueError:
        return (
            "is no address of a worker: write http://HOST:PORT, an IPv6 literal in brackets"
            if url
            else "is no host name or address"
        )
    if "@" in url:
        return "names a rank or a user: a worker is http://HOST:PORT, with all of its ranks"
    return "" if found.host else "names no host"
