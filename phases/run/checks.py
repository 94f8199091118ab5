"""What `phase doctor` looks at on this machine. Each check gives findings; each problem comes with its cure.

Other parts add theirs: `phases.engines.ssh.doctor:checks` is called with the playbook where the playbook has a fleet.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from phases.base.clock import Clock, SystemClock
from phases.base.errors import LedgerError, PhaseError
from phases.base.extras import Extra
from phases.base.findings import Check, Finding, Health
from phases.harness import device, toolchain
from phases.harness.facts import cpu_name
from phases.harness.load import LOOK_SECONDS, Meter
from phases.ledger import repository as source
from phases.ledger.git import Git, GitFailed
from phases.playbook.schema import Device, Playbook
from phases.run.closing import ledger_of


def local_checks(playbook: Playbook | None, directory: Path) -> list[tuple[str, Check]]:
    """The checks of this machine by name; those that need a playbook are left out without one."""
    bench = (
        next((section.settings for section in playbook.phases if section.name == "build-parity"), None)
        if playbook
        else None
    )
    benches = bench is not None
    checks: list[tuple[str, Check]] = [
        *(
            [("device", lambda: check_device(bench.device)), ("load", lambda: check_load(SystemClock()))]
            if bench
            else []
        ),
        ("python", check_python),
        ("git", lambda: check_git(directory)),
        ("torch", lambda: check_extras(benches)),
        ("disk", lambda: check_disk(directory)),
    ]
    if playbook is None:
        return [*checks, ("compilers", lambda: check_compilers((), ()))]
    required, optional = _architectures(playbook)
    return [
        *checks,
        ("compilers", lambda: check_compilers(required, optional)),
        ("state", lambda: check_state(playbook)),
        ("ledger", lambda: check_ledger(playbook)),
        ("remote", lambda: check_remote(playbook)),
    ]


def run_checks(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """All findings; a check that breaks is a finding itself."""
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += list(check())
        except PhaseError as fault:
            findings.append(Finding(name, Health.PROBLEM, fault.message, fault.hint, fault.host or "local"))
        except OSError as fault:
            findings.append(Finding(name, Health.PROBLEM, str(fault), "See what the system says there."))
    return findings


def check_device(wanted: Device) -> Iterable[Finding]:
    """What the playbook's `device` would be here; first, since without it nothing else of Phase 1 matters."""
    lack = "" if wanted is Device.CPU else device.lack_of_cuda()
    if lack and wanted is Device.CUDA:
        return [Finding("device", Health.PROBLEM, f"the playbook says cuda, but {lack}", device.CURE)]
    if lack or wanted is Device.CPU:
        why = f"auto: {lack}" if lack else "as the playbook says"
        return [Finding("device", Health.OK, f"cpu ({why}): {cpu_name()}")]
    return [Finding("device", Health.OK, f"cuda ({'auto' if wanted is Device.AUTO else 'as the playbook says'})")]


def check_load(clock: Clock) -> Iterable[Finding]:
    """Whether something else keeps this machine busy, looked at for a second."""
    meter = Meter()
    clock.sleep(LOOK_SECONDS)
    seen = meter.read()
    if spoils := seen.spoils():
        cure = "End what else runs, or expect Phase 1 to take more samples and to be inconclusive in the end."
        return [Finding("load", Health.WARNING, f"timings will be spoilt: {' and '.join(spoils)} ({seen})", cure)]
    return [Finding("load", Health.OK, str(seen))]


def check_python() -> Iterable[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036 - started from a checkout, nothing else has asked
        return [Finding("python", Health.PROBLEM, version, "Use Python 3.11 or newer.")]
    return [Finding("python", Health.OK, f"{version} at {sys.executable}")]


def check_git(directory: Path) -> Iterable[Finding]:
    version = Git(directory).text("--version")
    findings = [Finding("git", Health.OK, version.removeprefix("git version "))]
    try:
        repo = source.repository_of(directory)
        findings.append(Finding("repository", Health.OK, str(repo)))
        findings.append(Finding("identity", Health.OK, source.identity(repo)))
    except PhaseError as fault:
        name = "identity" if len(findings) > 1 else "repository"
        findings.append(Finding(name, Health.PROBLEM, fault.message, fault.hint))
    return findings


def check_extras(benches: bool) -> Iterable[Finding]:
    """What the extras bring, without importing it. A playbook with Phase 1 (`benches`) needs torch; nothing needs charts."""
    for extra, absence in (
        (Extra.BENCH, "status, review, plan, watch and rollback go without"),
        (Extra.PLOTS, "no charts"),
    ):
        if extra.installed:
            yield Finding(extra.value, Health.OK, metadata.version(extra.value))
        else:
            health = Health.PROBLEM if extra is Extra.BENCH and benches else Health.WARNING
            yield Finding(extra.value, health, f"not installed: {absence}", f"{extra.cure}.")


def check_disk(directory: Path) -> Iterable[Finding]:
    free = shutil.disk_usage(directory).free >> 20
    if free < 500:
        return [Finding("disk", Health.PROBLEM, f"{free} MiB free", "Free some space; a run needs about 500 MiB.")]
    if free < 4096:
        return [
            Finding("disk", Health.WARNING, f"{free} MiB free", "The embedded serving environment needs about 4 GiB.")
        ]
    return [Finding("disk", Health.OK, f"{free >> 10} GiB free")]


def check_compilers(required: Iterable[str], optional: Iterable[str]) -> Iterable[Finding]:
    """The C++ compiler and nvcc, and whether they know the architectures of the playbook."""
    required, optional = tuple(required), tuple(optional)
    needs_cuda = any(map(toolchain.is_cuda, required))
    findings = [_compiler("C++ compiler", toolchain.find_cxx, Health.PROBLEM)]
    findings.append(_compiler("nvcc", toolchain.find_nvcc, Health.PROBLEM if needs_cuda else Health.WARNING))
    for arch in (*required, *optional):
        can, why = toolchain.buildable([arch])
        health = Health.OK if can else Health.PROBLEM if arch in required else Health.WARNING
        cure = "" if can else "Install or name a compiler that knows it (NVCC, CXX), or take it out of 'architectures'."
        findings.append(Finding(f"builds {arch}", health, "yes" if can else why[arch], cure))
    return findings


def check_state(playbook: Playbook) -> Iterable[Finding]:
    """Whether runs can be kept, and whether one is in the way."""
    from phases.run import run_directory
    from phases.run.lock import Lock, is_dead

    repo = source.repository_of(playbook.path)
    owner = Lock(run_directory.state_directory(repo), playbook.name, SystemClock()).owner()
    if owner is None:
        return [Finding("state", Health.OK, f"{repo / '.phase'} is writable, no run is going on")]
    described = owner.describe(SystemClock().now())
    if is_dead(owner):
        return [
            Finding(
                "state",
                Health.WARNING,
                f"lock of a run that is gone: {described}",
                "The next run takes it over by itself.",
            )
        ]
    return [
        Finding(
            "state",
            Health.WARNING,
            f"locked: {described}",
            "Wait for it, or `phase unlock` if you know that it is gone.",
        )
    ]


def check_ledger(playbook: Playbook) -> Iterable[Finding]:
    ledger = ledger_of(playbook)
    ledger.preflight()
    count = len(ledger.checkpoints())
    return [
        Finding(
            "ledger", Health.OK, f"{count} {'checkpoint' if count == 1 else 'checkpoints'} on branch {ledger.branch}"
        )
    ]


def check_remote(playbook: Playbook) -> Iterable[Finding]:
    remote = playbook.ledger.remote
    if not remote:
        return [
            Finding(
                "remote",
                Health.WARNING,
                "none: checkpoints stay on this machine",
                "Set `ledger: remote:` in the playbook to push them.",
            )
        ]
    repo = source.repository_of(playbook.path)
    try:
        Git(repo).network("ls-remote", "--heads", remote, timeout=30.0)
    except GitFailed as fault:
        said = (fault.stderr.strip().splitlines() or ["no reason given"])[-1]
        return [Finding("remote", Health.PROBLEM, f"{remote}: {said}", "Check `git remote -v` and your access to it.")]
    except LedgerError:
        cure = "Check the network and `git remote -v`."
        return [Finding("remote", Health.PROBLEM, f"{remote} does not answer within 30 s", cure)]
    return [Finding("remote", Health.OK, f"{remote} answers")]


def _compiler(name: str, find: Callable[[], toolchain.Compiler], when_missing: Health) -> Finding:
    try:
        found = find()
    except PhaseError as fault:
        return Finding(name, when_missing, fault.message, fault.hint)
    archs = (
        f"; knows {' '.join(arch.removeprefix('sm_') for arch in found.archs)}"
        if isinstance(found, toolchain.Nvcc)
        else ""
    )
    return Finding(name, Health.OK, f"{found.version}{archs}")


def _architectures(playbook: Playbook) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(required, optional) architectures of Phase 1, as the playbook or kernel.yaml names them."""
    from phases.harness import contract

    kernel = contract.load(playbook.kernel)
    section = next((section for section in playbook.phases if section.name == "build-parity"), None)
    if section is None:
        return kernel.architectures, ()
    optional = section.settings.optional_architectures
    required = section.settings.architectures or kernel.architectures
    return tuple(arch for arch in required if arch not in optional), optional
