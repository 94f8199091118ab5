"""Ending the embedded fleet: leases, workers, router, and with a purge their directories, in this order.

A worker's lease ends before its service, so that no guard starts it again. Killed at any instant, the next call finishes it:
each part is safe to repeat, and the directories go in one step, once nothing runs in them.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from phases.base.clock import Clock
from phases.base.errors import FleetError, joined
from phases.base.processes import Life
from phases.engines.embedded import taken_down
from phases.engines.embedded.fleet import EmbeddedFleetSettings, fleet_of, home_of, left_over_hosts
from phases.engines.embedded.taken_down import TakenDown
from phases.engines.ssh.deploy import end_service
from phases.engines.ssh.errors import HostLockedError
from phases.engines.ssh.fleet import Fleet
from phases.engines.ssh.host import Host
from phases.engines.ssh.locks import show_lock
from phases.engines.ssh.services import ServiceDriver
from phases.engines.ssh.settings import FleetSettings
from phases.serving.host import LocalHost

REASON = "the fleet was taken down"
SECONDS = 240.0  # for all workers together, beyond the time requests in flight get
LOOK_SECONDS = 60.0


def down(
    repo: Path,
    name: str,
    settings: EmbeddedFleetSettings,
    *,
    by: str,
    clock: Clock,
    progress: Callable[[str], None],
    purge: bool = False,
) -> list[str]:
    """Stop all workers and the router; returns what was running. The caller holds the playbook's lock: no run is at work.

    Args:
        by: who does it, for the record. purge: remove the workers' directories and ports as well.
    Raises:
        HostLockedError: a rollback is at work on a worker; nothing was changed.
        FleetError: a worker could not be stopped, or its port still answers; all others are, and nothing is removed. ServingError: the
            same of the router.
    """
    home, earlier = home_of(repo, name), taken_down.read(home_of(repo, name))
    if earlier and earlier.ended is None:
        progress(earlier.describe())
    _remove_what_a_purge_left(home)
    unfinished = earlier is not None and earlier.ended is None
    if not home.exists() and not unfinished:
        return []
    begun, running = TakenDown(clock.now(), by), list[str]()
    if home.exists():
        fleet = fleet_of(settings, repo, name)
        fleet = dataclasses.replace(fleet, hosts=(*fleet.hosts, *left_over_hosts(settings, repo, name)))
        running = _stop_all(home, fleet, begun, clock, progress, purge)
        if not (earlier and earlier.is_down):  # since then its ports have been anybody's
            _require_silent(_placed(fleet))
    if purge and home.exists():
        aside = home.with_name(f"{home.name}.removed.{os.getpid()}")
        os.replace(home, aside)
        shutil.rmtree(aside, ignore_errors=True)
    ended = dataclasses.replace(begun, ended=clock.now(), purged=not home.exists())
    if earlier and earlier.is_down and not running:  # it was down already; at most its directories have gone now
        ended = dataclasses.replace(earlier, purged=ended.purged)
    taken_down.write(home, ended)
    return running


def _placed(fleet: FleetSettings) -> list[Host]:
    """The workers that have a directory."""
    return [host for host in fleet.workers() if Path(host.root).exists()]


def _stop_all(
    home: Path, fleet: FleetSettings, begun: TakenDown, clock: Clock, progress: Callable[[str], None], purge: bool
) -> list[str]:
    hosts = _placed(fleet)
    running: list[str] = []
    failed: dict[str, str] = {}
    with Fleet(hosts, limit=max(1, len(hosts))) as reached:
        _require_nobody_at_work(reached)
        _write_begun(home, begun, purge)
        act = lambda session: end_service(session, fleet.service.driver(session.host), clock, REASON)  # noqa: E731
        for worker, result in reached.each(act, deadline=SECONDS + fleet.service.drain).items():
            if not result.ok and not (
                purge and _stop_without_agent(result.host, fleet.service.driver(result.host), progress)
            ):
                failed[worker] = result.reason
            elif result.value is not False:
                running.append(worker)
    router = LocalHost(home / "router")
    for server in router.left_running():
        router.stop(server)
        running.append(server.name)
    if failed:
        hint = "" if purge else " `phase fleet down --purge` needs less of a worker to stop it."
        raise FleetError(
            f"{', '.join(failed)} could not be stopped: {joined(failed.values())}",
            hint=f"Mend what it names, or end its processes by hand, then try again.{hint}",
            host=next(iter(failed)),
        )
    return running


def _require_silent(hosts: list[Host]) -> None:
    """A server that neither a record nor its environment shows to be the worker's is not ended, but it is not passed over either."""
    left = {host.name: host.values["port"] for host in hosts if _answers(int(host.values["port"]))}
    if left:
        ports = ", ".join(f"{port} of {name}" for name, port in left.items())
        look = " or ".join(f"sport = :{port}" for port in left.values())
        raise FleetError(
            f"something still listens on port {ports}, and nothing shows that it is the worker's, so it was left alone.",
            hint=f"`ss -ltnp '{look}'` names it: end it by hand, then try again.",
            host=next(iter(left)),
        )


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _write_begun(home: Path, begun: TakenDown, purge: bool) -> None:
    try:
        taken_down.write(home, begun)
    except OSError:
        if not purge:  # which gives a full disk its space back: that must not fail for want of it
            raise


def _require_nobody_at_work(fleet: Fleet) -> None:
    """A rollback from another terminal would start again what is stopped here. A run that was killed is in nobody's way."""
    for result in fleet.each(show_lock, deadline=LOOK_SECONDS).values():
        seen = result.value if result.ok else None
        if seen is not None and not seen.orphan and seen.life is Life.ALIVE:
            raise HostLockedError(
                f"locked by {seen.owner} for {seen.purpose}, {seen.age:.0f} s ago.",
                hint="Wait for it or stop it, then try again.",
                host=result.host.name,
            )


def _stop_without_agent(host: Host, driver: ServiceDriver, progress: Callable[[str], None]) -> bool:
    """The worker's own stop command, as its guard would call it: for a worker whose records are damaged, and which is to be removed."""
    try:
        done = subprocess.run(
            driver.stop_argv(host),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=driver.drain + 60.0,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode == 0:
        progress(f"{host.name}: its records cannot be read; stopped by what its service left")
    return done.returncode == 0


def _remove_what_a_purge_left(home: Path) -> None:
    for path in home.parent.glob(f"{glob.escape(home.name)}.removed.*"):
        shutil.rmtree(path, ignore_errors=True)
