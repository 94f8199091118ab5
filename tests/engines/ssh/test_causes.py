"""The cure that is told fits the cause: errno, exit status and ssh's own reason decide, and a full disk is no network."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phases.base.errors import FleetError
from phases.engines.ssh.errors import DiskFullError
from phases.engines.ssh.host import Host
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.transport import connect


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
