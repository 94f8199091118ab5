"""The doctor over real hosts: one line for a sound one, one line with its cure for each problem."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

import pytest

from phases.base.findings import Finding, Health
from phases.engines.ssh import doctor
from phases.engines.ssh.doctor import Expected, HostReport, check_fleet, check_router, judge, look
from phases.engines.ssh.host import Host
from phases.engines.ssh.locks import HostLock, LockInfo
from phases.engines.ssh.releases import NEVER, Inventory, ReleaseStore
from phases.engines.ssh.services import ProcessDriver, ServiceStatus
from phases.engines.ssh.session import HostSession
from phases.engines.ssh.settings import (
    FleetSettings,
    HostSettings,
    RouterKind,
    RouterSettings,
    ServiceKind,
    ServiceSettings,
    SshSettings,
    TimeoutSettings,
)
from phases.engines.ssh.transport import connect
from tests.engines.ssh.conftest import service_bundle
from tests.engines.ssh.sshfleet import PYTHON, SshFleet, free_port

HOST = Host("w", "node", "/srv/w")
FACTS = {"python": "3.10.2", "free": 1 << 40, "gpus": [], "kills_user_processes": False}
SOUND = HostReport(
    FACTS,
    {"torch": "2.11.0", "sglang": "0.5.23"},
    Inventory((), (), NEVER, NEVER, None, 1 << 40),
    None,
    ServiceStatus(False),
    0.1,
    "",
)


def rows(report: HostReport, expected: Expected = Expected()) -> dict[str, Finding]:
    return {finding.name: finding for finding in judge(HOST, report, expected)}


def facts(**changes: object) -> HostReport:
    return dataclasses.replace(SOUND, facts={**FACTS, **changes})


def test_a_sound_host_has_no_problem() -> None:
    assert rows(SOUND) == {}


def test_disk_clock_python_and_logind() -> None:
    assert rows(facts(free=5 << 30))["disk"].health is Health.WARNING
    assert rows(facts(free=100 << 20))["disk"].health is Health.PROBLEM
    assert rows(facts(python="3.6.9"))["python"].cure
    assert "outlive the connection" in rows(facts(kills_user_processes=True))["lease guard"].cure
    assert rows(dataclasses.replace(SOUND, skew=-3.0))["clock"].found.startswith("-3.0 s")
    assert rows(dataclasses.replace(SOUND, skew=60.0))["clock"].health is Health.PROBLEM


@pytest.mark.parametrize(
    "built, capability, fits",
    [
        ("sm_90", "9.0", True),
        ("sm_90a", "9.0", True),
        ("sm_90a", "10.0", False),
        ("sm_100f", "10.3", True),
        ("sm_100a", "10.3", False),
        ("sm_120", "12.1", False),
    ],
)
def test_architecture_against_the_release(built: str, capability: str, fits: bool) -> None:
    report = facts(gpus=[{"name": "GPU", "driver": "580.1", "capability": capability}])
    found = rows(report, Expected(architectures=(built, "x86-64-v4")))
    assert ("architecture" not in found) is fits
    if not fits:
        assert f"Add sm_{capability.replace('.', '')}" in found["architecture"].cure


def test_gpus_and_drivers() -> None:
    assert (
        rows(facts(gpus="Failed to initialize NVML: Driver/library version mismatch"))["gpu"].health is Health.PROBLEM
    )
    two = [{"name": "G", "driver": driver, "capability": "9.0"} for driver in ("580.1", "590.2")]
    assert rows(facts(gpus=two))["driver"].found == "several: 580.1, 590.2"
    assert rows(SOUND, Expected(architectures=("sm_90",)))["gpu"].health is Health.WARNING


def test_versions_and_abi_against_the_release() -> None:
    built = Expected(torch="2.11.0+cu130", sglang="0.5.23", cxx11_abi=True)
    assert (
        rows(dataclasses.replace(SOUND, serving={"torch": "2.11.0+cpu", "sglang": "0.5.23", "cxx11_abi": True}), built)
        == {}
    )
    found = rows(dataclasses.replace(SOUND, serving={"torch": "2.9.1", "sglang": "0.5.22", "cxx11_abi": False}), built)
    assert set(found) == {"torch", "sglang", "torch ABI"}
    assert "built for 2.11.0" in found["torch"].found
    current = dataclasses.replace(SOUND.inventory, facts={"torch": "2.9.0", "architectures": ["sm_90"]})
    found = rows(
        dataclasses.replace(facts(gpus=[{"name": "G", "driver": "1", "capability": "12.0"}]), inventory=current)
    )
    assert set(found) == {"torch", "architecture"}, "without a playbook's word, the current release's own counts"
    assert rows(dataclasses.replace(SOUND, serving={"fault": "python9 is not installed"}))["serving python"].cure
    assert (
        "undefined symbol"
        in rows(
            dataclasses.replace(SOUND, serving={"torch": "2", "sglang": "1", "torch_fault": "undefined symbol: x"})
        )["torch"].found
    )


def test_locks_leases_releases_and_services() -> None:
    lock = LockInfo("ada@ops pid 3", "phase run tp8-canary", 70, False, "t")
    assert "ada@ops pid 3 for phase run tp8-canary" in rows(dataclasses.replace(SOUND, lock=lock))["lock"].found
    assert "lock" not in rows(dataclasses.replace(SOUND, lock=dataclasses.replace(lock, orphan=True)))
    failed = {"active": False, "state": "revert_failed", "reason": "no restart", "seconds_left": 0}
    inventory = Inventory(("a" * 64,), (), "b" * 64, NEVER, failed, 1)
    found = rows(dataclasses.replace(SOUND, inventory=inventory, tended="guard started again"))
    assert set(found) == {"lease", "release", "service", "lease guard"}
    assert all(finding.cure for finding in found.values())


def settings_for(fleet: SshFleet, tmp_path: Path, numbers: list[int]) -> FleetSettings:
    ssh = SshSettings(
        user=fleet.host(0).ssh.user,
        key_files=(fleet.key,),
        known_hosts=(fleet.known_hosts,),
        agent=False,
        config_file=Path("/dev/null"),
    )
    hosts = tuple(
        HostSettings(
            f"w{n}",
            fleet.hosts[n].address,
            str(tmp_path / f"w{n}"),
            30000 + n,
            python=PYTHON,
            ssh=dataclasses.replace(ssh, port=fleet.hosts[n].port),
        )
        for n in numbers
    )
    return FleetSettings(hosts=hosts, ssh=ssh, timeouts=TimeoutSettings(30, 30, 90, 5))


def test_a_real_fleet_with_one_host_of_each_fault(sshd: SshFleet, tmp_path: Path) -> None:
    settings = settings_for(sshd, tmp_path, [0, 1, 2, 3])
    empty = tmp_path / "empty"
    empty.write_text("# nobody's key\nhalf a line\n")
    broken = {
        1: dataclasses.replace(settings.hosts[1], ssh=dataclasses.replace(settings.hosts[1].ssh, known_hosts=(empty,))),
        2: dataclasses.replace(
            settings.hosts[2], address="127.0.0.1", ssh=dataclasses.replace(settings.hosts[2].ssh, port=free_port())
        ),
        3: dataclasses.replace(settings.hosts[3], python="/no/python"),
    }
    settings = dataclasses.replace(settings, hosts=tuple(broken.get(n, host) for n, host in enumerate(settings.hosts)))
    found = check_fleet(settings, Expected())
    by_host = {
        host: {finding.name: finding for finding in found if finding.host == host} for host in ("w0", "w1", "w2", "w3")
    }
    assert by_host["w1"]["host key"].cure.startswith("Get it with `ssh-keyscan")
    assert "cannot connect" in by_host["w2"]["reachability"].found
    assert "`python`" in by_host["w3"]["reachability"].cure
    assert "reachability" not in by_host["w0"] and "host key" not in by_host["w0"]
    assert all(finding.cure for finding in found if finding.health is not Health.OK)
    (lines,) = (finding for finding in found if finding.name == "known_hosts")
    assert f"{empty}: line 2 (" in lines.found and (lines.health, lines.host) == (Health.WARNING, "local")


def test_a_host_whose_clock_is_wrong(remote: Host) -> None:
    with HostSession(connect(remote)) as session:
        assert abs(look(session, ProcessDriver()).skew) < 20  # how exact it is depends on how long the answer takes
        ahead = look(session, ProcessDriver(), now=lambda: time.time() - 100)
        assert 80 < ahead.skew < 120


def test_the_serving_python_is_asked_for_what_it_has(local: Host, open_session: object) -> None:
    session = open_session(dataclasses.replace(local, values={"port": "1", "serving_python": sys.executable}))  # type: ignore[operator]
    report = look(session, ProcessDriver())
    assert report.serving["torch"].startswith("2.") and isinstance(report.serving["cxx11_abi"], bool)
    lost = open_session(dataclasses.replace(local, values={"port": "1", "serving_python": "/no/python"}))  # type: ignore[operator]
    assert "not installed" in look(lost, ProcessDriver()).serving["fault"]


def test_a_stopped_service_and_a_held_lock_are_seen(local: Host, session: HostSession, lock: HostLock) -> None:
    bundle = service_bundle()
    store = ReleaseStore(session, lock)
    store.push(bundle)
    store.switch(bundle.digest)
    found = {finding.name: finding for finding in judge(local, look(session, ProcessDriver()), Expected())}
    assert found["service"].health is Health.PROBLEM and found["lock"].health is Health.WARNING


def test_hosts_that_differ_from_the_rest() -> None:
    reports = {
        name: dataclasses.replace(SOUND, serving={"torch": version})
        for name, version in (("a", "2.11"), ("b", "2.11"), ("c", "2.9"))
    }
    [odd] = doctor._odd_ones_out(reports)
    assert (odd.host, odd.found) == ("c", "2.9, most of the fleet has 2.11")


def test_the_router(tmp_path: Path) -> None:
    host = dataclasses.replace(HOST, url="http://a:1")
    assert check_router(RouterSettings(), [host])[0].health is Health.WARNING
    gone = RouterSettings(RouterKind.SGLANG, f"http://127.0.0.1:{free_port()}")
    [finding] = check_router(gone, [host])
    assert finding.health is Health.PROBLEM and finding.cure
    hooks = RouterSettings(RouterKind.NONE, add=("true",), remove=("true",), observe=("echo", "http://a:1"))
    assert check_router(hooks, [host]) == [Finding("router", Health.OK, "1 of 1 workers in service")]
    assert (
        "Not in service: w2"
        in check_router(hooks, [host, dataclasses.replace(host, name="w2", url="http://b:1")])[0].cure
    )


def test_a_service_kind_the_host_does_not_have(local: Host, open_session: object) -> None:
    service = ServiceSettings(ServiceKind.DOCKER, name=f"none-{os.getpid()}")
    report = look(open_session(local), service.driver(local))  # type: ignore[operator]
    assert isinstance(report.service, str)
    assert {finding.name for finding in judge(local, report, Expected())} >= {"service"}
