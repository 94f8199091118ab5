"""The cure that is told fits the cause: errno, exit status and ssh's own reason decide, and a full disk is no network."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phases.base.errors import FleetError
from phases.engines.ssh.causes import not_connected
from phases.engines.ssh.errors import DiskFullError, LoginError, UnreachableError
from phases.engines.ssh.host import Host, Timeouts
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.stream import run
from phases.engines.ssh.transport import connect
from tests.engines.ssh.sshfleet import SshFleet, free_port
from tests.engines.ssh.worker import eventually


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """File systems of their own in memory, mounted with the given options."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mounted-{len(places)}"
        place.mkdir(exist_ok=True)
        argv = ["mount", "-t", "tmpfs", "-o", options, "phasegate-test", str(place)]
        if os.geteuid() != 0 or subprocess.run(argv, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


def refused(host: Host) -> FleetError:
    with pytest.raises(FleetError) as raised, HostSession(connect(host)) as session:
        HostLock(session, "test").acquire()
    assert raised.value.host == host.name and "network" not in str(raised.value)
    return raised.value


@pytest.mark.fleet
@pytest.mark.parametrize(("options", "inodes"), [("size=64k", False), ("size=4m,nr_inodes=4", True)])
def test_a_full_disk_before_the_scripts_are_there(
    local: Host, mounted: Callable[[str], Path], options: str, inodes: bool
) -> None:
    root = mounted(options)
    fault = refused(dataclasses.replace(local, root=str(root)))
    assert isinstance(fault, DiskFullError) and "ENOSPC" in fault.message
    assert "df -h" in fault.hint and "df -i" in fault.hint and str(root) in str(fault)


@pytest.mark.fleet
def test_a_disk_that_fills_up_later(local: Host, mounted: Callable[[str], Path]) -> None:
    root = mounted("size=4m")
    host = dataclasses.replace(local, root=str(root))
    with HostSession(connect(host)) as session:
        session.do(op("facts"))
        with open(root / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(bytes(4096))
        with pytest.raises(DiskFullError, match="ENOSPC.*df -h"):
            HostLock(session, "test").acquire()
    assert isinstance(refused(host), DiskFullError)


@pytest.mark.fleet
def test_a_root_mounted_read_only(local: Host, mounted: Callable[[str], Path]) -> None:
    fault = refused(dataclasses.replace(local, root=str(mounted("ro"))))
    assert "EROFS" in fault.message and "mounted read-only" in fault.hint and "dmesg" in fault.hint
    root = mounted("size=4m")
    host = dataclasses.replace(local, root=str(root))
    HostSession(connect(host)).do(op("facts"))  # the scripts are there before the disk gets its errors
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    assert "mounted read-only" in refused(host).hint


@pytest.mark.fleet
@pytest.mark.parametrize(
    ("make", "name", "told"),
    [
        (lambda root: root.write_text("a file"), "ENOTDIR|EEXIST", "in the way"),
        (lambda root: root.symlink_to(root), "ELOOP|EEXIST", "in the way|points to itself"),
    ],
)
def test_something_in_the_way_of_the_root(local: Host, make: Callable[[Path], object], name: str, told: str) -> None:
    make(Path(local.root))
    fault = refused(local)
    assert re.search(name, fault.message) and re.search(told, fault.hint), str(fault)


@pytest.mark.fleet
def test_a_root_with_too_long_a_name(local: Host) -> None:
    fault = refused(dataclasses.replace(local, root=f"{local.root}/{'x' * 300}"))
    assert "ENAMETOOLONG" in fault.message and "shorter" in fault.hint


@pytest.mark.fleet
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_directory_of_somebody_else(local: Host, tmp_path: Path) -> None:
    subprocess.run(["chattr", "+i", str(tmp_path)], check=False, capture_output=True)
    try:
        (tmp_path / "probe").touch()
    except OSError:
        fault = refused(local)
        assert "EPERM" in fault.message and "lsattr" in fault.hint
    else:
        pytest.skip("this file system has no immutable directories")
    finally:
        subprocess.run(["chattr", "-i", str(tmp_path)], check=False, capture_output=True)


@pytest.mark.fleet
def test_no_further_files(local: Host) -> None:
    """A host's own limits are told as such: here on open files, which the agent meets at its first lock."""
    host = dataclasses.replace(local, python="/usr/bin/python3")
    with HostSession(connect(host)) as session:
        session.do(op("facts"))
        agent = session._stream._process.pid  # the local transport's own process: prlimit needs its number
        subprocess.run(["prlimit", "--pid", str(agent), "--nofile=4:4"], check=True)
        with pytest.raises(FleetError, match="EMFILE.*ulimit -n"):
            HostLock(session, "test").acquire()


@pytest.mark.fleet
def test_a_python_2(local: Host, tmp_path: Path) -> None:
    """A stand-in says it is Python 2: the language has left the distributions, hosts have not left it."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nexec /usr/bin/python3 -c "import sys; sys.version_info = (2, 7, 18); sys.argv = sys.argv[4:]; exec(sys.argv.pop(1))" '
        '"$@"\n'
    )
    python.chmod(0o755)
    with pytest.raises(FleetError, match=r"Python 2\.7.*Python 3\.8 or newer"):
        HostSession(connect(dataclasses.replace(local, python=str(python)))).do(op("hello"))


# ---- ssh's own reason


@pytest.fixture
def server(sshd: SshFleet) -> Iterator[Callable[[str], Host]]:
    """The last sshd with further lines in its configuration."""
    machine = sshd.hosts[3]

    def make(config: str) -> Host:
        machine.config = config
        sshd.restart(machine)
        return sshd.host(3, timeouts=Timeouts(connect=15, channel=15, command=15))

    yield make
    machine.config = ""
    sshd.restart(machine)


def told(host: Host, kind: type[FleetError] = UnreachableError) -> str:
    transport = connect(host)
    with pytest.raises(kind) as raised:
        run(transport, ["true"])
    transport.close()
    assert raised.value.host == host.name and "the network" not in raised.value.hint
    return str(raised.value)


@pytest.mark.parametrize(
    ("config", "theirs", "setting"),
    [
        ("Ciphers chacha20-poly1305@openssh.com\n", "no cipher in common: it has chacha20", "Ciphers"),
        (
            "KexAlgorithms sntrup761x25519-sha512@openssh.com\n",
            "no key exchange in common: it has sntrup",
            "KexAlgorithms",
        ),
        ("MACs umac-64-etm@openssh.com\n", "no MAC in common: it has umac-64", "MACs"),
    ],
)
def test_algorithms_both_do_not_share_are_listed(
    server: Callable[[str], Host], config: str, theirs: str, setting: str
) -> None:
    text = told(server(config))
    assert theirs in text and f"Allow one of these in {setting} of sshd_config" in text and "here there are" in text


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("PubkeyAuthentication no\nPasswordAuthentication yes\n", "takes no keys, only .*PubkeyAuthentication yes"),
        ("DenyUsers *\n", "refuses the login: .*: refused"),
        ("AuthenticationMethods publickey,publickey\n", "wants publickey besides.*second factor"),
        ("MaxAuthTries 0\n", "hung up: .*Too many authentication failures"),
    ],
)
def test_a_login_that_is_refused_says_what_was_tried(server: Callable[[str], Host], config: str, says: str) -> None:
    assert re.search(says, told(server(config), LoginError))


def test_a_host_that_takes_no_sessions(server: Callable[[str], Host]) -> None:
    assert "MaxSessions" in told(server("MaxSessions 0\n"))


def test_a_bastion_that_does_not_forward_and_one_that_cannot_reach_the_host(
    sshd: SshFleet, server: Callable[[str], Host], remote: Host
) -> None:
    bastion = server("AllowTcpForwarding no\n")
    ssh = dataclasses.replace(remote.ssh, gateway=f"{remote.ssh.user}@{bastion.address}:{bastion.ssh.port}")
    assert "AllowTcpForwarding yes" in told(dataclasses.replace(remote, ssh=ssh))
    server("")
    nobody = dataclasses.replace(remote, address="127.0.0.1", ssh=dataclasses.replace(ssh, port=free_port()))
    assert "From the bastion the host is not to be reached" in told(nobody)


def test_an_sshd_that_takes_no_more_logins_at_once(sshd: SshFleet, server: Callable[[str], Host]) -> None:
    sshd.hosts[3].config = "MaxStartups 1:100:1\n"
    sshd.restart(sshd.hosts[3])
    host = sshd.host(3, timeouts=Timeouts(connect=15))
    with contextlib.ExitStack() as held:

        def first_login() -> bool:
            """The one that may be under way: there is none before the connection that looked for the server is over."""
            first = held.enter_context(socket.create_connection((host.address, host.ssh.port), 15))
            return first.recv(3) == b"SSH"

        eventually(first_login)
        text = told(host)
    assert "MaxStartups" in text and "at_once" in text
    server("")


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not ssh: it says 'HTTP/1.1 400 Bad Request.*Is the port right"),
        (b"", "hung up without a word.*see sshd's log there"),
        (b"Not allowed at this time\r\n", "hung up, saying 'Not allowed at this time'.*PerSourcePenalties"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "hung up without a word"),
    ],
)
def test_what_answers_is_told(remote: Host, says: bytes, expected: str) -> None:
    """A server that says this and hangs up, as real ones do that are no sshd, or full."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    with peer:
                        peer.sendall(says)
                        peer.shutdown(socket.SHUT_WR)
                        while peer.recv(4096):
                            pass

        threading.Thread(target=answer, daemon=True).start()
        ssh = dataclasses.replace(remote.ssh, port=server.getsockname()[1])
        host = dataclasses.replace(remote, address="127.0.0.1", ssh=ssh, timeouts=Timeouts(connect=10))
        assert re.search(expected, told(host))


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENETUNREACH, "no way to it from here"),
        (errno.EHOSTUNREACH, "no way to it from here"),
        (errno.ECONNREFUSED, "Is sshd running"),
        (errno.EMFILE, "This machine has too many open files"),
        (errno.EADDRNOTAVAIL, "BindAddress"),
        (errno.EPERM, "This machine forbids it"),
    ],
)
def test_an_errno_of_this_machine_has_its_cure(number: int, cure: str) -> None:
    fault = not_connected(Host("h", "h", "/h"), "me@h:22", OSError(number, os.strerror(number)), None, "")
    assert cure in fault.hint and os.strerror(number) in fault.message


def test_a_bug_of_the_library_is_no_network() -> None:
    fault = not_connected(Host("h", "h", "/h"), "me@h:22", AttributeError("public_blob"), None, "")
    assert "AttributeError: public_blob" in fault.message and "network" not in fault.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_limit_on_open_files_of_this_machine(remote: Host) -> None:
    """For real: a toolkit that may open no further file."""
    program = (
        "import pickle, resource, sys\n"
        "from phases.engines.ssh.transport import connect\n"
        "from phases.engines.ssh.stream import run\n"
        "host = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "transport = connect(host)\n"
        "run(transport, ['true']); transport.close()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "try: run(transport, ['true'])\n"
        "except Exception as fault: print(type(fault).__name__, fault)\n"
    )
    argv = [sys.executable, "-c", program, pickle.dumps(remote).hex()]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "too many open files" in shown.lower() and "ulimit -n" in shown, shown
