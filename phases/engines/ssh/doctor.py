"""The fleet's part of `phase doctor`: one look at every host and the router, every problem with its cure.

A host without a problem is one line; otherwise each problem is a line of its own.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phases.base.clock import SystemClock
from phases.base.errors import FleetError, PhaseError
from phases.base.findings import Check, Finding, Health
from phases.engines.ssh.errors import DiskFullError, HostKeyError, LoginError, SshConfigError, UnreachableError
from phases.engines.ssh.fleet import Fleet
from phases.engines.ssh.host import Host
from phases.engines.ssh.known_hosts import Unreadable, describe, read_known_hosts
from phases.engines.ssh.locks import LockInfo, show_lock
from phases.engines.ssh.placing import CURE, AddressBook
from phases.engines.ssh.releases import NEVER, Inventory, read_inventory
from phases.engines.ssh.router import make_router
from phases.engines.ssh.services import ServiceDriver, ServiceStatus
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.sshconfig import login
from phases.engines.ssh.transport import Connect, connect

if TYPE_CHECKING:
    from phases.engines.ssh.settings import FleetSettings, RouterSettings
    from phases.playbook.schema import Playbook

DEADLINE = 120.0  # seconds for all hosts together
DISK_PROBLEM, DISK_WARNING = 1 << 30, 10 << 30  # bytes: a release with its wheels, and room to keep the old ones
SKEW_PROBLEM, SKEW_WARNING = 30.0, 2.0  # seconds: windows of measurements are matched by time

# Run by the serving environment's Python: what is installed there, and which C++ ABI torch was built with.
PROBE = """
import json
from importlib import metadata
found = {}
for name in ("torch", "sglang", "triton"):
    try: found[name] = metadata.version(name)
    except metadata.PackageNotFoundError: pass
if "torch" in found:
    try:
        import torch
        found["cxx11_abi"], found["cuda"] = bool(torch._C._GLIBCXX_USE_CXX11_ABI), torch.version.cuda
    except Exception as fault: found["torch_fault"] = str(fault)[:300]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Expected:
    """What a release needs of a host; empty fields are taken from the release that is current there, if that says so."""

    architectures: tuple[str, ...] = ()  # as built: sm_90, x86-64-v4 ...
    torch: str = ""
    sglang: str = ""
    cxx11_abi: bool | None = None


@dataclass(frozen=True)
class HostReport:
    """What one host said."""

    facts: dict[str, Any]
    serving: dict[str, Any]
    inventory: Inventory
    lock: LockInfo | None
    service: ServiceStatus | str  # or why it cannot be told
    skew: float  # seconds the host's clock is ahead
    tended: str  # what a lost guard had left undone, if so


def checks(playbook: Playbook) -> list[tuple[str, Check]]:
    """(name, check) pairs for a playbook with a `fleet` section; none without."""
    settings: FleetSettings | None = playbook.sections.get("fleet")
    if settings is None:
        return []
    expected = Expected(architectures=_built_for(playbook))
    return [
        ("fleet", lambda: check_fleet(settings, expected)),
        ("router", lambda: check_router(settings.router, settings.workers())),
    ]


def check_fleet(
    settings: FleetSettings, expected: Expected, *, connect: Connect = connect, now: Callable[[], float] = time.time
) -> list[Finding]:
    """Look at all hosts side by side."""
    hosts = settings.workers()
    with Fleet(hosts, limit=settings.at_once, connect=connect) as fleet:
        results = fleet.each(
            lambda session: look(session, settings.service.driver(session.host), now), deadline=DEADLINE
        )
    findings: list[Finding] = []
    for host in hosts:
        result = results[host.name]
        if result.value is None:
            findings.append(_unseen(host, result.error, result.reason))
            continue
        problems = list(judge(host, result.value, expected))
        findings += problems or [Finding("host", Health.OK, _summary(result.value), host=host.name)]
    reports = {name: result.value for name, result in results.items() if result.value}
    return [*findings, *_known_hosts(hosts), *_odd_ones_out(reports)]


def _known_hosts(hosts: Sequence[Host]) -> Iterator[Finding]:
    """Files with lines that are skipped: what somebody meant by them does not hold."""
    unreadable: dict[str, list[Unreadable]] = {}
    for paths in dict.fromkeys(_files(host) for host in hosts if not host.local):
        for line in read_known_hosts(paths).unreadable:
            if line not in unreadable.setdefault(line.file, []):
                unreadable[line.file].append(line)
    for lines in unreadable.values():
        yield Finding("known_hosts", Health.WARNING, describe(lines), "Mend or remove them.")


def _files(host: Host) -> tuple[Path, ...]:
    with contextlib.suppress(FleetError):  # the host's own finding tells of it
        return host.ssh.known_hosts or login(host, host.address).known_hosts
    return ()


def look(session: HostSession, driver: ServiceDriver, now: Callable[[], float] = time.time) -> HostReport:
    """Ask a host for everything, without changing anything but reviving a lost lease guard."""
    session.do(op("hello"))  # connect first, so that the clock is compared over a fast round trip
    asked = now()
    host_time = session.do(op("hello"))[0]["time"]
    skew = host_time - (asked + now()) / 2
    facts = session.do(op("facts"))[0]
    try:
        service: ServiceStatus | str = driver.status(session)
    except FleetError as fault:
        service = fault.message
    tended = session.greeting.get("tended", "")
    return HostReport(facts, _serving(session), read_inventory(session), show_lock(session), service, skew, tended)


def _serving(session: HostSession) -> dict[str, Any]:
    python = session.host.values.get("serving_python", session.host.python)
    try:
        done = session.do(op("command", argv=[python, "-c", PROBE], timeout=90, check=False), timeout=100)[0]
        return dict(json.loads(done["out"].strip().splitlines()[-1]))
    except FleetError as fault:
        return {"fault": fault.message}
    except (ValueError, IndexError):
        return {"fault": f"{python} does not run"}


def _unseen(host: Host, error: BaseException | None, reason: str) -> Finding:
    kinds = {
        HostKeyError: "host key",
        LoginError: "login",
        DiskFullError: "disk",
        SshConfigError: "ssh configuration",
        UnreachableError: "reachability",
        PhaseError: "host",
    }
    name = next((label for kind, label in kinds.items() if isinstance(error, kind)), "reachability")
    if isinstance(error, PhaseError):
        return Finding(name, Health.PROBLEM, error.message, error.hint or "See what the host says.", host.name)
    return Finding(
        name,
        Health.PROBLEM,
        reason,
        f"It gave no answer within {DEADLINE:g} s: look at the host and the network.",
        host.name,
    )


def judge(host: Host, report: HostReport, expected: Expected) -> Iterator[Finding]:
    """Everything that is wrong or doubtful about one host."""
    built = report.inventory.facts
    expected = Expected(
        expected.architectures or tuple(built.get("architectures", ())),
        expected.torch or built.get("torch", ""),
        expected.sglang or built.get("sglang", ""),
        built.get("cxx11_abi") if expected.cxx11_abi is None else expected.cxx11_abi,
    )
    for check in (_judge_machine, _judge_gpus, _judge_serving, _judge_state):
        for name, health, found, cure in check(report, expected):
            yield Finding(name, health, found, cure, host.name)


Row = tuple[str, Health, str, str]


def _judge_machine(report: HostReport, expected: Expected) -> Iterator[Row]:
    facts = report.facts
    if tuple(map(int, facts["python"].split(".")[:2])) < (3, 8):
        yield "python", Health.PROBLEM, facts["python"], "Set `python` of this host to Python 3.8 or newer."
    free = facts["free"]
    if free < DISK_WARNING:
        health = Health.PROBLEM if free < DISK_PROBLEM else Health.WARNING
        yield (
            "disk",
            health,
            f"{free / 2**30:.1f} GiB free below the root",
            "Free some space, or keep fewer releases (`keep_releases`).",
        )
    if abs(report.skew) > SKEW_WARNING:
        health = Health.PROBLEM if abs(report.skew) > SKEW_PROBLEM else Health.WARNING
        yield (
            "clock",
            health,
            f"{report.skew:+.1f} s against this machine",
            "Set up time synchronisation (chrony) there or here.",
        )
    if facts["kills_user_processes"]:
        cure = "`loginctl enable-linger` for this user, or KillUserProcesses=no in logind.conf: the lease guard must outlive the connection."
        yield "lease guard", Health.PROBLEM, "logind ends what a session leaves running", cure


def _judge_gpus(report: HostReport, expected: Expected) -> Iterator[Row]:
    gpus = report.facts["gpus"]
    if isinstance(gpus, str):
        yield "gpu", Health.PROBLEM, gpus, "Run nvidia-smi there; reload the driver or reboot."
        return
    built = {arch for arch in expected.architectures if arch.startswith("sm_")}
    if built and not gpus:
        yield (
            "gpu",
            Health.WARNING,
            "no GPU, though the kernel is built for some",
            "Take the host out of the fleet, or install the driver.",
        )
    for capability in sorted({gpu["capability"] for gpu in gpus}):
        arch = "sm_" + capability.replace(".", "")
        if built and not any(_runs_on(one, arch) for one in built):
            yield (
                "architecture",
                Health.PROBLEM,
                f"{arch}; built for {', '.join(sorted(built))}",
                f"Add {arch} to the architectures and build again.",
            )
    if len({gpu["driver"] for gpu in gpus}) > 1:
        yield (
            "driver",
            Health.PROBLEM,
            f"several: {', '.join(sorted({g['driver'] for g in gpus}))}",
            "Reload the driver or reboot.",
        )


def _runs_on(built: str, arch: str) -> bool:
    """Whether an image for `built` runs on `arch`: sm_90 on sm_90; sm_90a too; a family image (sm_100f) within its family."""
    digits = built.removeprefix("sm_").rstrip("af")
    return f"sm_{digits}" == arch or (built.endswith("f") and f"sm_{digits[:-1]}" == arch[:-1])


def _judge_serving(report: HostReport, expected: Expected) -> Iterator[Row]:
    serving = report.serving
    cure = "Set `vars: {serving_python: …}` of this host to the Python that SGLang is installed in."
    if "fault" in serving:
        yield "serving python", Health.PROBLEM, serving["fault"], cure
        return
    for name in ("torch", "sglang"):
        wanted, found = getattr(expected, name), serving.get(name)
        if not found:
            yield name, Health.WARNING, "not installed in the serving Python", cure
        elif wanted and found.split("+")[0] != wanted.split("+")[0]:
            yield (
                name,
                Health.PROBLEM,
                f"{found}, the release was built for {wanted}",
                f"Install {name} {wanted} there, or build the release for {found}.",
            )
    if "torch_fault" in serving:
        yield (
            "torch",
            Health.PROBLEM,
            f"cannot be imported: {serving['torch_fault']}",
            "Install it again in the serving Python.",
        )
    abi = serving.get("cxx11_abi")
    if expected.cxx11_abi is not None and abi is not None and abi != expected.cxx11_abi:
        yield (
            "torch ABI",
            Health.PROBLEM,
            f"C++11 ABI {abi}, the release has {expected.cxx11_abi}",
            "Build the release against this torch.",
        )


def _judge_state(report: HostReport, expected: Expected) -> Iterator[Row]:
    lock, lease, inventory = report.lock, report.inventory.lease, report.inventory
    if lock and not lock.orphan:
        yield (
            "lock",
            Health.WARNING,
            f"held by {lock.owner} for {lock.purpose}, {lock.age:.0f} s",
            "Wait for that run; `phase unlock` if it is over.",
        )
    if lease and lease["active"]:
        yield (
            "lease",
            Health.WARNING,
            f"{lease['state']}, {lease['seconds_left']:.0f} s left",
            "A run is under way, or its machine died: then it goes back by itself.",
        )
    if lease and lease["state"] == "revert_failed":
        yield (
            "lease",
            Health.PROBLEM,
            f"going back failed: {lease['reason']}",
            "Look at the service's log and start it by hand.",
        )
    if report.tended:
        yield (
            "lease guard",
            Health.WARNING,
            f"it was lost; {report.tended}",
            "Find out what killed it (out of memory, logind).",
        )
    if inventory.current != NEVER and inventory.current not in inventory.releases:
        yield (
            "release",
            Health.PROBLEM,
            f"current ({inventory.current[:12]}) is not complete",
            "Roll back, or push it again.",
        )
    if isinstance(report.service, str):
        yield "service", Health.PROBLEM, report.service, "Check `service` of the fleet section."
    elif inventory.current != NEVER and not report.service.running:
        yield (
            "service",
            Health.PROBLEM,
            f"not running ({report.service.detail})",
            "Read its log; start it or roll back.",
        )


def _odd_ones_out(reports: dict[str, HostReport]) -> Iterator[Finding]:
    """Hosts that differ from most others in what a release is built against."""
    for name, pick in {
        "torch": lambda r: r.serving.get("torch"),
        "sglang": lambda r: r.serving.get("sglang"),
        "driver": _driver,
    }.items():
        found = {host: pick(report) for host, report in reports.items() if pick(report)}
        if len(set(found.values())) < 2:
            continue
        usual = Counter(found.values()).most_common(1)[0][0]
        for host, value in found.items():
            if value != usual:
                yield Finding(
                    name,
                    Health.WARNING,
                    f"{value}, most of the fleet has {usual}",
                    "Bring the hosts to the same version.",
                    host,
                )


def _driver(report: HostReport) -> str:
    gpus = report.facts["gpus"]
    return gpus[0]["driver"] if isinstance(gpus, list) and gpus else ""


def _summary(report: HostReport) -> str:
    facts, serving = report.facts, report.serving
    gpus = Counter(gpu["name"] for gpu in facts["gpus"]) if isinstance(facts["gpus"], list) else {}
    parts = [
        f"python {facts['python']}",
        *(f"{name} {serving[name]}" for name in ("torch", "sglang") if name in serving),
    ]
    parts += [f"{count} × {name}" for name, count in gpus.items()]
    current = report.inventory.current
    return ", ".join(
        [*parts, f"{facts['free'] / 2**30:.0f} GiB free", f"current {current[:12] if current != NEVER else 'none'}"]
    )


def check_router(settings: RouterSettings, workers: Sequence[Host]) -> Iterable[Finding]:
    """Whether the router answers, and which of the fleet's workers it knows."""
    clock = SystemClock()
    if settings.kind.value == "none" and not settings.observe:
        return [
            Finding(
                "router", Health.WARNING, "none configured", "Set `router` in the fleet section before phases 3 and 4."
            )
        ]
    try:
        listed = make_router(settings, clock).workers()
    except PhaseError as fault:
        return [Finding("router", Health.PROBLEM, fault.message, fault.hint)]
    routed = AddressBook.of(workers, clock, router=settings.url).place(listed)
    if told := routed.told():
        return [Finding("router", Health.PROBLEM, told.removesuffix(CURE).strip(), CURE)]
    absent = [host.name for host in workers if not routed.listed(host.name)]
    sick = [host.name for host in workers if host.name not in absent and not routed.in_service(host.name)]
    known = f"{len(workers) - len(absent)} of {len(workers)} workers in service"
    known += f", {len(routed.foreign)} entries are not this fleet's" if routed.foreign else ""
    if sick:
        return [
            Finding("router", Health.PROBLEM, f"{known}; finds {', '.join(sick)} unhealthy", "Look at those workers.")
        ]
    return [
        Finding(
            "router",
            Health.WARNING if absent else Health.OK,
            known,
            f"Not in service: {', '.join(absent)}." if absent else "",
        )
    ]


def _built_for(playbook: Playbook) -> tuple[str, ...]:
    """Architectures that Phase 1 of this playbook must build for."""
    for section in playbook.phases:
        found = tuple(getattr(section.settings, "architectures", ())) + tuple(
            getattr(section.settings, "optional_architectures", ())
        )
        if found:
            return found
    return ()
