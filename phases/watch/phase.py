"""Guarding production after a rollout: every worker well, latencies against the recorded reference, back by policy.

One look may be a passing burst: a regression counts when a second look, with fresh observations, finds it again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from phases.base.clock import Clock
from phases.base.errors import Exit, LedgerError
from phases.base.verdict import Verdict
from phases.engines.embedded.taken_down import require_up
from phases.engines.ssh.errors import RouterError
from phases.fleet import judging
from phases.fleet.live import open_production, section
from phases.fleet.traffic import own_load
from phases.full_rollout.steps import recorded_reference
from phases.playbook.schema import Playbook
from phases.production.production import ROLLBACK, Production
from phases.rollback.by_hand import before_rollout, recorded
from phases.rollback.steps import roll_back
from phases.rollback.takeover import claim
from phases.run.phase_run import PhaseRun
from phases.run.session import adhoc_run
from phases.run.steps import StepContext
from phases.trial.end import Fault, TrialEnd
from phases.trial.looks import Looks
from phases.trial.reference import Reference
from phases.watch.settings import WatchSettings

PHASE = "watch"


def watch(
    playbook: Playbook, *, once: bool, clock: Clock, progress: Callable[[str], None]
) -> tuple[Exit, dict[str, Any]]:
    """Look again and again, or once (for cron).

    Returns:
        PASSED after a good look with `once`; ROLLED_BACK or ROLLBACK_INCOMPLETE after a regression that was rolled back;
        GATE_FAILED after one that the policy only reports; INCONCLUSIVE when one look had too little traffic, or the router was silent.
    Raises:
        UsageError: the embedded fleet was taken down, before or meanwhile: that is no regression.
    """
    require_up(playbook)
    run = adhoc_run(playbook, PHASE, clock)
    settings: WatchSettings = section(run, "watch")
    with open_production(run, "watch", clock, progress) as production, own_load(run, production):
        while True:
            trial_end = _look(run, production, settings, clock, progress)
            if trial_end.verdict is Verdict.FAIL:
                progress(f"looking again before anything is done: {trial_end.reason}")
                clock.sleep(settings.judge.window)  # what was found by asking once may be over in a moment
                trial_end = _look(run, production, settings, clock, progress)
            if trial_end.verdict is Verdict.FAIL:
                require_up(playbook, going_down=True)
                return _regression(run, production, settings, trial_end, clock, progress)
            if once:
                code = Exit.PASSED if trial_end.verdict is Verdict.PASS else Exit.INCONCLUSIVE
                return code, {"verdict": trial_end.verdict.value, "reason": trial_end.reason}
            if (
                trial_end.fault
            ):  # nothing was watched: a rollout judges itself just now, or the router does not say who serves
                progress(f"looking again in {settings.interval:g} s: {trial_end.reason}")
                clock.sleep(settings.interval)


def _look(
    run: PhaseRun, production: Production, settings: WatchSettings, clock: Clock, progress: Callable[[str], None]
) -> TrialEnd:
    """What is found at once, or a soak of one interval. A router that does not answer says nothing about the workers."""
    try:
        fault = _standing(production)
    except RouterError as silent:
        fault = Fault("router", silent.message, incumbent=True)
    if fault:
        return TrialEnd(Verdict.INCONCLUSIVE if fault.incumbent else Verdict.FAIL, (), Looks(), 0.0, fault)
    context = StepContext(Path(), {}, progress, clock)
    try:
        reference = recorded_reference(run)
    except LedgerError as damaged:  # a ledger in disorder leaves nobody unwatched
        progress(f"watching without the latencies of Phase 3: {damaged.told}")
        reference = Reference()
    return judging.soak(production, settings.judge, settings.reference, reference, "", context, settings.interval)


def _standing(production: Production) -> Fault | None:
    """A worker that is not what it should be. While a canary or a rollout is under way, watching is its own business."""
    for state in production.observe():
        name = state.host.name
        if state.lease and state.lease.active:
            return Fault(
                name, "is under a lease: a canary or a rollout is under way, and judges itself", incumbent=True
            )
        if not state.serving:
            return Fault(name, state.error or "does not answer", incumbent=False)
        if state.in_service is None:
            return Fault("router", f"{name}: {state.unserved}", incumbent=True)
        if not state.in_service:
            return Fault(name, "gets no traffic: the router does not have it", incumbent=False)
        if state.error:
            production.progress(f"{name} serves users, and cannot be asked what it runs: {state.error}")
            continue
        if state.current != state.last_good:
            return Fault(
                name,
                f"runs {state.current[:12]}, which is not its last good release {state.last_good[:12]}",
                incumbent=False,
            )
        if reason := production.seen_mixed(state.host, state.current):
            return Fault(name, reason, incumbent=False)
    return None


def _regression(
    run: PhaseRun,
    production: Production,
    settings: WatchSettings,
    trial_end: TrialEnd,
    clock: Clock,
    progress: Callable[[str], None],
) -> tuple[Exit, dict[str, Any]]:
    found = {"verdict": trial_end.verdict.value, "reason": trial_end.reason}
    production.teller.regression(trial_end.reason, rolls_back=settings.roll_back)
    if not settings.roll_back:
        return Exit.GATE_FAILED, found
    detected = clock.now()
    production.purpose = f"{ROLLBACK} watch: {trial_end.reason}"
    target = "" if claim(production) else before_rollout(run.playbook, production)
    back = roll_back(production, f"watch: {trial_end.reason}", detected=detected, target=target)
    ended = recorded(run, back, detected, clock, progress, back.exit_code)
    return ended.code, {**found, "rollback": back.to_json(), "checkpoint": ended.checkpoint.name}
