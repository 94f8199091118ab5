"""Real sshd instances for tests and benchmarks: own keys, own ports or network namespaces, an own home, nothing of the user's."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from phases.engines.ssh.host import Host, SshOptions, Timeouts
from phases.serving.host import PORTS

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
# The Python that plays the host's: a distribution's one if there is, since a version manager's shim is slow.
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable


_DRAW, _GIVEN = (
    random.SystemRandom(),
    set[int](),
)  # not the tests' seeded numbers: two runs on one machine must not meet


# A process may have several: a fixture for the session is another one in each module that imports it.
_FLEETS = itertools.count()


def free_port() -> int:
    """A port nobody listens on, below the range that outgoing connections take theirs from; never one that was given before."""
    while True:
        port = _DRAW.randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port


def can_make_namespaces() -> bool:
    """Whether network namespaces with addresses and a packet filter can be made here; tried, not guessed."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("iptables"):
        return False
    name = f"pgtry{os.getpid()}"
    try:
        _sh("ip", "netns", "add", name)
        _sh("ip", "link", "add", f"pgt{os.getpid()}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _sh(
            "ip",
            "netns",
            "exec",
            name,
            "iptables",
            "-A",
            "INPUT",
            "-m",
            "statistic",
            "--mode",
            "random",
            "--probability",
            "0.1",
            "-j",
            "DROP",
        )
        _sh("ip", "link", "add", f"pgb{os.getpid()}", "type", "bridge")
        return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"pgb{os.getpid()}"], capture_output=True, check=False)


def _sh(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@dataclass
class SshdHost:
    """One sshd and the host directory behind it."""

    name: str
    address: str
    port: int
    root: Path
    key: Path
    namespace: str = ""
    link: str = ""
    process: subprocess.Popen[bytes] | None = None
    host_key: Path = field(default_factory=Path)
    config: str = ""  # further lines of sshd_config; of most settings the first counts

    def in_namespace(self, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *argv] if self.namespace else list(argv)

    def cut(self) -> None:
        """Pull the cable."""
        _sh("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        _sh("ip", "link", "set", self.link, "up")

    def drop(self, share: float) -> None:
        """Lose this share of the packets that arrive."""
        _sh(
            *self.in_namespace(
                "iptables",
                "-I",
                "INPUT",
                "-m",
                "statistic",
                "--mode",
                "random",
                "--probability",
                f"{share:g}",
                "-j",
                "DROP",
            )
        )

    def undrop(self) -> None:
        _sh(*self.in_namespace("iptables", "-F", "INPUT"))

    def sshd_pids(self) -> list[int]:
        """The listening sshd and every session process below it (children first)."""
        assert self.process
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                todo += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [pid for pid in reversed(found) if _name(pid).startswith("sshd")]

    def signal(self, number: int) -> None:
        for pid in self.sshd_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class SshFleet:
    """Several sshd instances below one directory."""

    def __init__(self, directory: Path, count: int, *, namespaces: bool = False) -> None:
        self.directory, self.namespaces = directory, namespaces
        self.number = next(_FLEETS)
        self.home = directory / "home"
        self.home.mkdir(parents=True)
        self.key = directory / "client-key"
        _sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(self.key))
        self.known_hosts = directory / "known_hosts"
        self.hosts: list[SshdHost] = []
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)
        try:
            if namespaces:
                self._make_switch()
            for number in range(count):
                self.hosts.append(self._make(number))
            self.write_known_hosts()
            for host in self.hosts:
                self.start(host)
            for host in self.hosts:
                self._wait(host)
        except BaseException:
            self.close()
            raise

    def _make(self, number: int) -> SshdHost:
        name = f"h{number:02d}"
        root = self.directory / name / "worker"
        root.parent.mkdir()
        address, namespace, link = "127.0.0.1", "", ""
        if self.namespaces:
            mine = f"pg{os.getpid()}-{self.number}"
            namespace, link = f"{mine}-{number}", f"{mine}v{number}"
            address = f"{self.net}.{number + 2}"
            _sh("ip", "netns", "add", namespace)
            _sh("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _sh("ip", "link", "set", link, "master", self.switch, "up")
            _sh("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            _sh("ip", "-n", namespace, "link", "set", "eth0", "up")
            _sh("ip", "-n", namespace, "link", "set", "lo", "up")
        host = SshdHost(name, address, free_port(), root, self.key, namespace, link)
        self.new_host_key(host)
        return host

    def _make_switch(self) -> None:
        """A bridge that joins the hosts, named and numbered after process and fleet, so that two of them do not meet."""
        pid = os.getpid()
        self.switch = f"pgb{pid}-{self.number}"
        self.net = f"10.{150 + pid % 100}.{(pid // 100 + 83 * self.number) % 250}"
        _sh("ip", "link", "add", self.switch, "type", "bridge")
        _sh("ip", "addr", "add", f"{self.net}.1/24", "dev", self.switch)
        _sh("ip", "link", "set", self.switch, "up")

    def new_host_key(self, host: SshdHost) -> None:
        host.host_key = self.directory / host.name / f"host-key-{time.monotonic_ns()}"
        _sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", str(host.host_key))

    def write_known_hosts(self) -> None:
        lines = [f"[{host.address}]:{host.port} {host.host_key.with_suffix('.pub').read_text()}" for host in self.hosts]
        self.known_hosts.write_text("".join(lines))

    def start(self, host: SshdHost) -> None:
        config = self.directory / host.name / "sshd_config"
        config.write_text(
            f"MaxStartups 1000\n{host.config}Port {host.port}\nListenAddress {host.address}\nHostKey {host.host_key}\nAuthorizedKeysFile {self.key}.pub\n"
            "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\nPasswordAuthentication no\nUseDNS no\nPrintMotd no\n"
            f"MaxSessions 100\nSubsystem sftp internal-sftp\nSetEnv HOME={self.home} PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n"
        )
        assert SSHD
        argv = host.in_namespace(SSHD, "-D", "-f", str(config), "-E", str(self.directory / host.name / "sshd.log"))
        host.process = subprocess.Popen(argv, start_new_session=True, stdin=subprocess.DEVNULL)

    def _wait(self, host: SshdHost) -> None:
        until = time.monotonic() + 90
        while True:
            try:
                with socket.create_connection((host.address, host.port), 1) as probe:
                    probe.recv(10)
                    return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)

    def stop(self, host: SshdHost) -> None:
        """End the sshd and all its sessions, at once."""
        if host.process:
            host.signal(signal.SIGCONT)
            host.signal(signal.SIGKILL)
            host.process.wait(10)

    def restart(self, host: SshdHost) -> None:
        self.stop(host)
        self.start(host)
        self._wait(host)

    def host(self, number: int, *, timeouts: Timeouts | None = None, **changes: object) -> Host:
        """The toolkit's view of one of them."""
        sshd = self.hosts[number]
        ssh = SshOptions(
            user=_user(),
            port=sshd.port,
            key_files=(self.key,),
            known_hosts=(self.known_hosts,),
            agent=False,
            config_file=Path("/dev/null"),
        )
        options: dict[str, object] = {
            "root": str(sshd.root),
            "python": PYTHON,
            "ssh": ssh,
            "timeouts": timeouts or Timeouts(connect=30, channel=30, command=90),
        }
        return Host(name=sshd.name, address=sshd.address, **{**options, **changes})  # type: ignore[arg-type]

    def close(self) -> None:
        for host in self.hosts:
            with contextlib.suppress(Exception):
                end_processes_of(host.root)
            with contextlib.suppress(Exception):
                self.stop(host)
        for host in self.hosts:
            if host.namespace:
                inside = subprocess.run(
                    ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=False
                )
                for pid in inside.stdout.split():
                    with contextlib.suppress(OSError):
                        os.kill(int(pid), signal.SIGKILL)
                subprocess.run(["ip", "link", "del", host.link], capture_output=True, check=False)
                subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
        if self.namespaces:
            subprocess.run(["ip", "link", "del", self.switch], capture_output=True, check=False)


def end_processes_of(root: Path) -> None:
    """End what tests left running for this root: services and guards name it on their command line or in their environment."""
    mine = f"PHASEGATE_ROOT={root}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            named = str(root).encode() in (entry / "cmdline").read_bytes().split(b"\0")
            if named or mine in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name
