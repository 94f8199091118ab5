"""The steps of Phase 4; `phases.full_rollout` puts them in order.

Each wave moves and is then judged against the workers not yet moved. Everything moved stays under leases until the soak has
passed: a toolkit that dies half way leaves a fleet that goes back by itself. Only then does the candidate become last-good.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from phases.analysis.decision import Outcome
from phases.engine.closing import ledger_of
from phases.engine.files import write_json
from phases.engine.phase_run import PhaseRun
from phases.engine.steps import Facts, Step, StepContext
from phases.errors import Exit, FleetError
from phases.fleet.host import Host
from phases.ledger.checkpoint import RESULTS
from phases.results import Measurement, Results
from phases.rollout import judging
from phases.rollout.arms import batches, waves
from phases.rollout.bake import Verdict
from phases.rollout.canary import FLEET, bring_up, names, together
from phases.rollout.live import Live, fleet_settings
from phases.rollout.production import Production
from phases.rollout.reference import Level
from phases.rollout.report import table
from phases.rollout.rollback import roll_back
from phases.rollout.soak import Soak
from phases.serving.environment import environment_facts

PUSH, SOAK, FINISH, REPORT = "push the releases", "soak", "make it last-good", "write the report"


def wave_name(number: int) -> str:
    return f"wave {number}"


def waves_of(run: PhaseRun) -> list[tuple[Host, ...]]:
    """Who moves when; pure."""
    return waves(fleet_settings(run).workers(), run.settings.waves, [])


def look_at_fleet(run: PhaseRun, live: Live) -> Step:
    """Every worker is well and on a release recorded as good, or was moved by an earlier process of this run."""

    def look(context: StepContext) -> Facts:
        environment = environment_facts(live.settings.server, context.progress)
        bundles = live.bundles(context, environment)
        bring_up(run, live, context, bundles)
        states = live.production(context).observe()
        ill = [f"{s.host.name}: {s.error or 'does not serve'}" for s in states if s.error or not s.serving or not s.in_service]
        if ill:
            raise FleetError(f"{len(ill)} workers are not well before anything has moved: {'; '.join(ill)}.", hint="Mend them, or take them out of the playbook.")
        return {"environment": environment, "workers": [s.describe() for s in states], "digests": {side: b.digest for side, b in bundles.items()}}

    detail = tuple(f"wave {n}: {names(wave)}" for n, wave in enumerate(waves_of(run), 1))
    return Step(FLEET, f"{len(fleet_settings(run).workers())} workers reached, serving, in service", look, detail=detail)


def push_releases(run: PhaseRun, live: Live) -> Step:
    def push(context: StepContext) -> Facts:
        production = live.production(context)
        bundles = live.bundles(context, context.facts[FLEET]["environment"])
        production.push(list(bundles.values()), production.workers)
        return {side: bundle.digest for side, bundle in bundles.items()}

    return Step(PUSH, "the candidate onto every host; nothing that serves changes", push)


def wave(run: PhaseRun, live: Live, number: int, moving: tuple[Host, ...], unmoved: tuple[Host, ...]) -> Step:
    """Move one wave and judge it against those not yet moved."""
    against_whom = f"judged against {names(unmoved)}" if unmoved else "judged in the soak"

    def measure(context: StepContext) -> dict[str, Any]:
        if stopped(run, context):
            return {}
        production, digest = live.production(context), context.facts[PUSH]["candidate"]
        with judging.traffic(run, production, live.settings.load) as summaries:
            lost = _move(production, moving, digest, context)
            budget = live.settings.failure_budget.of(len(production.workers))
            already = run.gathered(context).facts.get("lost", {})
            if len({**already, **lost}) > budget:
                reason = f"{len({**already, **lost})} workers failed, the budget is {budget}: {'; '.join(lost.values())}"
                return _stop(production, reason, context.clock.now(), {"lost": {**already, **lost}})
            if not unmoved:
                return {"facts": {"lost": {**already, **lost}, f"wave {number}": "moved"}}
            moved = [host for host in moving if host.name not in lost]
            verdict = judging.judge(run, production, run.settings.judge, moved, unmoved, digest, context)
            context.progress(f"wave {number}: {verdict.outcome.value}: {verdict.reason}")
            ended = _after(production, number, verdict, context, {**already, **lost})
        return {**ended, "measurements": tuple(_of_wave(number, row) for row in judging.measurements(verdict, summaries))}

    def holds(context: StepContext, facts: Facts) -> bool:
        digest = context.facts[PUSH]["candidate"]
        states = {s.host.name: s for s in live.production(context).observe()}
        kept = all(states[h.name].current == digest and states[h.name].in_service for h in moving)
        return stopped(run, context) or kept

    step = run.results_step(wave_name(number), f"{names(moving)} move under leases, {against_whom}", measure)
    return dataclasses.replace(step, holds=lambda context, facts: step.holds(context, facts) and holds(context, facts))  # type: ignore[misc]


def soak(run: PhaseRun, live: Live) -> Step:
    """The whole fleet on the candidate, held against what the control of Phase 3 was."""

    def measure(context: StepContext) -> dict[str, Any]:
        if stopped(run, context):
            return {}
        production, digest = live.production(context), context.facts[PUSH]["candidate"]
        reference = recorded_reference(run)
        with judging.traffic(run, production, live.settings.load) as summaries:
            verdict = Soak(production, run.settings.judge, reference, digest, context).run(run.settings.soak)
            context.progress(f"soak: {verdict.outcome.value}: {verdict.reason}")
            if verdict.outcome is Outcome.FAIL:
                stop = _stop(production, f"soak: {verdict.reason}", context.clock.now(), {})
                return {**stop, "measurements": (_passed("soak_passed", verdict), *(d.measurement() for d in verdict.decisions))}
        rows = (_passed("soak_passed", verdict), *(d.measurement() for d in verdict.decisions), *judging.load_rows(summaries))
        return {"measurements": rows, "facts": {"soak": {"outcome": verdict.outcome.value, "seconds": verdict.seconds, "reason": verdict.reason},
                                                "reference": [level.to_json() for level in verdict.reference]}}  # fmt: skip

    return run.results_step(SOAK, f"{run.settings.soak:g} s with the whole fleet on the candidate, against the reference of Phase 3", measure)


def finish(run: PhaseRun, live: Live) -> Step:
    """The candidate becomes what a rollback goes to, or the exit code says how going back ended."""

    def end(context: StepContext) -> Facts:
        production, kept = live.production(context), run.gathered(context).facts
        if kept.get("stopped") or kept.get("soak", {}).get("outcome") != Outcome.PASS.value:
            back = kept.get("rollback")
            if not back or not back["verified"]:
                reason = kept.get("stopped") or f"the soak ended as {kept.get('soak', {}).get('outcome', 'nothing')}"
                back = roll_back(production, reason, detected=context.clock.now()).to_json()
            code = Exit.ROLLED_BACK if back["verified"] else Exit.ROLLBACK_INCOMPLETE
            return {"rollback": back, "exit_code": int(code)}
        digest = context.facts[PUSH]["candidate"]
        before = {row["last_good"] for row in context.facts[FLEET]["workers"]} - {digest}
        for host in production.workers:
            production.keep(host, digest)
        left = [s.host.name for s in production.observe() if s.current != digest or s.last_good != digest]
        if left:
            raise FleetError(f"{', '.join(left)} could not be recorded as good.", hint="Look at `phase status`, then `phase run --resume`.")
        context.progress(f"{digest[:12]} is last-good on {len(production.workers)} workers")
        return {"last_good": digest, "previous": before.pop() if len(before) == 1 else ""}

    return Step(FINISH, "the candidate is recorded as last-good on every host", end)


def write_report(run: PhaseRun) -> Step:
    def write(context: StepContext) -> Facts:
        results = run.gathered(context)
        facts = {**results.facts, "end": context.facts.get(FINISH, {}), "sequential": _all_looks(results)}
        rollback = facts["end"].get("rollback")
        if rollback and "timeline" not in facts:
            facts["timeline"] = rollback["timeline"]
        results = dataclasses.replace(results, facts=facts)
        run.checkpoint_files.mkdir(parents=True, exist_ok=True)
        write_json(run.checkpoint_files / RESULTS, results.to_json())
        run.add_file("rollout.txt", table(results).encode())
        return {}

    return Step(REPORT, "results.json, each wave's looks, the timeline", write)


def stopped(run: PhaseRun, context: StepContext) -> bool:
    """Whether an earlier wave went back: nothing moves any more in this run."""
    return bool(run.gathered(context).facts.get("stopped"))


def recorded_reference(run: PhaseRun) -> tuple[Level, ...]:
    """Latencies of the control in this playbook's latest passed Phase 3; empty when there is none."""
    ledger = ledger_of(run.playbook)
    passed = [c for c in ledger.checkpoints() if c.phase == "tp8-canary" and c.verdict.advances]
    if not passed:
        return ()
    results = Results.from_json(json.loads(ledger.files(passed[-1])[RESULTS]))
    return tuple(Level.from_json(row) for row in results.facts.get("reference", []))


def _all_looks(results: Results) -> list[dict[str, Any]]:
    """The looks of every wave, each test's name saying of which."""
    prefix = "looks of "
    found = {key.removeprefix(prefix): rows for key, rows in results.facts.items() if key.startswith(prefix)}
    return [{**row, "name": f"{which}: {row['name']}"} for which, rows in found.items() for row in rows]


def _move(production: Production, moving: tuple[Host, ...], digest: str, context: StepContext) -> dict[str, str]:
    """Switch the wave's workers in batches under the floor; who failed, and why. They are back on what they had."""
    lost: dict[str, str] = {}
    here = {s.host.name: s for s in production.observe()}
    todo = tuple(h for h in moving if not (here[h.name].current == digest and here[h.name].in_service))
    floor = production.settings.min_available.of(len(production.workers))
    for batch in batches(todo, len(production.routed()), floor):
        for host, fault in together(batch, lambda host: production.switch(host, digest)).items():
            lost[host] = str(fault)
        context.progress(f"{names(batch)}: " + (f"{', '.join(lost)} failed" if lost else f"on {digest[:12]}, in service"))
    return lost


def _after(production: Production, number: int, verdict: Verdict, context: StepContext, lost: dict[str, str]) -> dict[str, Any]:
    evidence = {f"wave {number}": verdict.outcome.value, "lost": lost, f"looks of wave {number}": verdict.facts()}
    if verdict.fault and verdict.fault.incumbent:
        return {"facts": {**evidence, "stopped": f"the incumbent is what is sick: {verdict.reason}"}}
    if verdict.outcome is not Outcome.PASS:
        return _stop(production, f"wave {number}: {verdict.reason}", context.clock.now(), evidence)
    return {"facts": evidence}


def _stop(production: Production, reason: str, detected: float, facts: dict[str, Any]) -> dict[str, Any]:
    back = roll_back(production, reason, detected=detected)
    return {"facts": {**facts, "stopped": reason, "rollback": back.to_json(), "timeline": list(back.events)}}


def _of_wave(number: int, row: Measurement) -> Measurement:
    return dataclasses.replace(row, metric=f"wave{number}_{row.metric}")


def _passed(name: str, verdict: Verdict) -> Measurement:
    value = {Outcome.PASS: 1.0, Outcome.FAIL: 0.0}.get(verdict.outcome)
    return Measurement(name, value, value, value, n=1, source=verdict.reason)


