"""Rolling production back by hand: from any terminal, in any state, during any phase.

It takes over the hosts from whatever run holds them, brings every worker to a release that was verified good, and tells how it
ended by what is observed. It leaves a checkpoint of its own with the timeline.

Order: first running servers fall back hot, and until then nothing is done, and hardly anything imported, that is not needed to find
the hosts, to know them by their keys, and to see on each whether it runs what it should. Git, ledger, router, locks, notifications
and restarts come after, when traffic is safe already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from phases.base.clock import Clock
from phases.base.errors import Exit, PhaseError, UsageError
from phases.engines.embedded.taken_down import require_up
from phases.playbook.phase_kinds import ROLLBACK_PHASE
from phases.playbook.schema import Playbook
from phases.production import hot
from phases.production.hot import Hosts, HotSwitch

if TYPE_CHECKING:
    from phases.ledger.checkpoint import Checkpoint
    from phases.rollback.by_hand import Ended
    from phases.rollback.steps import Rollback


class RollbackInterrupted(PhaseError):
    """Somebody, or the system, stopped a rollback half way."""

    stage = "rollback"
    exit_code = Exit.ROLLBACK_INCOMPLETE


def roll_back_now(
    playbook: Playbook,
    *,
    to: str,
    reason: str,
    clock: Clock,
    progress: Callable[[str], None],
    restore: bool = True,
    below_floor: bool = False,
) -> Ended:
    """Roll production back and record it: traffic safe by the hot fallback where that works, then restored by restarts.

    Args:
        restore: false: stop at safe.
        below_floor: restart workers also where fewer than `min_available` then serve.
        to: a checkpoint whose release to go to; empty: what each host records as last-good, or, when all of them run that
            already, the release before the latest full rollout.
    Raises:
        UsageError: the checkpoint names no release that passed a full rollout, or the fleet was taken down. RollbackInterrupted: by
            Ctrl-C or a signal.
    """
    detected = clock.now()
    require_up(playbook)
    try:
        with hot.hosts_of(playbook, clock, ROLLBACK_PHASE) as hosts:
            target = _release_of(playbook, to) if to else ""
            first = _make_safe(hosts, target, restore, progress)
            return _finish(
                playbook, hosts, first, target, reason, detected, progress, restore=restore, below_floor=below_floor
            )
    except KeyboardInterrupt:
        raise RollbackInterrupted(
            "it was stopped before its end: workers may run either release.",
            hint="Give it again; it does what is left.",
        ) from None


def _release_of(playbook: Playbook, to: str) -> str:
    from phases.rollback.by_hand import release_of

    return release_of(playbook, to)


def _make_safe(hosts: Hosts, target: str, restore: bool, progress: Callable[[str], None]) -> HotSwitch | None:
    """The hot fallback, said at once; None where a rollback with restarts is not to begin with it."""
    if restore and not hosts.settings.fallback.hot:
        return None
    done = hot.fall_back(hosts, target=target) if restore else hot.fall_back_by_hand(hosts, target)
    if done.affected:
        progress(f"{'traffic is safe' if done.safe else 'not all traffic is safe yet'}: {done.describe()}")
    return done


def _finish(
    playbook: Playbook,
    hosts: Hosts,
    first: HotSwitch | None,
    target: str,
    reason: str,
    detected: float,
    progress: Callable[[str], None],
    *,
    restore: bool,
    below_floor: bool,
) -> Ended:
    """All that users do not wait for: restarts if wanted, the record, who is told."""
    from phases.fleet.live import open_production
    from phases.production.production import ROLLBACK
    from phases.rollback import by_hand
    from phases.rollback.steps import roll_back, safe_only
    from phases.rollback.takeover import claim
    from phases.run.session import adhoc_run

    clock = hosts.clock
    run = adhoc_run(playbook, ROLLBACK_PHASE, clock)
    with open_production(run, f"{ROLLBACK} {reason}", clock, progress, reached=hosts.fleet) as production:
        production.preempt, production.below_floor = True, below_floor
        if restore:
            waited = claim(
                production
            )  # then another rollback has just decided where to go, and each host knows it as its last-good
            target = target or ("" if waited else by_hand.before_rollout(playbook, production))
            done = first if first and first.affected else None
            ended = roll_back(production, reason, detected=detected, target=target, by_hand=True, hot_done=done)
            if not (target or ended.moved or waited):
                progress(
                    "every worker ran its last-good release already, and no rollout is known that could be taken back: nothing was changed. "
                    "`phase rollback --to CHECKPOINT` names a release."
                )
        else:
            ended = safe_only(production, reason, detected=detected, target=target, hot_done=first)
    return by_hand.recorded(run, ended, detected, clock, progress, _code(ended, only_safe=not restore))


def undo_hot(
    playbook: Playbook, *, reason: str, clock: Clock, progress: Callable[[str], None]
) -> tuple[HotSwitch, Checkpoint]:
    """Servers that fell back hot to the candidate's kernel again: a fallback that turned out not to be needed. Recorded as a checkpoint.

    Raises:
        UsageError: none has fallen back. HostLockedError: a run holds a host. PhaseError: it could not be recorded; the servers have switched.
    """
    from phases.fleet.live import open_production
    from phases.rollback import by_hand
    from phases.run.session import adhoc_run

    begun, run = clock.now(), adhoc_run(playbook, ROLLBACK_PHASE, clock)
    with open_production(run, f"undo of a hot fallback: {reason}", clock, progress) as production:
        fallen = hot.fallen_back(production)
        if not fallen:
            raise UsageError("no server has fallen back hot.", hint="`phase rollback --hot` would do that.")
        switch = hot.go_forward(production, fallen)
    try:
        return switch, by_hand.record_undone(run, switch, reason, begun, clock, progress)
    except PhaseError as fault:
        progress(f"{switch.describe()}; what failed is only to write that down")
        fault.exit_code = Exit.ROLLBACK_INCOMPLETE if switch.missing else fault.exit_code
        raise


def _code(ended: Rollback, *, only_safe: bool) -> Exit:
    """A rollback asked for that ends where it should has passed: 0; else a person is needed."""
    return Exit.PASSED if ended.verified or (only_safe and ended.state == "safe") else Exit.ROLLBACK_INCOMPLETE
