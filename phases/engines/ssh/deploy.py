"""One host from its present release to another and back, in few round trips and with the lease in between."""

from __future__ import annotations

from dataclasses import dataclass

from phases.base.clock import Clock
from phases.base.errors import FleetError
from phases.engines.ssh.bundle import Bundle
from phases.engines.ssh.errors import LeaseError, ServiceError, UnreachableError, code_of
from phases.engines.ssh.lease import Lease, read_lease
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.releases import NEVER, Pushed, ReleaseStore, parse_inventory, rollback_target
from phases.engines.ssh.services import ServiceDriver, stop, waiting
from phases.engines.ssh.session import HostSession, op

PUT_BACK = "rolled back by the toolkit"  # why a lease ended, as the host records it
GOING_BACK_SECONDS = 60.0  # for a guard's restart, beyond the time requests in flight get


@dataclass(frozen=True)
class Ready:
    """When a service counts as up, seen from its own host."""

    port: int
    path: str = "/health"
    timeout: float = 300.0  # seconds


@dataclass(frozen=True)
class Windows:
    """Seconds a lease lasts: from arming until the confirmation must have come, and from each renewal on.

    `turn`: as in `Lease.confirm`.
    """

    arm: float
    bake: float
    turn: float = 0.0


def push(session: HostSession, lock: HostLock, bundle: Bundle) -> Pushed:
    """Take the lock and bring the release onto the host, with the values its launch arguments need."""
    lock.held = True
    return ReleaseStore(session, lock).push(bundle, first=[op("describe", values=session.host.values)])


def first_release(session: HostSession, lock: HostLock, driver: ServiceDriver, digest: str, ready: Ready) -> None:
    """Put a host that has nothing on its first release and record it as good."""
    store = ReleaseStore(session, lock)
    steps = [
        lock.taking(),
        store.switching(digest),
        driver.restarting(session.host),
        waiting(driver, ready.port, ready.path, ready.timeout),
    ]
    session.do(*steps, op("release.good", digest=digest, token=lock.token), timeout=ready.timeout + driver.drain + 60)


def guarded_switch(
    session: HostSession, lock: HostLock, driver: ServiceDriver, digest: str, ready: Ready, windows: Windows
) -> Lease:
    """Arm, switch, restart and wait in one batch; then confirm over a new connection.

    Returns the confirmed lease, whose session replaces the one passed in. It must now be renewed, and kept or cancelled.

    Raises: ServiceError when the new release does not come up, after the host was put back at once; LeaseError when the
        confirmation came too late; UnreachableError when the host cannot be reached: it goes back by itself.
    """
    host = session.host
    if windows.arm <= ready.timeout:
        raise LeaseError(
            f"the lease of {windows.arm:g} s would run out before the {ready.timeout:g} s the service may take to start.",
            hint="Make the arm window longer than the ready timeout plus the drain.",
            host=host.name,
        )
    store, lease = ReleaseStore(session, lock), Lease(session, lock.token)
    previous = session.do(lock.taking(), op("inventory"))[1]["current"]
    limit = driver.drain + 30
    arm = lease.arming(digest, previous, windows.arm, driver.restart_argv(host), driver.stop_argv(host), limit)
    switch = store.switching(digest, lease=lease.id)
    try:
        session.do(
            arm,
            switch,
            driver.restarting(host),
            waiting(driver, ready.port, ready.path, ready.timeout),
            timeout=ready.timeout + limit + 30,
        )
        lease.confirm(windows.bake, windows.turn)
        return lease
    except UnreachableError as fault:
        back = f"If nobody confirms, the host goes back to {_short(previous)} by itself within {windows.arm:g} s."
        raise type(fault)(fault.message, hint=f"{back} {fault.hint}", host=host.name) from None
    except FleetError as fault:
        raise _put_back(lease, driver, ready, fault) from None


def _put_back(lease: Lease, driver: ServiceDriver, ready: Ready, fault: FleetError) -> FleetError:
    """Cancel the lease at once rather than wait for it, and say what the host then runs, with the failed release's last words."""
    try:
        state = read_lease(lease.session)
        if state is None or state.id != lease.id:
            return fault  # it was never armed: nothing has changed
        said = driver.logs(lease.session, 15).strip() if isinstance(fault, ServiceError) else ""
        state = lease.cancel(fault.message[:200])
        end = f"Going back ended as {state.state}: {state.reason}."
        if state.state == "reverted":
            end = f"The host is back on {_short(state.current)}{_whether_it_answers(lease.session, driver, ready, state.current)}."
        end += f" Its last lines:\n{said}" if said else ""
    except FleetError as second:
        end = f"Putting it back failed too ({second.message}); it goes back by itself when the lease runs out."
    fault.hint = f"{fault.hint} {end}".strip()
    return fault


def _whether_it_answers(session: HostSession, driver: ServiceDriver, ready: Ready, current: str) -> str:
    if current == NEVER:
        return ", as before"
    try:
        session.do(waiting(driver, ready.port, ready.path, ready.timeout), timeout=ready.timeout + 30)
    except ServiceError as fault:
        return f", but that does not answer ({fault.message})"
    return ", which answers"


def switch_back(session: HostSession, lock: HostLock, driver: ServiceDriver, ready: Ready, *, target: str = "") -> str:
    """Go back to the recorded last-good release (or `target`): cancels an active lease, otherwise switches. Returns what runs now.

    Does nothing but check the service when the host is there already. Raises: ServiceError when it does not come up.
    """
    inventory = parse_inventory(session.do(lock.taking(), op("inventory"))[1])
    lease = inventory.lease
    if lease and lease["active"]:
        state = Lease(session, lock.token, lease_id=lease["id"]).cancel(PUT_BACK)
        if state.state != "reverted":
            raise LeaseError(
                f"going back ended as {state.state}: {state.reason}.",
                hint="Look at the service's log.",
                host=session.host.name,
            )
        if state.current != NEVER and (not target or state.current == target):
            session.do(waiting(driver, ready.port, ready.path, ready.timeout), timeout=ready.timeout + 30)
            return state.current
    goal = target or rollback_target(inventory, session.host.name)
    ready_check = waiting(driver, ready.port, ready.path, ready.timeout)
    limit = ready.timeout + driver.drain + 60
    if inventory.current == goal and not (lease and lease["active"]) and driver.status(session).running:
        session.do(ready_check, timeout=limit)
        return goal
    store = ReleaseStore(session, lock)
    session.do(store.switching(goal), driver.restarting(session.host), ready_check, timeout=limit)
    return goal


def end_service(session: HostSession, driver: ServiceDriver, clock: Clock, reason: str) -> bool:
    """Stop a host's service for good; whether it ran.

    Its lease ends first, by that very stop, so that no guard starts again what is being stopped. A restart that is under way, because a
    lease has run out just now or a run was killed in the middle of it, is waited for. Safe to repeat.
    """
    limit = clock.monotonic() + driver.drain + GOING_BACK_SECONDS
    ran = driver.status(session).running or bool((lease := read_lease(session)) and lease.active)
    while not _settled(session, reason):
        ran = True  # or is about to
        if clock.monotonic() > limit:
            raise ServiceError(
                "its service is being restarted, for longer than that takes.",
                hint="Look at its log.",
                host=session.host.name,
            )
        clock.sleep(0.2)
    stop(driver, session)
    return ran


def _settled(session: HostSession, reason: str) -> bool:
    """Whether neither a lease nor a restart can start the service again; ends the lease unless a restart is under way."""
    if (lease := read_lease(session)) and lease.active:
        try:
            Lease(session, "", lease_id=lease.id).cancel(reason, stop=True)
        except LeaseError as fault:
            if code_of(fault) != "lease_going_back":
                raise
            return False
    return not session.do(op("service", action="restarting"))[0]["restarting"]


def _short(digest: str) -> str:
    return "no release" if digest == NEVER else digest[:12]
