"""Going back: traffic safe first, then every worker restored, and only what is observed counts as done.

First running servers fall back hot to the incumbent's kernel (`hot`), which takes well under a second. Then workers on the candidate
leave the router as far as the capacity floor allows, and are restored by restarts; the rest in batches under the same floor. The target is each host's own last-good release, never merely the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from phases.base.errors import Exit, PhaseError, joined
from phases.engines.ssh.errors import RouterError
from phases.engines.ssh.host import Host
from phases.engines.ssh.releases import NEVER
from phases.engines.ssh.session import HostSession, op
from phases.production import hot
from phases.production.hot import HotSwitch
from phases.production.production import Production, WorkerState

SAFE_SECONDS = 60.0
RECORD_SECONDS = 60.0


@dataclass
class Timeline:
    """Events in seconds since the regression was detected."""

    detected: float
    now: Callable[[], float]
    events: list[dict[str, Any]] = field(default_factory=list)

    def note(self, event: str, host: str = "", text: str = "", *, at: float | None = None) -> None:
        """`at`: when it happened, seconds since the epoch; default: now."""
        when = self.now() if at is None else at
        self.events.append({"at": round(when - self.detected, 2), "event": event, "host": host, "note": text})

    def at(self, event: str) -> float | None:
        return next((row["at"] for row in self.events if row["event"] == event), None)


@dataclass(frozen=True)
class Rollback:
    """How a rollback ended, from what was observed at its end.

    Attributes:
        verified: every worker runs its last-good release, serves and is in service, and the candidate gets no traffic.
        left: what is not as it should be, by worker.
        hot: what the hot fallback came to; None when it was not tried.
        restores: false: it was to make traffic safe only.
        target: the release it was told to go to; empty: each host's own last-good.
    """

    reason: str
    verified: bool
    events: tuple[dict[str, Any], ...]
    left: dict[str, str]
    moved: tuple[str, ...]
    hot: HotSwitch | None = None
    restores: bool = True
    target: str = ""

    @property
    def state(self) -> str:
        """`restored`: on releases verified good; `safe`: no traffic on the candidate's kernel, restarts still to come; `incomplete`."""
        return "restored" if self.verified else "safe" if self.hot and self.hot.safe else "incomplete"

    @property
    def exit_code(self) -> Exit:
        return Exit.ROLLED_BACK if self.verified else Exit.ROLLBACK_INCOMPLETE

    def to_json(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "verified": self.verified,
            "left": self.left,
            "moved": list(self.moved),
            "timeline": list(self.events),
            "state": self.state,
            "restores": self.restores,
            "hot": self.hot.to_json() if self.hot else None,
            "target": self.target,
        }


def roll_back(
    production: Production,
    reason: str,
    *,
    detected: float,
    target: str = "",
    planned: bool = False,
    by_hand: bool = False,
    hot_done: HotSwitch | None = None,
) -> Rollback:
    """Bring every worker that is not on its last-good release (or `target`) back to it.

    Args:
        detected: when the regression was found, seconds since the epoch; the timeline counts from there.
        target: digest to go to instead, which must have been verified good on the hosts.
        planned: the canary's end, nothing that went wrong: people are told only if it does not succeed.
        by_hand: somebody asked for it, so it restores whatever the playbook says of automatic ones.
        hot_done: the hot fallback, if it has been tried already.
    """
    if not planned:
        production.teller.rollback_started(reason)
    try:
        back = _roll_back(production, reason, detected, target, by_hand or planned, hot_done)
    except BaseException as fault:
        production.teller.rollback_ended(
            reason, (), {"production": str(fault) or type(fault).__name__}, production.clock.now() - detected
        )
        raise
    if back.left or not planned:
        _tell_end(production, back, detected)
    return back


def _tell_end(production: Production, back: Rollback, detected: float) -> None:
    only_safe = not back.restores and back.state == "safe"
    production.teller.rollback_ended(
        back.reason, back.moved, back.left, production.clock.now() - detected, only_safe=only_safe
    )


def safe_only(
    production: Production, reason: str, *, detected: float, target: str = "", hot_done: HotSwitch | None = None
) -> Rollback:
    """The hot fallback (`hot_done`, if it has been tried already) and nothing else: traffic safe at once, restoring left for later."""
    timeline = Timeline(detected, production.clock.now)
    timeline.note("detected", text=reason, at=detected)
    done = hot_done or hot.fall_back_by_hand(production, target)
    _note_hot(done, timeline)
    left = {a.host: a.missing or "on the incumbent's kernel; `phase rollback` restores it" for a in done.affected}
    back = Rollback(
        reason, False, tuple(timeline.events), left, tuple(a.host for a in done.affected), done, restores=False
    )
    production.teller.rollback_started(reason)  # after it: safe within a second comes before telling
    _tell_end(production, back, detected)
    return back


def _note_hot(done: HotSwitch, timeline: Timeline) -> None:
    """Nothing where no host was affected."""
    for answer in done.affected:
        event = "no hot fallback" if answer.missing else "hot fallback"
        timeline.note(
            event,
            answer.host,
            answer.missing
            or f"{len(answer.ranks)} {'rank' if len(answer.ranks) == 1 else 'ranks'} after {answer.seconds:.2f} s",
            at=done.ended,
        )
    if done.safe:
        timeline.note("traffic safe", text=f"hot: {done.describe()}", at=done.ended)


def _fall_back_first(
    production: Production, target: str, hot_done: HotSwitch | None, timeline: Timeline
) -> HotSwitch | None:
    if hot_done is None and not production.settings.fallback.hot:
        return None
    done = hot_done or hot.fall_back(production, target=target)
    _note_hot(done, timeline)
    if done.missing:
        production.progress(f"not hot, so by restart: {joined(f'{host}: {why}' for host, why in done.missing.items())}")
    return done


def _roll_back(
    production: Production, reason: str, detected: float, target: str, restore: bool, hot_done: HotSwitch | None
) -> Rollback:
    timeline = Timeline(detected, production.clock.now)
    timeline.note("detected", text=reason, at=detected)
    done = _fall_back_first(production, target, hot_done, timeline)
    states = production.observe(router_needed=False)
    moved = sorted(
        (s for s in states if strayed(s, target)), key=lambda s: s.current == (target or s.last_good)
    )  # what still serves the candidate first
    if (
        done
        and done.safe
        and not (restore or production.settings.fallback.restore or any(s.lease and s.lease.active for s in moved))
    ):
        left = {s.host.name: "on the incumbent's kernel; `phase rollback` restores it" for s in moved}
        return Rollback(reason, not left, tuple(timeline.events), left, tuple(left), done, restores=False)
    production.progress(
        f"going back on {', '.join(s.host.name for s in moved)}: {reason}"
        if moved
        else "no worker has strayed: none is restarted"
    )
    _make_traffic_safe(production, states, moved, timeline)
    if target:  # before the first restart: a rollback cut short in the middle then goes on the same way, whoever begins it again
        _record_as_good(production, target)
    failed = _restore(production, states, moved, target, timeline)
    if failed:
        failed = _once_more(production, failed, target, timeline)
    observed = _not_restored(production, target)
    left = {name: "; ".join(filter(None, (failed.get(name), observed.get(name)))) for name in (*failed, *observed)}
    if not left and target:
        left = _record_as_good(production, target)
    if not left:
        timeline.note("verified")
    return Rollback(
        reason, not left, tuple(timeline.events), left, tuple(s.host.name for s in moved), done, target=target
    )


def strayed(state: WorkerState, target: str = "") -> bool:
    """Whether it is not what it should be: another release, a lease still running, not serving, or without traffic."""
    goal = target or state.last_good
    if not (state.serving and state.in_service):
        return True
    return bool(state.error) or state.current != goal or bool(state.lease and state.lease.active)


def _make_traffic_safe(
    production: Production, states: list[WorkerState], moved: list[WorkerState], timeline: Timeline
) -> None:
    """Take strayed workers out of the router while enough others stay; with too few others they keep serving until restored."""
    listed = [s.host for s in moved if s.listed]
    out = production.capacity.grant(listed, certain=False)
    for host in out:
        try:
            production.router.remove(host.at_router)
        except RouterError as fault:  # the worker goes back all the same
            production.progress(fault.told)
    kept = (
        f"{production.capacity.floor} must stay available"
        if len(out) < len(listed)
        else _not_gone(production, [s.host for s in moved])
    )
    if not kept:
        text = f"{len(out)} worker{'s' * (len(out) != 1)} out of service" if moved else "no worker has strayed"
        timeline.note("out of service" if timeline.at("traffic safe") is not None else "traffic safe", text=text)
    elif moved:
        timeline.note("traffic reduced", text=f"{len(out)} of {len(moved)} workers out of service; {kept}")


def _not_gone(production: Production, hosts: Sequence[Host]) -> str:
    """Why it cannot be said that none of these gets traffic any more; empty when the router itself says so of each."""
    until = production.clock.monotonic() + SAFE_SECONDS
    while True:
        routed = production.routed(needed=False)
        listed = [host.name for host in hosts if routed.listed(host.name)]
        if not listed:  # not seen is not safe, and waiting resolves no name
            return next((f"{host.name}: {doubt}" for host in hosts if (doubt := routed.doubt(host.name))), "")
        if production.clock.monotonic() >= until:
            return f"the router still lists {', '.join(listed)}"
        production.clock.sleep(0.2)


def _restore(
    production: Production, states: list[WorkerState], moved: list[WorkerState], target: str, timeline: Timeline
) -> dict[str, str]:
    """Every strayed worker back, in batches that respect the floor; what failed, by worker."""
    failed: dict[str, str] = {}
    with_users = production.service(router_needed=False).maybe_serving
    serving_moved = [s.host for s in moved if s.host.name in with_users]
    out_now = production.capacity.grant([s.host for s in moved if s.host not in serving_moved], certain=False)
    serving_moved += [s.host for s in moved if s.host not in (*serving_moved, *out_now)]  # those serve again by now
    floor = production.capacity.floor
    failed |= _restore_together(production, out_now, target, timeline)
    while serving_moved:  # asked anew before each batch: what was to come back may not have
        batch = production.capacity.grant(serving_moved, certain=False)
        if not batch:
            production.progress(
                f"stopped at the floor: {floor} workers must serve, so the others are not restarted "
                "(`phase rollback --below-floor` restarts them)"
            )
            failed |= {host.name: f"still serves, and {floor} workers must" for host in serving_moved}
            timeline.note("stopped at the floor", text=f"{len(serving_moved)} workers left in service")
            break
        serving_moved = [host for host in serving_moved if host not in batch]
        failed |= _restore_together(production, batch, target, timeline)
    if moved and timeline.at("traffic safe") is None and not failed:
        timeline.note("traffic safe", text="the last worker left the candidate")
    if moved and not failed:
        timeline.note("restored")
    return failed


def _once_more(production: Production, failed: dict[str, str], target: str, timeline: Timeline) -> dict[str, str]:
    """What was in the way may be over, such as a run that was in the middle of switching the worker. As `_restore`."""
    states = production.observe(router_needed=False)
    again = [state for state in states if state.host.name in failed and strayed(state, target)]
    if again:
        production.progress(f"once more on {', '.join(state.host.name for state in again)}")
    return _restore(production, states, again, target, timeline)


def _restore_together(production: Production, hosts: Sequence[Host], target: str, timeline: Timeline) -> dict[str, str]:
    """Workers that are out of service anyway, or may be: side by side, since a restart is what takes long."""
    if not hosts:
        return {}
    with ThreadPoolExecutor(min(len(hosts), production.fleet_settings.at_once)) as pool:
        results = list(pool.map(lambda host: _restore_one(production, host, target, timeline), hosts))
    return {name: why for result in results for name, why in result.items()}


def _restore_one(production: Production, host: Host, target: str, timeline: Timeline) -> dict[str, str]:
    try:
        digest = production.go_back(host, target)
    except Exception as fault:  # noqa: BLE001 - whatever it is, it is this worker's failure, and the others go on
        told = fault.told if isinstance(fault, PhaseError) else f"going back: {type(fault).__name__}: {fault}"
        production.progress(f"{host.name}: {told}")
        return {host.name: told}
    timeline.note("worker restored", host.name, digest[:12])
    production.progress(f"{host.name} is back on {digest[:12]}")
    return {}


def _record_as_good(production: Production, target: str) -> dict[str, str]:
    """What all were brought back to is what the next rollback goes to: else that would bring the candidate in again."""

    def act(session: HostSession) -> None:
        session.do(op("release.good", digest=target, token=production.take_lock(session).token))

    results = production.fleet.each(act, deadline=RECORD_SECONDS)
    return {result.host.name: f"{target[:12]} could not be recorded as good: {result.reason}" for result in results.bad}


def _not_restored(production: Production, target: str) -> dict[str, str]:
    left = {}
    for state in production.observe(router_needed=False):
        goal = target or state.last_good
        if state.error:
            left[state.host.name] = state.error
        elif goal in ("", NEVER):
            left[state.host.name] = "no release was ever recorded as good here"
        elif state.current != goal:
            left[state.host.name] = f"runs {state.current[:12]}, not {goal[:12]}"
        elif not state.serving:
            left[state.host.name] = "does not answer"
        elif not state.in_service:
            left[state.host.name] = state.unserved
    return left
