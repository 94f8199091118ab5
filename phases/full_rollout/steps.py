"""The steps of Phase 4; `phases.full_rollout` puts them in order.

Each wave moves and is then judged against the workers not yet moved. Everything moved stays under leases until the soak has
passed: a toolkit that dies half way leaves a fleet that goes back by itself. Only then does the candidate become last-good.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from phases.base.errors import Exit, FleetError, LedgerError, joined
from phases.base.results import Measurement, Results, StageEnd
from phases.base.verdict import Verdict
from phases.engines.ssh.host import Host
from phases.fleet import judging, shared_steps, traffic
from phases.fleet.live import Live, fleet_settings
from phases.fleet.shared_steps import FLEET, PUSH, batches_under_floor, names, together
from phases.ledger.checkpoint import RESULTS
from phases.production.capacity import CapacityError
from phases.production.decided import GOING_BACK, decide, decided
from phases.production.production import Production, WorkerState
from phases.rollback.steps import roll_back
from phases.rollback.takeover import let_others_finish
from phases.run.closing import ledger_of
from phases.run.phase_run import PhaseRun, load_results
from phases.run.progress import of_playbook
from phases.run.steps import Facts, Step, StepContext
from phases.trial.arms import like_for_like, waves
from phases.trial.end import TrialEnd
from phases.trial.reference import Level, Reference, Traffic

SOAK, FINISH = "soak", "make it last-good"
SERVED_IN = "served in "  # a fact of each wave


def wave_name(number: int) -> str:
    return f"wave {number}"


def waves_of(run: PhaseRun) -> list[tuple[Host, ...]]:
    """Who moves when; pure."""
    return waves(fleet_settings(run).workers(), run.settings.waves, [])


def stages(run: PhaseRun) -> list[str]:
    """What must have been judged before a rollout passes."""
    return [*(wave_name(number) for number in range(1, len(waves_of(run)) + 1)), SOAK]


def look_at_fleet(run: PhaseRun, live: Live) -> Step:
    detail = tuple(f"{wave_name(n)}: {names(wave)}" for n, wave in enumerate(waves_of(run), 1))
    return shared_steps.look_at_fleet(run, live, detail)


def push_releases(run: PhaseRun, live: Live) -> Step:
    return shared_steps.push_releases(run, live, fleet_settings(run).workers())


def wave(run: PhaseRun, live: Live, number: int, moving: tuple[Host, ...], unmoved: tuple[Host, ...]) -> Step:
    """Move one wave and judge it against like workers not yet moved."""
    canary, control = like_for_like(moving, unmoved)
    against_whom = (
        f"{names(canary)} judged against {names(control)}"
        if canary
        else "judged in the soak: no like worker is left to compare with"
    )

    def measure(context: StepContext) -> dict[str, Any]:
        if stopped(run, context):
            return {}
        production = live.production(context)
        known = decided(context.work, GOING_BACK)
        with live.traffic(context).during(wave_name(number)) as load:
            if known is None:
                found = _advance(run, live, production, number, moving, unmoved, context)
                known = Results(run.section.name, run.kernel.name, **found)
            ended = _act_on(production, known, context)
        return {
            "facts": {**ended, traffic.during(wave_name(number)): traffic.kept(load)},
            "measurements": known.measurements,
            "ends": known.ends,
        }

    def holds(context: StepContext, facts: Facts) -> bool:
        """What went back, or is to, is not wanted on the candidate any more."""
        if decided(context.work, GOING_BACK) is not None:
            return True
        digest = context.facts[PUSH]["candidate"]
        lost = load_results(context.work / facts["kept"]).facts.get("lost", {})
        states = {s.host.name: s for s in live.production(context).observe()}
        return all(_moved(states[host.name], digest) for host in moving if host.name not in lost)

    step = run.results_step(wave_name(number), f"{names(moving)} move under leases, {against_whom}", measure)
    return dataclasses.replace(step, holds=lambda context, facts: step.holds(context, facts) and holds(context, facts))  # type: ignore[misc]


def _advance(
    run: PhaseRun,
    live: Live,
    production: Production,
    number: int,
    moving: tuple[Host, ...],
    unmoved: tuple[Host, ...],
    context: StepContext,
) -> dict[str, Any]:
    """Move a wave and judge it: facts and measurements. The facts say `stopped` when it may go no further."""
    digest = context.facts[PUSH]["candidate"]
    lost = {**run.gathered(context).facts.get("lost", {}), **_move(production, moving, digest, context)}
    budget = live.settings.failure_budget.of(len(production.workers))
    if len(lost) > budget:
        reason = f"{len(lost)} workers failed, the budget is {budget}: {joined(lost.values())}"
        failed = StageEnd(wave_name(number), Verdict.FAIL, reason)
        return {"ends": (failed,), "facts": {"lost": lost, "stopped": reason, "detected": context.clock.now()}}
    canary, control = like_for_like([host for host in moving if host.name not in lost], unmoved)
    if not canary:
        said = f"{names(moving)} serve on the candidate; no like worker is left to compare with, the soak judges them"
        return {"facts": {"lost": lost}, "ends": (StageEnd(wave_name(number), Verdict.PASS, said),)}
    moved = [host for host in production.workers if host not in unmoved and host.name not in lost]
    trial_end = judging.judge(run, production, run.settings.judge, canary, control, digest, context, moved=moved)
    context.progress(f"wave {number}: {trial_end.verdict.value}: {trial_end.reason}")
    rows = tuple(_of_wave(number, row) for row in judging.measurements(trial_end))
    return {
        "facts": {"lost": lost, **_concluded(number, production, trial_end, context)},
        "measurements": rows,
        "ends": (trial_end.stage(wave_name(number)),),
    }


def _act_on(production: Production, known: Results, context: StepContext) -> dict[str, Any]:
    """Go back if that is what was decided, the decision on disk before anything moves; all facts of it."""
    facts = known.facts
    if "stopped" not in facts:
        return facts
    decide(context.work, GOING_BACK, known)
    if "halted" in facts:
        return facts
    let_others_finish(production)
    back = roll_back(production, facts["stopped"], detected=facts["detected"])
    return {**facts, "rollback": back.to_json(), "timeline": list(back.events)}


def soak(run: PhaseRun, live: Live) -> Step:
    """The whole fleet on the candidate, held against what the control of Phase 3 was."""

    def measure(context: StepContext) -> dict[str, Any]:
        if stopped(run, context):
            return {}
        production, digest = live.production(context), context.facts[PUSH]["candidate"]
        reference = recorded_reference(run)
        with live.traffic(context).during(SOAK) as load:
            known = decided(context.work, GOING_BACK)
            if known is None:
                lost = run.gathered(context).facts.get("lost", {})
                settings = run.settings
                trial_end = judging.soak(
                    production, settings.judge, settings.reference, reference, digest, context, settings.soak, lost
                )
                context.progress(f"soak: {trial_end.verdict.value}: {trial_end.reason}")
                known = Results(run.section.name, run.kernel.name, **_soaked(trial_end, context))
            ended = _act_on(production, known, context)
        return {
            "facts": {**ended, traffic.during(SOAK): traffic.kept(load)},
            "measurements": known.measurements,
            "ends": known.ends,
        }

    return run.results_step(
        SOAK,
        f"{run.settings.soak:g} s with the whole fleet on the candidate, against the reference of Phase 3",
        measure,
    )


def finish(run: PhaseRun, live: Live) -> Step:
    """The candidate becomes what a rollback goes to, or the exit code says how going back ended."""

    def end(context: StepContext) -> Facts:
        production, kept = live.production(context), run.gathered(context).facts
        if kept.get("halted"):
            return {"halted": kept["halted"], "exit_code": int(Exit.OPERATIONAL)}
        if kept.get("stopped"):
            back = kept.get("rollback")
            if not back or not back["verified"]:
                back = roll_back(production, kept["stopped"], detected=kept["detected"]).to_json()
            code = Exit.ROLLED_BACK if back["verified"] else Exit.ROLLBACK_INCOMPLETE
            return {"rollback": back, "exit_code": int(code)}
        digest = context.facts[PUSH]["candidate"]
        before = {row["last_good"] for row in context.facts[FLEET]["workers"]} - {digest}
        lost = kept.get("lost", {})
        moved = [host for host in production.workers if host.name not in lost]
        try:
            for host in moved:
                production.keep(host, digest)
        except FleetError as fault:
            return _not_kept(production, fault, context)
        left = [
            s.host.name
            for s in production.observe()
            if s.host.name not in lost and (s.current != digest or s.last_good != digest)
        ]
        if left:
            raise FleetError(
                f"{', '.join(left)} could not be recorded as good.",
                hint="Look at `phase status`, then `phase run --resume`.",
            )
        context.progress(f"{digest[:12]} is last-good on {len(moved)} workers")
        return {"last_good": digest, "previous": before.pop() if len(before) == 1 else ""}

    return Step(FINISH, "the candidate is recorded as last-good on every host", end)


def _not_kept(production: Production, fault: FleetError, context: StepContext) -> Facts:
    """A host refused: a rollback took it over, or its lease ran out while this process slept. Nothing is decided from what this run
    remembers: production goes where the hosts' last-good says, and what is then observed is the exit code."""
    context.progress(f"not last-good: {fault}")
    let_others_finish(production)
    back = roll_back(production, f"the rollout could not be kept: {fault.message}", detected=context.clock.now())
    end = StageEnd(FINISH, Verdict.FAIL, fault.message)
    return {"rollback": back.to_json(), "exit_code": int(back.exit_code), "stage": end.to_json()}


def write_report(run: PhaseRun) -> Step:
    return shared_steps.report_step(
        run, "rollout.txt", FINISH, lambda results: {"sequential": _all_looks(results), "served": _all_served(results)}
    )


def stopped(run: PhaseRun, context: StepContext) -> bool:
    """Whether an earlier wave went back: nothing moves any more in this run."""
    return bool(run.gathered(context).facts.get("stopped"))


def recorded_reference(run: PhaseRun) -> Reference:
    """Latencies of the control in this playbook's latest passed Phase 3, with where they are from; without levels when there is none.

    Raises:
        LedgerError: they cannot be read.
    """
    ledger = ledger_of(run.playbook)
    passed = [
        c for c in ledger.survey()[0] if c.phase == "tp8-canary" and c.verdict.advances and of_playbook(c, run.playbook)
    ]
    if not passed:
        return Reference()
    try:
        results = Results.from_json(json.loads(ledger.files(passed[-1])[RESULTS]))
        levels = tuple(Level.from_json(row) for row in results.facts.get("reference", []))
        served = results.facts.get("reference_traffic")
        return Reference(
            levels, passed[-1].name, results.kernel, passed[-1].recorded_at, Traffic(**served) if served else None
        )
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise LedgerError(
            f"{passed[-1].name} holds no readable results.", hint=f"See `phase checkpoint verify {passed[-1].number}`."
        ) from fault


def _all_looks(results: Results) -> list[dict[str, Any]]:
    """The looks of every wave, each test's name saying of which."""
    prefix = "looks of "
    found = {key.removeprefix(prefix): rows for key, rows in results.facts.items() if key.startswith(prefix)}
    return [{**row, "name": f"{which}: {row['name']}"} for which, rows in found.items() for row in rows]


def _all_served(results: Results) -> list[dict[str, Any]]:
    """What both arms of every wave served, each arm saying of which."""
    served = {key.removeprefix(SERVED_IN): rows for key, rows in results.facts.items() if key.startswith(SERVED_IN)}
    return [{**row, "arm": f"{which} {row['arm']}"} for which, rows in served.items() for row in rows]


def _move(production: Production, moving: tuple[Host, ...], digest: str, context: StepContext) -> dict[str, str]:
    """Switch the wave's workers in batches under the floor; who failed, and why. They are back on what they had."""
    lost: dict[str, str] = {}
    here = {s.host.name: s for s in production.observe()}
    todo = tuple(host for host in moving if not _moved(here[host.name], digest))
    try:
        for batch in batches_under_floor(production, todo):
            for host, fault in together(batch, lambda host: production.switch(host, digest)).items():
                lost[host] = str(fault)
            context.progress(
                f"{names(batch)}: " + (f"{', '.join(lost)} failed" if lost else f"on {digest[:12]}, in service")
            )
            todo = tuple(host for host in todo if host not in batch)
    except CapacityError as fault:  # who failed before has taken the room of those that are left
        lost |= {host.name: str(fault) for host in todo}
    return lost


def _moved(state: WorkerState, digest: str) -> bool:
    """Whether it serves users on the release, under a lease that still holds or for good."""
    return state.current == digest and state.in_service and (state.leased or state.last_good == digest)


def _concluded(number: int, production: Production, trial_end: TrialEnd, context: StepContext) -> dict[str, Any]:
    facts: dict[str, Any] = {
        f"looks of wave {number}": trial_end.facts(),
        f"{SERVED_IN}{wave_name(number)}": judging.served_facts(production, trial_end),
    }
    if trial_end.fault and trial_end.fault.incumbent:
        said = f"the incumbent is what is sick: {trial_end.reason}"
        return {**facts, "stopped": said, "halted": said, "detected": context.clock.now()}
    if trial_end.verdict is not Verdict.PASS:
        return {**facts, "stopped": f"wave {number}: {trial_end.reason}", "detected": context.clock.now()}
    return facts


def _soaked(trial_end: TrialEnd, context: StepContext) -> dict[str, Any]:
    facts: dict[str, Any] = {"reference": [level.to_json() for level in trial_end.reference]}
    if trial_end.verdict is not Verdict.PASS:
        ended = "" if trial_end.verdict is Verdict.FAIL else f"ended as {trial_end.verdict.value}, "
        facts |= {"stopped": f"soak: {ended}{trial_end.reason}", "detected": context.clock.now()}
    return {
        "facts": facts,
        "measurements": tuple(d.measurement() for d in trial_end.decisions),
        "ends": (trial_end.stage(SOAK),),
    }


def _of_wave(number: int, row: Measurement) -> Measurement:
    return dataclasses.replace(row, metric=f"wave{number}_{row.metric}")
