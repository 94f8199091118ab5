"""Where the servers of Phase 2 run: an interface that this machine implements here and a remote host can elsewhere.

A started server lives in a session of its own and outlives this process, so that a killed run can be resumed and its
servers found again: by process id together with the start time the system keeps for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from phases.base.errors import ServingError
from phases.base.files import write_json
from phases.base.redaction import without_secrets
from phases.engines.ssh.bundle import Bundle
from phases.serving.address import WorkerAddress

TERM_SECONDS = 15.0
LINE_LENGTH = 400  # SGLang logs its whole configuration as one line
PORTS = (15000, 32000)  # Linux takes those of outgoing connections from 32768 on
DRAW = random.SystemRandom()


@dataclass(frozen=True)
class Done:
    """A finished program."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Server:
    """A started server; plain JSON with `asdict`."""

    name: str
    pid: int  # leader of its own process group
    started: str  # start time as the system keeps it: a reused pid has another
    port: int
    log: str
    facts: str  # directory of its fact files
    url: str


class ServingHost(Protocol):
    """A machine that can run servers. Paths are of that machine."""

    root: Path

    def run(self, argv: Sequence[str], environment: Mapping[str, str], timeout: float) -> Done: ...

    def install(self, bundle: Bundle) -> Path: ...

    def free_port(self) -> int: ...

    def port_taken(self, port: int) -> bool: ...

    def start(self, name: str, argv: Sequence[str], environment: Mapping[str, str], port: int) -> Server: ...

    def alive(self, server: Server) -> bool: ...

    def exit_code(self, server: Server) -> int | None: ...

    def stop(self, server: Server) -> None: ...

    def left_running(self) -> list[Server]: ...

    def log_lines(self, server: Server) -> list[str]: ...

    def read_facts(self, server: Server) -> list[dict]: ...


class LocalHost:
    """This machine. `root` holds releases, logs, fact files and a record of what was started."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def run(self, argv: Sequence[str], environment: Mapping[str, str], timeout: float) -> Done:
        """Run a program to its end; a time-out or a missing program is a ServingError."""
        try:
            done = subprocess.run(
                list(argv),
                env=_environment(environment),
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise ServingError(f"{argv[0]} did not end within {timeout:g} s.", hint="See what it waits for.") from None
        except OSError as fault:
            raise ServingError(
                f"cannot run {argv[0]}: {fault.strerror}.", hint="Check `server.python` in the playbook."
            ) from None
        return Done(done.returncode, done.stdout, done.stderr)

    def install(self, bundle: Bundle) -> Path:
        """Write a release below root/releases, complete or not at all; its directory. Installed again it costs nothing."""
        target = self.root / "releases" / bundle.digest
        if (target / ".complete").exists():
            return target
        partial = target.with_name(f".{bundle.digest}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file in bundle.files:
            path = partial / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            data = file.source if isinstance(file.source, bytes) else file.source.read_bytes()
            path.write_bytes(data)
            if file.executable:
                path.chmod(0o755)
        (partial / "manifest.json").write_text(bundle.manifest)
        (partial / ".complete").touch()
        os.replace(partial, target)
        return target

    def free_port(self) -> int:
        """Below the range outgoing connections take theirs from: a server binds its port many seconds after this, and would find it taken."""
        while True:
            port = DRAW.randrange(*PORTS)
            if not self.port_taken(port):
                return port

    def port_taken(self, port: int) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return True
        return False

    def start(self, name: str, argv: Sequence[str], environment: Mapping[str, str], port: int) -> Server:
        """Start a server in the background. `{facts}` in values of `environment` becomes its fact directory.

        Raises:
            ServingError: the program cannot be started.
        """
        home = self.root / "servers" / name
        shutil.rmtree(home / "facts", ignore_errors=True)
        home.mkdir(parents=True, exist_ok=True)
        facts, log = home / "facts", home / "server.log"
        filled = {key: value.replace("{facts}", str(facts)) for key, value in environment.items()}
        with log.open("wb") as output:
            try:
                child = subprocess.Popen(
                    list(argv),
                    env=_environment(filled),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=home,
                )
            except OSError as fault:
                raise ServingError(
                    f"cannot start {argv[0]}: {fault.strerror}.", hint="Check `server.python` in the playbook."
                ) from None
        self._children[child.pid] = child
        server = Server(
            name, child.pid, _start_time(child.pid), port, str(log), str(facts), WorkerAddress.of("127.0.0.1", port).url
        )
        try:
            write_json(home / "server.json", asdict(server))
        except OSError as fault:
            self.stop(server)  # nobody would find it again
            raise ServingError(f"{name} cannot be recorded: {fault.strerror}.", hint=f"See to {home}.") from None
        return server

    def alive(self, server: Server) -> bool:
        child = self._children.get(server.pid)
        if child is not None and child.poll() is not None:
            return False
        return bool(server.started) and _start_time(server.pid) == server.started

    def exit_code(self, server: Server) -> int | None:
        """Exit status, negative for a signal; None while it runs or when another process started it."""
        child = self._children.get(server.pid)
        return child.poll() if child else None

    def stop(self, server: Server) -> None:
        """End the server and every process of its session. Safe to repeat.

        Raises:
            ServingError: processes are left that cannot be ended.
        """
        if self.alive(server):
            _signal(server.pid, signal.SIGTERM)
            self._wait(server, TERM_SECONDS)
        left = _members(server)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._wait(server, TERM_SECONDS)
        left = _members(server)
        if left:
            raise ServingError(
                f"processes of server {server.name} are left: {', '.join(map(str, left))}.", hint="End them by hand."
            )
        (self.root / "servers" / server.name / "server.json").unlink(missing_ok=True)

    def left_running(self) -> list[Server]:
        """Servers started below this root and not stopped, by an earlier process too. ServingError where the record of one is damaged."""
        found = []
        for record in sorted((self.root / "servers").glob("*/server.json")):
            try:
                found.append(Server(**json.loads(record.read_text())))
            except (ValueError, TypeError):
                raise ServingError(
                    f"{record} is damaged.", hint="Look for that server, end it by hand, and remove the file."
                ) from None
        return found

    def log_lines(self, server: Server) -> list[str]:
        try:
            text = Path(server.log).read_text(errors="replace")
        except OSError:
            return []
        return [shown(line) for line in text.splitlines()]

    def read_facts(self, server: Server) -> list[dict]:
        """The fact files of its ranks, as the kernel's plugin wrote them."""
        found = []
        for path in sorted(Path(server.facts).glob("rank-*.json")):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
        return found

    def _wait(self, server: Server, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and (self.alive(server) or _members(server)):
            time.sleep(0.1)


def shown(line: str) -> str:
    """A log line as it may be kept: cut, and without what looks like a secret."""
    return without_secrets(line[:LINE_LENGTH])


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what would leak this toolkit's own Python into the server, plus `added`."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    if "PATH_PREFIX" in added:
        kept["PATH"] = f"{added['PATH_PREFIX']}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, **{key: value for key, value in added.items() if key != "PATH_PREFIX"}}


def _start_time(pid: int) -> str:
    """Field 22 of /proc/PID/stat, or "" when there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _members(server: Server) -> list[int]:
    """Live processes of the server's session."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # A session keeps its leader's pid; a reused pid cannot lead it, since the session still exists.
        if int(fields[3]) == server.pid and fields[0] not in ("Z", "X") and int(fields[19]) >= int(server.started or 0):
            found.append(int(entry.name))
    return found


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
