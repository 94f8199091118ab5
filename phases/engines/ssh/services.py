"""Service drivers: start, stop with drain, restart, status and logs of the service on a host, behind one small interface.

Each driver is a translation to operations of the host's agent; restarts that the lease guard does by itself are the same
argv, so that what is tested here is what happens when nobody is looking.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phases.base.redaction import without_secrets
from phases.engines.ssh.errors import ServiceError
from phases.engines.ssh.host import Host
from phases.engines.ssh.kit import script
from phases.engines.ssh.session import HostSession, Operation, op

DRAIN_SECONDS = 30.0


@dataclass(frozen=True)
class ServiceStatus:
    running: bool
    pid: int = 0
    detail: str = ""  # the driver's own word: active, exited (1), restarting ...


class ServiceDriver(Protocol):
    """One service on one kind of host. Commands are argv on the host; operations are for batches."""

    name: str
    drain: float  # seconds that requests in flight get at a stop

    def starting(self, host: Host) -> Operation: ...

    def stopping(self, host: Host) -> Operation: ...

    def restarting(self, host: Host) -> Operation: ...

    def restart_argv(self, host: Host) -> list[str]: ...

    def stop_argv(self, host: Host) -> list[str]: ...

    def status(self, session: HostSession) -> ServiceStatus: ...

    def logs(self, session: HostSession, lines: int = 50) -> str:
        """The last lines the service wrote, without secrets: they are kept in checkpoints."""
        ...


def start(driver: ServiceDriver, session: HostSession) -> None:
    session.do(driver.starting(session.host), timeout=_limit(driver))


def stop(driver: ServiceDriver, session: HostSession) -> None:
    session.do(driver.stopping(session.host), timeout=_limit(driver))


def restart(driver: ServiceDriver, session: HostSession) -> None:
    session.do(driver.restarting(session.host), timeout=_limit(driver))


def wait_ready(
    driver: ServiceDriver, session: HostSession, port: int, path: str = "/health", timeout: float = 300.0
) -> float:
    """Seconds until a GET from the host itself answered 200; ServiceError with the last log lines when it does not in time."""
    try:
        return float(session.do(waiting(driver, port, path, timeout), timeout=timeout + 30)[0]["seconds"])
    except ServiceError as fault:
        tail = driver.logs(session, 15).strip()
        raise ServiceError(
            fault.message, hint=f"Its last lines:\n{tail}" if tail else fault.hint, host=session.host.name
        ) from None


def waiting(driver: ServiceDriver, port: int, path: str = "/health", timeout: float = 300.0) -> Operation:
    return op("wait_ready", port=port, path=path, timeout=timeout, driver=driver.name)


def _limit(driver: ServiceDriver) -> float:
    return driver.drain + 60


@dataclass(frozen=True)
class ProcessDriver:
    """A plain process group: no root, no systemd. It does not start at boot; the next `start` does what the lease asks for."""

    drain: float = DRAIN_SECONDS
    name: str = "process"

    def starting(self, host: Host) -> Operation:
        return op("service", action="start")

    def stopping(self, host: Host) -> Operation:
        return op("service", action="stop", number=self.drain)

    def restarting(self, host: Host) -> Operation:
        return op("service", action="restart", number=self.drain)

    def restart_argv(self, host: Host) -> list[str]:
        return self._script(host, "restart")

    def stop_argv(self, host: Host) -> list[str]:
        return self._script(host, "stop")

    def status(self, session: HostSession) -> ServiceStatus:
        found = session.do(op("service", action="status"))[0]
        return ServiceStatus(found["running"], found["pid"], "running" if found["running"] else "stopped")

    def logs(self, session: HostSession, lines: int = 50) -> str:
        return without_secrets(str(session.do(op("service", action="logs", number=lines))[0]["text"]))

    def _script(self, host: Host, action: str) -> list[str]:
        return [host.python, "-E", "-s", "-S", script(host.root, "process.py"), action, host.root, f"{self.drain:g}"]


@dataclass(frozen=True)
class SystemdDriver:
    """A systemd unit whose ExecStart is `unit_text`'s. `user` talks to the user's own manager."""

    unit: str
    user: bool = False
    drain: float = DRAIN_SECONDS
    name: str = "systemd"

    def _systemctl(self, *arguments: str) -> list[str]:
        return ["systemctl", *(["--user"] if self.user else []), *arguments]

    def starting(self, host: Host) -> Operation:
        return self._command("start")

    def stopping(self, host: Host) -> Operation:
        return self._command("stop")

    def restarting(self, host: Host) -> Operation:
        return self._command("restart")

    def _command(self, action: str) -> Operation:
        return op("command", argv=self._systemctl(action, self.unit), timeout=self.drain + 30)

    def restart_argv(self, host: Host) -> list[str]:
        return self._systemctl("restart", self.unit)

    def stop_argv(self, host: Host) -> list[str]:
        return self._systemctl("stop", self.unit)

    def status(self, session: HostSession) -> ServiceStatus:
        argv = self._systemctl("show", self.unit, "--property=ActiveState,SubState,MainPID,LoadState")
        found = dict(line.split("=", 1) for line in _out(session, argv).splitlines() if "=" in line)
        if found.get("LoadState") == "not-found":
            raise ServiceError(
                f"there is no unit {self.unit}.",
                hint="Install it (`SystemdDriver.unit_text` shows one).",
                host=session.host.name,
            )
        detail = f"{found.get('ActiveState', '?')} ({found.get('SubState', '?')})"
        return ServiceStatus(found.get("ActiveState") == "active", int(found.get("MainPID") or 0), detail)

    def logs(self, session: HostSession, lines: int = 50) -> str:
        argv = [
            "journalctl",
            *(["--user"] if self.user else []),
            "--unit",
            self.unit,
            "--lines",
            str(lines),
            "--no-pager",
            "--output",
            "short-iso",
        ]
        return without_secrets(_out(session, argv))

    def unit_text(self, host: Host) -> str:
        """A unit that starts `current` through the lease guard, so that a reboot never starts an unconfirmed release."""
        argv = [_absolute(host.python), "-E", "-s", "-S", script(host.root, "guard.py"), "exec", host.root]
        start = " ".join(map(_systemd_word, argv))
        return (
            f"[Unit]\nDescription=phasegate worker {host.name}\nAfter=network-online.target\n\n"
            f"[Service]\nExecStart={start}\nKillMode=mixed\nTimeoutStopSec={self.drain:g}\nRestart=on-failure\n\n"
            "[Install]\nWantedBy=multi-user.target\n"
        )


@dataclass(frozen=True)
class DockerDriver:
    """An existing container whose command runs `guard.py exec ROOT` with the root mounted at the same path."""

    container: str
    drain: float = DRAIN_SECONDS
    name: str = "docker"

    def starting(self, host: Host) -> Operation:
        return self._command(["docker", "start", self.container])

    def stopping(self, host: Host) -> Operation:
        return self._command(self.stop_argv(host))

    def restarting(self, host: Host) -> Operation:
        return self._command(self.restart_argv(host))

    def _command(self, argv: Sequence[str]) -> Operation:
        return op("command", argv=list(argv), timeout=self.drain + 30)

    def restart_argv(self, host: Host) -> list[str]:
        return ["docker", "restart", "--time", f"{self.drain:.0f}", self.container]

    def stop_argv(self, host: Host) -> list[str]:
        return ["docker", "stop", "--time", f"{self.drain:.0f}", self.container]

    def status(self, session: HostSession) -> ServiceStatus:
        state: dict[str, Any] = json.loads(
            _out(session, ["docker", "inspect", "--format", "{{json .State}}", self.container])
        )
        detail = state["Status"] if state["Running"] else f"{state['Status']} ({state['ExitCode']})"
        return ServiceStatus(bool(state["Running"]), int(state["Pid"]), detail)

    def logs(self, session: HostSession, lines: int = 50) -> str:
        done = session.do(op("command", argv=["docker", "logs", "--tail", str(lines), self.container], timeout=30))[0]
        return without_secrets(str(done["out"] + done["err"]))


def _out(session: HostSession, argv: list[str]) -> str:
    return str(session.do(op("command", argv=argv, timeout=30))[0]["out"])


def _absolute(python: str) -> str:
    return python if python.startswith("/") else f"/usr/bin/{python}"


def _systemd_word(text: str) -> str:
    """One argument of ExecStart: `%` and `$` stand for themselves, and blanks do not end it (systemd.service, COMMAND LINES)."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(char in text for char in " \t;'\"\\") else escaped
