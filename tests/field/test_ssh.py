"""ssh, Fabric and their like as they failed others, against real sshd, real agents and real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest

from phases.base.errors import FleetError
from phases.engines.ssh.deploy import push
from phases.engines.ssh.errors import LoginError
from phases.engines.ssh.exits import exit_error
from phases.engines.ssh.host import Host, SshOptions, Timeouts
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.stream import run
from phases.engines.ssh.transport import connect
from tests.engines.ssh.conftest import local, remote, service_bundle, sshd  # noqa: F401 - fixtures
from tests.engines.ssh.sshfleet import SSHD, SshFleet

needs_sshd = pytest.mark.skipif(not SSHD, reason="sshd is not installed (package openssh-server)")
pytestmark = [pytest.mark.fleet, pytest.mark.slow]


@needs_sshd
def test_a_proxy_command_that_is_killed_ends_the_connection_and_costs_no_processor(
    sshd: SshFleet,  # noqa: F811
    remote: Host,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The library read from it for ever, at the whole of a core."""
    program = (
        "import os, socket, sys, threading\n"
        "peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def forth():\n"
        "    while data := os.read(0, 65536): peer.sendall(data)\n"
        "threading.Thread(target=forth, daemon=True).start()\n"
        "while data := peer.recv(65536): os.write(1, data)\n"
    )
    (tmp_path / "proxy.py").write_text(program)
    config = tmp_path / "config"
    config.write_text(
        f"Host worker\n  HostName {remote.address}\n  Port {remote.ssh.port}\n  IdentityFile {sshd.key}\n"
        f"  ProxyCommand {sys.executable} {tmp_path}/proxy.py %h %p\n"
    )
    ssh = SshOptions(user=remote.ssh.user, known_hosts=(sshd.known_hosts,), agent=False, config_file=config)
    host = dataclasses.replace(remote, address="worker", ssh=ssh, timeouts=Timeouts(connect=20, channel=20, command=20))
    session = HostSession(connect(host))
    session.do(op("facts"))
    os.kill(session.transport._route.hops[0].proxy._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    begun = time.process_time()
    time.sleep(1.5)
    assert time.process_time() - begun < 0.75  # seconds of processor time, not of the clock
    assert session.do(op("facts"))[0]["python"], "and the next request makes the connection anew"
    session.close()


class _Open(paramiko.ServerInterface):
    """Lets anybody in without a key, as Tailscale's ssh does for who comes from its network."""

    def check_auth_none(self, username: str) -> int:
        return int(paramiko.AUTH_SUCCESSFUL)

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.OPEN_SUCCEEDED)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        def answer() -> None:
            while channel.recv(100):  # its input ends only after the request was granted
                pass
            channel.sendall(b"ok\n")
            channel.send_exit_status(0)
            channel.close()

        threading.Thread(target=answer, daemon=True).start()
        return True


def test_a_host_that_lets_in_without_a_key(tmp_path: Path) -> None:
    """The library never asks, and ends with "no authentication methods available". The server is a stand-in for Tailscale's."""
    key = paramiko.ECDSAKey.generate()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            peer, _ = server.accept()
            held.append(paramiko.Transport(peer))
            held[0].add_server_key(key)
            held[0].start_server(server=_Open())

        held: list[paramiko.Transport] = []
        threading.Thread(target=serve, daemon=True).start()
        known = tmp_path / "known_hosts"
        known.write_text(f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n")
        options = SshOptions(user="me", port=port, known_hosts=(known,), agent=False, config_file=Path("/dev/null"))
        transport = connect(Host("h", "127.0.0.1", "/r", ssh=options, timeouts=Timeouts(connect=20)))
        assert run(transport, ["true"]).out == "ok\n"
        transport.close()
        held[0].close()


def test_more_files_open_than_select_can_take(local: Host) -> None:  # noqa: F811
    """A run on a thousand hosts has more than 1024 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("this user may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    try:
        with contextlib.ExitStack() as held:
            for _ in range(1100):
                held.enter_context(open(os.devnull))
            with HostSession(connect(local)) as session:
                HostLock(session, "test").acquire()
                assert session.do(op("command", argv=["printf", "%300000s", "x"], timeout=20))[0]["code"] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_host_whose_locale_knows_no_such_letters(local: Host, tmp_path: Path) -> None:  # noqa: F811
    """Without UTF-8 the scripts could not be written there, and what commands say could not be read."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nexport LC_ALL=C\nexec /usr/bin/python3 -X utf8=0 "$@"\n')
    python.chmod(0o755)
    with HostSession(connect(dataclasses.replace(local, python=str(python)))) as session:
        assert session.do(op("facts"))[0]["os"]
        said = session.do(op("command", argv=["printf", "gr\\303\\274n \\377"], timeout=20))[0]["out"]
        assert said == "grün \ufffd"
        HostLock(session, "Prüfung").acquire()
        assert session.do(op("lock.show"))[0]["purpose"] == "Prüfung"
        first = session.greeting
    with HostSession(connect(dataclasses.replace(local, python=str(python)))) as again:
        again.do(op("facts"))
        assert first["boot"] == again.greeting["boot"]
    assert len([path for path in Path(local.root, "bin").iterdir() if path.is_dir() and not path.is_symlink()]) == 1
    with pytest.raises(FleetError, match="locale there has no UTF-8.*LANG=C.UTF-8"):
        HostSession(connect(dataclasses.replace(local, root=f"{local.root}-ü", python=str(python)))).do(op("hello"))
    with HostSession(connect(dataclasses.replace(local, root=f"{local.root}-ü"))) as session:
        assert session.do(op("facts"))[0]["python"] and Path(f"{local.root}-ü", "run").is_dir()


def key(directory: Path, name: str, *options: str) -> Path:
    path = directory / name
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-C", name, *options, "-f", str(path)], check=True)
    return path


@pytest.fixture
def authority(sshd: SshFleet, tmp_path: Path) -> Iterator[Path]:  # noqa: F811
    """An authority for users that the first sshd trusts; its own keys no longer count there."""
    machine = sshd.hosts[0]
    path = key(tmp_path, "authority", "-t", "ed25519")
    machine.config = f"TrustedUserCAKeys {path}.pub\nAuthorizedKeysFile {tmp_path}/authorized\n"
    sshd.restart(machine)
    yield path
    machine.config = ""
    sshd.restart(machine)


def reached(host: Host) -> bool:
    transport = connect(host)
    try:
        return run(transport, ["echo", "ok"]).out == "ok\n"
    finally:
        transport.close()


@needs_sshd
@pytest.mark.parametrize(
    "kind", [("-t", "rsa"), ("-t", "rsa", "-m", "PEM"), ("-t", "ecdsa"), ("-t", "ed25519")], ids=" ".join
)
def test_keys_and_certificates_of_each_kind_from_files_and_from_an_agent(
    authority: Path,
    remote: Host,  # noqa: F811
    tmp_path: Path,
    kind: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RSA keys were offered with SHA-1, which sshd has refused since 8.8; certificates were not offered at all."""
    mine = key(tmp_path, "mine", *kind)
    (tmp_path / "authorized").write_text(Path(f"{mine}.pub").read_text())

    def with_keys(*paths: Path, agent: bool = False) -> Host:
        return dataclasses.replace(remote, ssh=dataclasses.replace(remote.ssh, key_files=paths, agent=agent))

    assert reached(with_keys(mine))
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        add = f"for i in 1 2 3 4 5 6 7 8 9; do ssh-add -q {mine} && exit 0; sleep 0.2; done; exit 1"
        subprocess.run(["sh", "-c", add], check=True, env={**os.environ, "SSH_AUTH_SOCK": str(path)})
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        assert reached(with_keys(agent=True))
        (tmp_path / "authorized").write_text("")
        with pytest.raises(LoginError):
            reached(with_keys(mine, agent=True))
        sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", str(remote.ssh.user), f"{mine}.pub"]
        subprocess.run(sign, check=True, capture_output=True)
        assert reached(with_keys(mine)), "the certificate beside the key"
        subprocess.run(["ssh-add", "-q", str(mine)], check=True, env={**os.environ, "SSH_AUTH_SOCK": str(path)})
        certificate = Path(f"{mine}-cert.pub").rename(tmp_path / "elsewhere.pub")
        assert reached(with_keys(agent=True)), "the certificate that the agent holds"
        config = tmp_path / "config"
        config.write_text(f"Host *\n  IdentityFile {mine}\n  CertificateFile {certificate}\n")
        monkeypatch.delenv("SSH_AUTH_SOCK")
        ssh = dataclasses.replace(remote.ssh, key_files=(), config_file=config)
        assert reached(dataclasses.replace(remote, ssh=ssh)), "the certificate that the configuration names"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(
    ("code", "said", "cure"),
    [
        (1, "sudo: sorry, you must have a tty to run sudo", "requiretty"),
        (1, "sudo: a password is required", "NOPASSWD"),
        (1, "sudo: a terminal is required to read the password; either use the -S option", "NOPASSWD"),
        (1, "Sorry, user me is not allowed to execute '/usr/bin/python3' as serving on h.", "NOPASSWD"),
        (1, "sudo: unknown user: serving", "Check `sudo: serving`"),
        (1, "sudo: account validation failure, is your account locked?", "Check `sudo: serving`"),
        (127, "bash: line 1: sudo: command not found", "sudo is not installed"),
        (127, "bash: line 1: /usr/bin/env python3: No such file or directory", "one path, without arguments"),
        (1, "Password change required but no TTY available.", "chage"),
        (254, "bash: fork: retry: Resource temporarily unavailable", "ulimit -u"),
        (127, "python3: error while loading shared libraries: libpython3.11.so.1.0: cannot open", "lacks a library"),
        (137, "Killed", "out of memory"),
        (126, "bash: /opt/python: Permission denied", "noexec"),
    ],
)
def test_why_the_agent_did_not_start_is_told_from_its_end(code: int, said: str, cure: str) -> None:
    python = "/usr/bin/env python3" if "env" in said else "python3"
    fault: FleetError = exit_error(Host("h", "h", "/r", python=python, sudo="serving"), code, said)
    assert cure in fault.hint and said in fault.message and "network" not in fault.hint


@pytest.fixture
def server(sshd: SshFleet, remote: Host) -> Iterator[Callable[[str], Host]]:  # noqa: F811
    """The first sshd with further lines in its configuration."""
    machine = sshd.hosts[0]

    def make(config: str) -> Host:
        machine.config = config
        sshd.restart(machine)
        return remote

    yield make
    machine.config = ""
    sshd.restart(machine)


@needs_sshd
def test_keys_that_are_exchanged_anew_in_the_middle_of_an_upload(server: Callable[[str], Host]) -> None:
    with HostSession(connect(server("RekeyLimit 1M\n"))) as session:
        bundle = service_bundle(12_000_000)
        assert push(session, HostLock(session, "test"), bundle).sent == bundle.size


@needs_sshd
def test_one_session_a_connection_is_enough(server: Callable[[str], Host]) -> None:
    host = server("MaxSessions 1\n")
    with HostSession(connect(host)) as session:
        HostLock(session, "test").acquire()
        with session.fresh() as second:  # what a lease's confirmation comes over
            assert second.do(op("facts"))[0]["python"]
        assert session.do(op("lock.show"))[0]["purpose"] == "test"


@needs_sshd
@pytest.mark.parametrize(
    "environment",
    [
        "PYTHONHOME=/nowhere PYTHONPATH=/nowhere PYTHONINSPECT=1 PYTHONDONTWRITEBYTECODE=x PYTHONIOENCODING=nonsense PYTHONWARNINGS=error",
        "LC_ALL=no_SUCH.locale LANG=no_SUCH LANGUAGE=de",
        "LD_PRELOAD=/nowhere/at/all.so",
        "BASH_ENV=/etc/passwd ENV=/etc/passwd SHELLOPTS=xtrace TMPDIR=/nowhere HOME=/nowhere",
    ],
)
def test_an_environment_that_means_it_badly(server: Callable[[str], Host], environment: str) -> None:
    with HostSession(connect(server(f"SetEnv {environment}\n"))) as session:
        assert session.do(op("facts"))[0]["python"]
        HostLock(session, "test").acquire()


@needs_sshd
def test_files_in_the_directory_one_logs_in_to_are_not_imported(
    sshd: SshFleet,  # noqa: F811
    remote: Host,  # noqa: F811
    tmp_path: Path,
) -> None:
    for name in ("json", "base64", "hashlib", "subprocess", "select", "tty", "audit", "agent"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('somebody else is imported')\n")
    (sshd.home / ".bashrc").write_text(f"cd {tmp_path}\n")
    try:
        with HostSession(connect(remote)) as session:
            where = session.do(op("command", argv=["sh", "-c", "readlink /proc/$PPID/cwd"], timeout=20))[0][
                "out"
            ].strip()
            assert where == str(tmp_path), "the test is about what lies there"
            HostLock(session, "test").acquire()
    finally:
        (sshd.home / ".bashrc").unlink()
