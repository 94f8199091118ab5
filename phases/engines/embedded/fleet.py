"""The embedded fleet: real SGLang workers and a real sglang-router on this machine, as a playbook's production.

Workers are hosts like any other (address `local`, a root directory each), so releases, leases, drains and rollbacks run the
same code as on a real fleet. The fleet outlives the run that started it, as production does; `phase fleet down` ends it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phases.base.errors import ServingError, ended, joined
from phases.base.files import write_json
from phases.engines.embedded import taken_down
from phases.engines.embedded.models import ModelShape
from phases.engines.embedded.provision import cache_directory, ensure
from phases.engines.embedded.stand_in import STAND_IN, router_launch
from phases.engines.embedded.taken_down import home_of
from phases.engines.ssh.bundle import Bundle
from phases.engines.ssh.deploy import first_release, push
from phases.engines.ssh.errors import ServiceError
from phases.engines.ssh.releases import NEVER
from phases.engines.ssh.settings import (
    FleetSettings,
    HostSettings,
    LeaseSettings,
    RouterKind,
    RouterSettings,
    ServiceSettings,
)
from phases.playbook.typed import setting
from phases.serving.address import WorkerAddress
from phases.serving.host import LocalHost, Server

if TYPE_CHECKING:
    from phases.production.production import Production, WorkerState

ROUTER_SECONDS = 60.0
START_AT_ONCE = 6  # workers; much of a start waits for its own processes one after another, so several fill two cores
PORTS = "ports.json"
ROUTER_METRICS = "router-metrics"  # port of the router's own metrics
# Latencies of the tiny model lie between 5 ms and a few seconds; SGLang's own buckets start at 100 ms.
BUCKETS = tuple(f"{0.005 * 1.15**i:.4g}" for i in range(50))
BUCKET_FLAGS = ("--bucket-time-to-first-token", "--bucket-inter-token-latency", "--bucket-e2e-request-latency")


@dataclass(frozen=True)
class WorkerKind:
    """Workers that are alike."""

    count: int = setting(help="how many", at_least=1, at_most=32)
    tp: int = setting(1, help="tensor-parallel ranks each", at_least=1, at_most=8)


@dataclass(frozen=True)
class EmbeddedFleetSettings:
    """How large the embedded fleet is. About 2 GB of memory and 20 s of one core a rank to start."""

    workers: tuple[WorkerKind, ...] = setting(
        (WorkerKind(4), WorkerKind(1, 2)), help="kinds of workers", not_empty=True
    )
    model: ModelShape | None = setting(None, help="serve a model of this shape; none: the embedded environment's own")
    ready: float = setting(420.0, help="time a worker may take until it answers", duration=True, above=0)
    drain: float = setting(20.0, help="time requests in flight get at a stop", duration=True, at_least=0)
    lease: float = setting(
        60.0, help="how long a canary waits for the toolkit before it goes back by itself", duration=True, at_least=15
    )


def launch_arguments() -> list[str]:
    """Flags an embedded worker gets besides Phase 2's; {tp} and {mem} are the worker's own."""
    buckets = [part for flag in BUCKET_FLAGS for part in (flag, *BUCKETS)]
    return ["--tp", "{tp}", "--mem-fraction-static", "{mem}", *buckets]


LAUNCH_ENVIRONMENT = {"SGLANG_CPU_OMP_THREADS_BIND": "{bind}"}


def was_started(repo: Path, name: str) -> bool:
    """Whether anybody ever set out to start this fleet."""
    return (home_of(repo, name) / PORTS).exists()


def fleet_of(settings: EmbeddedFleetSettings, repo: Path, name: str, *, choose_ports: bool = False) -> FleetSettings:
    """The fleet as hosts.

    Args:
        choose_ports: give free ports to those that have none yet and keep them, so that every later process finds the same workers.
            Otherwise nothing is written, and what was never started has port 0.
    """
    home = home_of(repo, name)
    names = [
        (f"w{number}", kind.tp) for number, kind in enumerate((k for k in settings.workers for _ in range(k.count)), 1)
    ]
    wanted = ["router", ROUTER_METRICS, *(worker for worker, _ in names)]
    ports = dict.fromkeys(wanted, 0) | (_chosen_ports(home, wanted) if choose_ports else _known_ports(home))
    hosts = tuple(_host(worker, tp, home / worker, ports[worker]) for worker, tp in names)
    arm = settings.ready + settings.drain + 60.0
    return FleetSettings(
        hosts=hosts,
        service=ServiceSettings(drain=settings.drain, ready=settings.ready),
        lease=LeaseSettings(arm=arm, bake=settings.lease),
        router=RouterSettings(
            kind=RouterKind.SGLANG,
            url=f"http://127.0.0.1:{ports['router']}",
            metrics=f"http://127.0.0.1:{ports[ROUTER_METRICS]}",
        ),
        at_once=8,
    )


def ensure_up(
    settings: EmbeddedFleetSettings,
    repo: Path,
    name: str,
    production: Production,
    incumbent: Bundle,
    progress: Callable[[str], None],
) -> None:
    """Start what is not running: the router, and workers that have no release yet or were stopped; put all into service.

    Raises:
        ServingError: the router does not come up. FleetError: a worker does not.
    """
    taken_down.note_start(home_of(repo, name), production.clock.now())
    _start_router(home_of(repo, name), production, progress)
    states = production.observe()
    _require_known(states)
    down = [state for state in states if not state.serving]
    if down:
        real = production.settings.server.python != STAND_IN
        why = "each imports SGLang for 20 s or more of a core" if real else "stand-ins: they answer without a model"
        progress(f"starting {', '.join(s.host.name for s in down)} ({why})")
    down.sort(key=lambda state: -int(state.host.labels["tp"]))  # what takes longest begins first
    with ThreadPoolExecutor(START_AT_ONCE) as pool:
        list(pool.map(lambda state: _start_worker(production, state, incumbent, progress), down))
    for state in production.observe():
        if not state.in_service:
            production.put_in(state.host)


def left_over_hosts(settings: EmbeddedFleetSettings, repo: Path, name: str) -> tuple[HostSettings, ...]:
    """Workers that were started and that the playbook does not name any more: it asks for fewer by now."""
    home, wanted = home_of(repo, name), sum(kind.count for kind in settings.workers)
    others = {f"w{number}" for number in range(1, wanted + 1)} | {"router", ROUTER_METRICS}
    return tuple(
        _host(worker, 1, home / worker, port) for worker, port in _known_ports(home).items() if worker not in others
    )


def _host(name: str, tp: int, root: Path, port: int) -> HostSettings:
    # What a worker may take of the memory that was free when it began. Much more than it needs (its KV pool is capped by tokens):
    # SGLang counts what others took meanwhile as its own, and gives up when little is left of a small share.
    variables = {"tp": str(tp), "mem": "0.6", "bind": _binding(tp)}
    return HostSettings(
        name=name,
        address="local",
        root=str(root),
        port=port,
        python=sys.executable,
        labels={"tp": str(tp), "arch": "cpu"},
        vars=variables,
    )


def _binding(tp: int) -> str:
    """Cores by rank: SGLang wants one entry a rank, so ranks take turns on the cores there are."""
    import os

    cores = sorted(os.sched_getaffinity(0))
    return "all" if tp == 1 else "|".join(str(cores[rank * len(cores) // tp]) for rank in range(tp))


def _known_ports(home: Path) -> dict[str, int]:
    path = home / PORTS
    try:
        return {str(name): int(port) for name, port in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        hint = "End what runs in that directory by hand, then remove it."
        raise ServingError(f"{path} is damaged: the workers' ports are not known.", hint=hint) from None


def _chosen_ports(home: Path, wanted: list[str]) -> dict[str, int]:
    ports = _known_ports(home)
    missing = [name for name in wanted if name not in ports]
    if missing:
        probe = LocalHost(home)
        for name in missing:
            port = probe.free_port()
            while port in ports.values():
                port = probe.free_port()
            ports[name] = port
        home.mkdir(parents=True, exist_ok=True)
        write_json(home / PORTS, ports)
    return ports


def _start_router(home: Path, production: Production, progress: Callable[[str], None]) -> None:
    host = LocalHost(home / "router")
    if any(host.alive(server) for server in host.left_running()):
        return
    if production.settings.server.python == STAND_IN:
        launch, variables = router_launch(cache_directory(), progress)
    else:
        launch, variables = [str(ensure(progress=progress).python), "-m", "sglang_router.launch_router"], {}
    port = WorkerAddress.parse(production.router.url).port
    if host.port_taken(port):
        raise ServingError(
            f"port {port} of the embedded router is taken.", hint="Run `phase fleet down --purge` to choose new ports."
        )
    argv = [
        *launch,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--policy",
        "round_robin",
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(WorkerAddress.parse(production.fleet_settings.router.metrics).port),
        "--worker-startup-check-interval",
        "1",
        "--health-check-interval-secs",
        "5",
    ]
    server = host.start("router", argv, variables, port)
    progress(f"router on port {port}")
    _await_router(host, server, production)


def _await_router(host: LocalHost, server: Server, production: Production) -> None:
    until = production.clock.monotonic() + ROUTER_SECONDS
    while production.clock.monotonic() < until:
        if not host.alive(server):
            break
        try:
            production.router.workers()
            return
        except Exception:  # noqa: BLE001 - not up yet, in whatever way; the log below says why it never was
            production.clock.sleep(0.5)
    tail = " / ".join(host.log_lines(server)[-5:])
    raise ServingError(f"the embedded router did not come up: {tail or 'it said nothing'}.", hint=f"See {server.log}.")


def _start_worker(
    production: Production, state: WorkerState, incumbent: Bundle, progress: Callable[[str], None]
) -> None:
    session = production.fleet.session(state.host)
    lock = production.take_lock(session)
    driver, ready = production.driver(state.host), production.ready(state.host)
    if state.current == NEVER:
        push(session, lock, incumbent)
        try:
            first_release(session, lock, driver, incumbent.digest, ready)
        except ServiceError as fault:
            raise ServiceError(
                fault.message, hint=f"Its last lines:\n{driver.logs(session, 15).strip()}", host=state.host.name
            ) from None
    else:
        from phases.engines.ssh.services import start, wait_ready

        start(driver, session)
        wait_ready(driver, session, ready.port, ready.path, ready.timeout)
    production.prove(state.host)
    progress(f"{state.host.name} serves")


def _require_known(states: list[WorkerState]) -> None:
    lost = [f"{s.host.name}: {s.error}" for s in states if s.error]
    if lost:
        raise ServingError(
            f"embedded workers cannot be reached: {ended(joined(lost))}",
            hint="Run `phase fleet down --purge` and try again.",
        )
