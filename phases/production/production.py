"""Production as it is observed, and the few ways in which it may be changed: one worker at a time, traffic last.

The truth is what hosts and router say: every change starts by observing, so that a resumed run, another machine
and a rollback all see the same. Order within a change: capacity is checked, traffic leaves, the worker drains, the host is
switched under a lease, its own completions come back, and only then traffic returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from phases.base.clock import Clock
from phases.base.errors import FleetError, PhaseError, ServingError
from phases.engines.ssh.bundle import Bundle
from phases.engines.ssh.deploy import Ready, Windows, guarded_switch, push, switch_back
from phases.engines.ssh.errors import HostLockedError, LeaseError, RouterError
from phases.engines.ssh.fleet import Fleet
from phases.engines.ssh.host import Host
from phases.engines.ssh.lease import Lease, LeaseState, read_lease
from phases.engines.ssh.locks import HostLock, LockInfo, break_lock, show_lock
from phases.engines.ssh.placing import AddressBook, Routed
from phases.engines.ssh.releases import ReleaseStore, read_inventory
from phases.engines.ssh.router import RouterDriver, drain
from phases.engines.ssh.services import wait_ready, waiting
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.settings import FleetSettings
from phases.notify.teller import Teller, silent
from phases.production.agreement import Agreement, compare
from phases.production.capacity import Capacity
from phases.production.renewer import Renewer, Turns
from phases.production.service import Service
from phases.production.settings import ProductionSettings
from phases.serving.client import Client
from phases.serving.in_flight import ASK_SECONDS, in_flight
from phases.serving.own import OwnRequests

Progress = Callable[[str], None]
ROLLBACK = "rollback:"  # how the purpose of a rollback's lock on a host begins
FACTS_PROGRAM = (
    "import glob,json,os,sys\n"
    "print(json.dumps([json.load(open(p)) for p in sorted(glob.glob(os.path.join(sys.argv[1],'facts','rank-*.json')))]))"
)


def is_rollback(seen: LockInfo) -> bool:
    """Whether a host is held by a rollback that is at work. Another rollback waits for that one (`takeover.claim`)."""
    return seen.purpose.startswith(ROLLBACK) and not seen.orphan


@dataclass(frozen=True)
class WorkerState:
    """One worker as observed.

    Attributes:
        current, last_good: digests; `none` where there is none.
        serving: it answered a health check. in_service: the router sends it traffic; None where that cannot be told.
        error: why the host could not be asked, else empty.
        listed: the router has it, maybe as unhealthy; None where that cannot be told.
        doubt: why it is not certain that the router has it under no other name, else empty.
    """

    host: Host
    current: str = ""
    last_good: str = ""
    lease: LeaseState | None = None
    serving: bool = False
    in_service: bool | None = False
    error: str = ""
    listed: bool | None = False
    doubt: str = ""

    @property
    def unserved(self) -> str:
        """Why it does not count as in service; empty where it does."""
        if self.in_service:
            return ""
        return (
            "the router sends it nothing"
            if self.in_service is False
            else f"whether users are served by it is not known: {self.doubt}"
        )

    @property
    def leased(self) -> bool:
        """Whether it is under a lease that a run confirmed and that has not ended: not one cut short, nor one that is going back."""
        return self.lease is not None and self.lease.state == "confirmed"

    def describe(self) -> dict[str, Any]:
        lease = f"{self.lease.state}, {self.lease.seconds_left:.0f} s" if self.lease and self.lease.active else ""
        return {
            "name": self.host.name,
            "url": self.host.url,
            "current": self.current,
            "last_good": self.last_good,
            "lease": lease,
            "serving": self.serving,
            "in_service": self.in_service,
            "error": self.error,
        }


@dataclass
class Production:
    """The fleet, its router and the rules for changing it. Use as a context manager: it closes its sessions.

    Attributes:
        purpose: what the hosts' locks say this run is doing.
    """

    settings: ProductionSettings
    fleet_settings: FleetSettings
    router: RouterDriver
    package: str  # the kernel's package, which names its facts in /server_info
    purpose: str
    clock: Clock
    progress: Progress
    below_floor: bool = False  # a rollback by hand may go under min_available: only where a person said so
    preempt: bool = False  # take over hosts another run holds: only a rollback by hand does
    token: str = ""  # of the hosts' locks, for a resumed run to find its own; empty: another for each host
    teller: Teller = field(default_factory=silent)  # tells people of rollbacks; never in the way of one
    fleet: Fleet = field(init=False)

    def __post_init__(self) -> None:
        self.workers = self.fleet_settings.workers()
        self.own = OwnRequests()  # what workers answered to us, which is no users' traffic
        self.fleet = Fleet(self.workers, limit=self.fleet_settings.at_once)
        self.locks: dict[str, HostLock] = {}  # taken by this process, by host
        self.leases: dict[str, Lease] = {}  # armed or adopted by this process, by host
        self._renewer: Renewer | None = None
        self.agreements: list[Agreement] = []  # of each worker switched by this process
        self.book = AddressBook.of(self.workers, self.clock, router=self.fleet_settings.router.url)
        self._told: set[str] = set()  # about the router
        self.capacity = Capacity(
            self.settings.min_available.of(len(self.workers)), self._service_proved, lambda: self.below_floor
        )

    def __enter__(self) -> Production:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop renewing, release the locks, end the sessions. Leases still active then run out by themselves."""
        if self._renewer:
            self._renewer.stop()
        self.fleet.close()
        self.teller.close()  # last: what it waits for concerns no host any more

    # -- observing -----------------------------------------------------------------------------------------------------

    def observe(self, *, router_needed: bool = True) -> list[WorkerState]:
        """Every worker, asked at the same time; what cannot be asked has an `error`.

        Raises: RouterError when the router does not answer, unless it is not needed; then of nobody is known whether it is in service.
        """
        routed = self.routed(needed=router_needed)
        found = self.fleet.each(lambda session: (read_inventory(session), read_lease(session)), deadline=60.0)
        healthy = self.answering()
        return [self._state(host, found[host.name], host.name in healthy, routed) for host in self.workers]

    def _state(self, host: Host, result: Any, healthy: bool, routed: Routed) -> WorkerState:
        name = host.name
        seen = WorkerState(
            host,
            serving=healthy,
            in_service=routed.in_service(name),
            listed=routed.listed(name),
            doubt=routed.doubt(name),
        )
        if not result.ok:
            return replace(seen, error=result.told)
        inventory, lease = result.value
        return replace(seen, current=inventory.current, last_good=inventory.last_good, lease=lease)

    def service(self, *, router_needed: bool = True) -> Service:
        """Who serves users right now, without asking the hosts. Raises as `observe`."""
        return Service(self.routed(needed=router_needed), self.answering())

    def _service_proved(self, router_needed: bool) -> Service:
        """As `service`, and which of those that may serve users hang: a green /health says nothing of a stuck scheduler."""
        seen = self.service(router_needed=router_needed)
        asked = [host for host in self.workers if host.name in seen.maybe_serving]
        if self.settings.liveness.every <= 0 or not asked:
            return seen
        with ThreadPoolExecutor(len(asked)) as pool:
            hanging = pool.map(self._hangs, asked)
            return replace(seen, hanging=frozenset(h.name for h, hangs in zip(asked, hanging, strict=True) if hangs))

    def _hangs(self, host: Host) -> bool:
        """Whether a completion of our own gets no answer within the deadline of `liveness`. One that is refused at once is an answer."""
        begun, within = self.clock.monotonic(), self.settings.liveness.within
        try:
            self.client(host, within).generate("alive?", 4)
        except ServingError:
            return self.clock.monotonic() - begun >= within
        return False

    def answering(self) -> frozenset[str]:
        """Names of the workers that answer a health check now, all asked at the same time."""
        with ThreadPoolExecutor(len(self.workers)) as pool:
            healthy = pool.map(lambda host: self.client(host, 5.0).health(), self.workers)
            return frozenset(host.name for host, well in zip(self.workers, healthy, strict=True) if well)

    def routed(self, *, needed: bool = True) -> Routed:
        """One reading of the router: whom it sends requests to. Where it does not answer and is not needed, nothing is known of anybody.

        What it lists and cannot be placed is told once.
        """
        try:
            routed = self.book.place(self.router.workers())
        except RouterError as fault:
            if needed:
                raise
            self._tell_once(f"{fault.message} Going on without it: every worker that answers may be in service.")
            return Routed(silent=fault.message)
        self._tell_once(routed.told())
        return routed

    def _tell_once(self, text: str) -> None:
        if text and text not in self._told:
            self._told.add(text)
            self.progress(text)

    def client(self, host: Host, timeout: float | None = None) -> Client:
        return Client(host.url, host.name, timeout or self.settings.server.request_timeout, self.own)

    def rank_facts(self, host: Host) -> list[dict[str, Any]]:
        """The fact file of every rank of a worker, as the kernel's plugin wrote them."""
        argv = [host.python, "-c", FACTS_PROGRAM, host.root]
        done = self.fleet.session(host).do(op("command", argv=argv, timeout=20))[0]
        return list(json.loads(done["out"]))

    def mixed(self, host: Host, digest: str, *, kernel: bool = True) -> str:
        """Why a worker is not wholly on a release: a rank is missing, reports another one or, where that can be, has fallen back hot
        from the release's kernel (without `kernel`: only by itself, which is its shadow's doing). Empty when all agree."""
        facts = self.rank_facts(host)
        ranks = int(host.labels.get("tp", "1"))
        if len({entry["rank"] for entry in facts}) < ranks:
            return f"{len(facts)} of {ranks} ranks of {host.name} report"
        wrong = [entry for entry in facts if entry.get("release") != digest]
        if wrong:
            return f"rank {wrong[0]['rank']} of {host.name} runs release {str(wrong[0].get('release'))[:12]}, not {digest[:12]}"
        fallen = next(
            (entry for entry in facts if entry.get("hot", {}).get("able") and entry["hot"]["choice"] != "candidate"),
            None,
        )
        if fallen and (kernel or fallen["hot"].get("tripped")):
            return f"rank {fallen['rank']} of {host.name} has fallen back to the incumbent's kernel: {fallen['hot'].get('why')}"
        kinds = {(entry.get("backend"), entry.get("variant"), entry.get("build")) for entry in facts}
        return f"the ranks of {host.name} run different kernels: {sorted(map(str, kinds))}" if len(kinds) > 1 else ""

    def seen_mixed(self, host: Host, digest: str, *, kernel: bool = True) -> str:
        """As `mixed`, for looks that come again: empty too while the host cannot be asked. Whether it is lost is for its lease to say."""
        try:
            return self.mixed(host, digest, kernel=kernel)
        except FleetError:
            return ""

    def tripped(self, host: Host, *, ever: bool = False) -> str:
        """Why a rank has fallen back by itself: its shadow saw outputs that differ. Empty when none has, or the host cannot be asked.

        Args:
            ever: also when it was told to go forwards again since.
        """
        try:
            facts = self.rank_facts(host)
        except FleetError:
            return ""
        for entry in facts:
            evidence = (entry.get("shadow") or {}).get("tripped") if ever else None
            if why := entry.get("hot", {}).get("tripped") or (
                evidence and f"shadow: layer {evidence['layer']} differed by {evidence['frobenius']}"
            ):
                return f"rank {entry['rank']} of {host.name} fell back by itself: {why}"
        return ""

    def ordered_back(self, host: Host) -> str:
        """That somebody has ordered the host's hot fallback, who must not be overridden; empty too while it cannot be asked."""
        try:
            return (
                "somebody ordered its hot fallback"
                if self.fleet.session(host).do(op("control.show"))[0]["ordered"]
                else ""
            )
        except FleetError:
            return ""

    # -- changing ------------------------------------------------------------------------------------------------------

    def push(self, bundles: Sequence[Bundle], hosts: Sequence[Host]) -> None:
        """Bring releases onto hosts, side by side; nothing that serves changes. Old ones go first, so that there is room."""
        wanted = [bundle.digest for bundle in bundles]

        def act(session: HostSession) -> int:
            lock = self.take_lock(session)
            ReleaseStore(session, lock).collect(keep=wanted, newest=self.fleet_settings.keep_releases)
            return sum(push(session, lock, bundle).sent for bundle in bundles)

        sent = self.fleet.each(
            act,
            hosts=hosts,
            on_result=lambda r: self.progress(f"{r.host.name}: {'release there' if r.ok else r.reason}"),
        ).check()
        self.progress(f"{len(sent)} workers have the releases, {sum(sent.values()) >> 10} KiB sent")

    def take_out(self, host: Host, seconds: float) -> None:
        """Traffic leaves, if the capacity allows it now; then what is in flight ends, at most so many seconds.

        Raises: CapacityError when too few others serve. RouterError when the worker is not seen out; it then counts as in service.
        """
        self.capacity.require(host)
        try:
            self._empty(host, seconds)
        except PhaseError:
            self.capacity.back(host)
            raise

    def _empty(self, host: Host, seconds: float) -> None:
        if left := drain(
            self.router, host.at_router, lambda: in_flight(self.client(host, ASK_SECONDS)), self.clock, seconds
        ):
            self.progress(f"{host.name} was not seen empty in {seconds:g} s ({left}); its stop gives them its own time")

    def put_in(self, host: Host) -> None:
        """Traffic comes back, after our own completions did, if the host is still this run's."""
        self.prove(host)
        self.take_lock(self.fleet.session(host))
        self.router.add(host.at_router)
        self.capacity.back(host)

    def prove(self, host: Host) -> None:
        """Three completions of our own; ServingError when they do not come."""
        client = self.client(host)
        for _ in range(3):
            answer = client.generate("ready?", 4)
            if len(answer.tokens) != 4:
                raise ServingError(
                    f"{host.name} returned {len(answer.tokens)} tokens of 4.", hint="See its log.", host=host.name
                )

    def switch(self, host: Host, digest: str) -> None:
        """Switch one worker under a lease that is renewed from now on, and put it back into service.

        Raises: a FleetError or ServingError; the host then is back on what it had, or goes back by itself.
        """
        if host.name in self.leases:  # an earlier process of this run was killed half way through this
            self.go_back(host)
        self.take_out(host, self.fleet_settings.service.drain)
        self.progress(f"{host.name} is out of traffic; it switches and restarts under a lease")
        session = self.fleet.session(host)
        try:
            lease = guarded_switch(
                session, self.take_lock(session), self.driver(host), digest, self.ready(host), self._windows()
            )
        except PhaseError:
            self._return_if_serving(host)
            raise
        self.fleet.adopt(lease.session)
        self.leases[host.name] = lease
        self.renewer().add(host.name, lease.id)
        try:
            reason = self.mixed(host, digest)
            if reason:
                raise ServingError(f"{reason}.", hint="The worker goes back.", host=host.name)
            self.progress(f"{host.name} answers; warming up")
            self.warm_up(host)
            self.require_agreement(host)
            self.put_in(host)
        except PhaseError:
            self.go_back(host)
            raise

    def restart_same(self, host: Host) -> None:
        """Restart a worker on the release it has, so that it is as old as a canary."""
        self.take_out(host, self.fleet_settings.service.drain)
        self.progress(f"{host.name} is out of traffic; it restarts")
        session = self.fleet.session(host)
        lock = self.take_lock(session)
        driver, ready = self.driver(host), self.ready(host)
        session.do(
            lock.taking(),  # in one batch with the restart: who was suspended in between restarts nothing
            driver.restarting(host),
            waiting(driver, ready.port, ready.path, ready.timeout),
            timeout=ready.timeout + driver.drain + 30,
        )
        self.progress(f"{host.name} answers; warming up")
        self.warm_up(host)
        self.put_in(host)

    def go_back(self, host: Host, target: str = "") -> str:
        """Put one worker back on its last-good release (or `target`) and into service; returns the digest it runs.

        Raises: CapacityError when it serves, and too few others do.
        """
        self.capacity.require(host, certain=False)
        if self._renewer:
            self._renewer.drop(host.name)
        try:
            self._empty(host, min(5.0, self.fleet_settings.service.drain))
        except (
            RouterError
        ) as fault:  # the host can go back all the same; that it gets its traffic again is asked for below
            self.progress(f"{host.name}: {fault.message} Its requests get the time of its stop.")
        session = self.fleet.session(host)
        driver, ready = self.driver(host), self.ready(host)
        now = switch_back(session, self.take_lock(session), driver, ready, target=target)
        self.leases.pop(host.name, None)
        # A lease that was cancelled has restarted the service, but waits for nothing.
        wait_ready(driver, session, ready.port, ready.path, ready.timeout)
        self.put_in(host)
        return now

    def keep(self, host: Host, digest: str) -> None:
        """The release stays on this host and becomes its last-good."""
        if self._renewer:
            self._renewer.drop(host.name)
        session = self.fleet.session(host)
        lock = self.take_lock(session)
        state = read_lease(session)
        if state and state.active:
            Lease(session, lock.token, lease_id=state.id).keep()
            return
        inventory = read_inventory(session)
        if not inventory.current == inventory.last_good == digest:  # else an earlier process of this run came so far
            why = f"{state.state}: {state.reason}" if state else "there is none"
            raise LeaseError(
                f"{digest[:12]} is not under a lease of this run any more ({why}), so it does not become last-good.",
                hint="See `phase status` for what runs, and begin anew.",
                host=host.name,
            )

    def warm_up(self, host: Host) -> None:
        """Sweeps of requests until two in a row agree; ServingError for a worker that keeps warming."""
        settings, client, previous = self.settings.warm_up, self.client(host), None
        for _ in range(settings.sweeps):
            times = sorted(client.generate(f"warm up {n} " * 8, 8).seconds for n in range(settings.requests))
            median = times[len(times) // 2]
            if previous is not None and abs(median - previous) <= settings.agree * min(median, previous):
                return
            previous = median
        raise ServingError(
            f"{host.name} is still warming after {settings.sweeps} sweeps.",
            hint="Allow more `warm_up.sweeps`.",
            host=host.name,
        )

    def agreement(self, host: Host) -> Agreement:
        """A worker's outputs judged by one on the incumbent; where none is left, by its own plain prefill."""
        routed = self.routed()
        others = [other for other in self.workers if routed.in_service(other.name) and other.name not in self.leases]
        teacher = next(
            (other for other in others if other.labels.get("tp") == host.labels.get("tp")), (*others, host)[0]
        )
        return compare(self.client(host), self.client(teacher), self.settings.agreement)

    def require_agreement(self, host: Host) -> None:
        """ServingError when a worker's outputs are not the incumbent's: users must not see them."""
        if self.settings.agreement.prompts == 0:
            return
        found = self.agreement(host)
        self.agreements.append(found)
        if found.reason:
            raise ServingError(
                f"{found.reason}.", hint="The worker goes back; no user was served by it.", host=host.name
            )
        whose = (
            "its own plain prefill's, since nobody runs the incumbent any more"
            if found.teacher == host.name
            else f"{found.teacher}'s"
        )
        self.progress(
            f"{host.name}: outputs agree with {whose}: {found.error:.2g} nats a token apart over {found.n} tokens"
        )

    def lost_leases(self) -> dict[str, str]:
        """Workers whose lease could not be renewed, and why."""
        return self._renewer.lost() if self._renewer else {}

    def logs(self, host: Host, lines: int = 40) -> str:
        try:
            return self.driver(host).logs(self.fleet.session(host), lines)
        except FleetError as fault:
            return f"no log: {fault.message}"

    # -- pieces --------------------------------------------------------------------------------------------------------

    def take_lock(self, session: HostSession) -> HostLock:
        """This run's lock on a host, taken again after a broken session; HostLockedError when another run holds it, or another rollback."""
        name = session.host.name
        held = self.locks.get(name)
        lock = HostLock(session, self.purpose, token=held.token if held else self.token)
        try:
            lock.acquire()
        except HostLockedError:
            seen = show_lock(session) if self.preempt else None
            if seen is None or is_rollback(seen):
                raise
            self.progress(f"{name}: taking over from {seen.owner} ({seen.purpose}, {seen.age:.0f} s)")
            break_lock(session, seen)
            lock.acquire()
        self.locks[name] = lock
        return lock

    def driver(self, host: Host) -> Any:
        """What starts and stops a worker's service."""
        return self.fleet_settings.service.driver(host)

    def ready(self, host: Host) -> Ready:
        """When a worker counts as up."""
        return Ready(int(host.values["port"]), host.labels.get("health", "/health"), self.fleet_settings.service.ready)

    def _windows(self) -> Windows:
        return Windows(self.fleet_settings.lease.arm, self.fleet_settings.lease.bake, self.turns().of(len(self.leases)))

    def turns(self) -> Turns:
        """Without the toolkit hosts go back in groups that keep to the floor too."""
        return Turns(
            max(1, len(self.workers) - self.capacity.floor),
            self.fleet_settings.service.drain + self.fleet_settings.service.ready,
        )

    def renewer(self) -> Renewer:
        """What keeps this process's leases alive from the first one on."""
        if self._renewer is None:
            self._renewer = Renewer(self.workers, self.fleet_settings.lease.bake, self.turns())
        return self._renewer

    def _return_if_serving(self, host: Host) -> None:
        try:
            self.put_in(host)
        except PhaseError as fault:
            self.progress(f"{host.name} stays out of service: {fault.message}")
