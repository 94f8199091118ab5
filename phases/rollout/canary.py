"""The steps of Phase 3; `phases.tp8_canary` puts them in order.

However the phase ends, production ends on the incumbent: a canary that passed goes back as well, and the candidate reaches
the fleet only through Phase 4, after review. A canary that failed goes back at once, as a rollback with its timeline.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phases.analysis.decision import Outcome
from phases.engine.files import write_json
from phases.engine.phase_run import PhaseRun
from phases.engine.steps import Facts, Step, StepContext
from phases.errors import Exit, FleetError, PhaseError
from phases.fleet.host import Host
from phases.ledger.checkpoint import RESULTS
from phases.results import Measurement
from phases.rollout import judging
from phases.rollout.arms import Arms, batches, choose_arms
from phases.rollout.live import Live, fleet_settings
from phases.rollout.production import Production
from phases.rollout.report import table
from phases.rollout.rollback import Rollback, roll_back
from phases.serving.environment import environment_facts

FLEET, RELEASES, PUSH, CONTROL, CANARY, BAKE, END, REPORT, LEAVE = (
    "look at the fleet", "make the releases", "push the releases", "restart the control", "switch the canary", "bake",
    "put production back", "write the report", "leave production",
)  # fmt: skip


def arms_of(run: PhaseRun) -> Arms:
    """Who is canary and who control; pure."""
    return choose_arms(fleet_settings(run).workers(), run.settings)


def look_at_fleet(run: PhaseRun, live: Live) -> Step:
    """Every worker is reached, serves and runs the same incumbent; an embedded fleet is brought up first."""
    arms = arms_of(run)
    detail = (f"canary: {names(arms.canary)}", f"control: {names(arms.control)}", f"share of requests exposed: {arms.share:.0%}")

    def look(context: StepContext) -> Facts:
        environment = environment_facts(live.settings.server, context.progress)
        bundles = live.bundles(context, environment)
        bring_up(run, live, context, bundles)
        production = live.production(context)
        states = production.observe()
        ill = [f"{s.host.name}: {s.error or 'does not answer'}" for s in states if s.error or not s.serving]
        if ill:
            raise FleetError(f"{len(ill)} workers are not well before anything has moved: {'; '.join(ill)}.", hint="Mend them, or take them out of the playbook.")
        out = [s.host.name for s in states if not s.in_service]
        if out:
            raise FleetError(f"the router does not send anything to {', '.join(out)}.", hint="Put them into service first.")
        return {"environment": environment, "workers": [s.describe() for s in states], "digests": {side: b.digest for side, b in bundles.items()}}

    return Step(FLEET, f"{len(fleet_settings(run).workers())} workers reached, serving, in service, on one incumbent", look, detail=detail)


def bring_up(run: PhaseRun, live: Live, context: StepContext, bundles: dict[str, Any]) -> None:
    """An embedded fleet starts here; a real one is expected to run."""
    embedded = run.playbook.sections.get("embedded_fleet")
    if embedded is None:
        return
    from phases.embedded.fleet import ensure_up

    ensure_up(embedded, run.repo, run.playbook.name, live.production(context), bundles["incumbent"], context.progress)


def push_releases(run: PhaseRun, live: Live) -> Step:
    arms = arms_of(run)

    def push(context: StepContext) -> Facts:
        production = live.production(context)
        bundles = live.bundles(context, context.facts[FLEET]["environment"])
        production.push(list(bundles.values()), [*arms.canary, *arms.control])
        return {side: bundle.digest for side, bundle in bundles.items()}

    return Step(PUSH, f"both releases onto {names([*arms.canary, *arms.control])}; nothing that serves changes", push)


def restart_control(run: PhaseRun, live: Live) -> Step:
    """As old as the canary will be."""
    arms = arms_of(run)

    def restart(context: StepContext) -> Facts:
        production = live.production(context)
        for batch in _batches(production, arms.control):
            _all_together(batch, production.restart_same)
            context.progress(f"{names(batch)} restarted on the incumbent, warm and in service")
        return {"restarted": [host.name for host in arms.control]}

    return Step(CONTROL, f"{names(arms.control)} restart on the incumbent, so that both arms are equally old", restart)


def switch_canary(run: PhaseRun, live: Live) -> Step:
    """Under a lease that reverts by itself."""
    arms = arms_of(run)

    def switch(context: StepContext) -> Facts:
        production, digest = live.production(context), context.facts[PUSH]["candidate"]
        try:
            for batch in _batches(production, arms.canary):
                _all_together(batch, lambda host: production.switch(host, digest))
                context.progress(f"{names(batch)} on {digest[:12]}: every rank reports it, warm and in service")
        except PhaseError as fault:
            return {"digest": digest, "failed": str(fault), "detected": context.clock.now()}
        return {"digest": digest}

    def holds(context: StepContext, facts: Facts) -> bool:
        names = {host.name for host in arms.canary}
        states = [s for s in live.production(context).observe() if s.host.name in names]
        return "failed" not in facts and all(s.current == facts["digest"] and s.lease and s.lease.active and s.in_service for s in states)

    return Step(CANARY, f"{names(arms.canary)} to the candidate: drain, lease, switch, restart, prove every rank, warm up", switch, holds=holds)


def bake(run: PhaseRun, live: Live) -> Step:
    arms = arms_of(run)

    def measure(context: StepContext) -> dict[str, Any]:
        switched = context.facts[CANARY]
        if "failed" in switched:
            row = Measurement("canary_passed", 0.0, 0.0, 0.0, n=1, source=switched["failed"])
            return {"measurements": (row,), "facts": {"bake": {"outcome": "FAIL", "seconds": 0.0, "reason": switched["failed"]}, "detected": switched["detected"]}}
        production = live.production(context)
        with judging.traffic(run, production, live.settings.load) as summaries:
            verdict = judging.judge(run, production, run.settings.judge, arms.canary, arms.control, switched["digest"], context)
            detected = context.clock.now()
            context.progress(f"{verdict.outcome.value}: {verdict.reason}")
            ended = _end_under_load(production, verdict.outcome, verdict.reason, detected, incumbent=bool(verdict.fault and verdict.fault.incumbent))
        rows = (*judging.measurements(verdict, summaries), judging.share_row(verdict, arms))
        return {"measurements": rows, "facts": {**judging.evidence(production, verdict, summaries), "detected": detected, **ended}}

    settings = run.settings.judge
    shown = ", ".join(f"{m.metric} p{m.quantile * 100:g} within {m.margin:.0%}" for m in settings.metrics)
    return run.results_step(BAKE, f"{shown}; {settings.bake:g} to {settings.deadline:g} s, looked at every {settings.window:g} s", measure)


def _end_under_load(production: Production, outcome: Outcome, reason: str, detected: float, *, incumbent: bool) -> dict[str, Any]:
    """Back to the incumbent while the load still runs, so that what going back costs users is measured too."""
    if incumbent:
        return {"halted": f"the incumbent is what is sick ({reason}); nothing was swapped"}
    back = roll_back(production, reason if outcome is Outcome.FAIL else "the canary has been judged", detected=detected)
    return {"rollback": back.to_json(), "timeline": list(back.events)}


def put_back(run: PhaseRun, live: Live) -> Step:
    """What the bake left, or a failed switch: observed, finished, and told by the exit code."""

    def end(context: StepContext) -> Facts:
        production = live.production(context)
        kept = run.gathered(context).facts
        failed = kept.get("bake", {}).get("outcome") == Outcome.FAIL.value
        if "halted" in kept:
            return {"halted": kept["halted"], "exit_code": int(Exit.OPERATIONAL)}
        back: Rollback | None = None
        if not kept.get("rollback", {}).get("verified"):
            back = roll_back(production, kept.get("bake", {}).get("reason", "the phase ended"), detected=kept.get("detected", context.clock.now()))
        verified = back.verified if back else True
        facts: Facts = {"verified": verified, "rollback": back.to_json() if back else kept["rollback"]}
        if not verified:
            facts["exit_code"] = int(Exit.ROLLBACK_INCOMPLETE)
        elif failed:
            facts["exit_code"] = int(Exit.ROLLED_BACK)
        return facts

    return Step(END, "all workers observed on the incumbent again, in service", end)


def write_report(run: PhaseRun) -> Step:
    def write(context: StepContext) -> Facts:
        results = run.gathered(context)
        run.checkpoint_files.mkdir(parents=True, exist_ok=True)
        facts = {**results.facts, "end": context.facts.get(END, {})}
        if "timeline" not in facts and facts["end"].get("rollback"):
            facts["timeline"] = facts["end"]["rollback"]["timeline"]
        results = dataclasses.replace(results, facts=facts)
        write_json(run.checkpoint_files / RESULTS, results.to_json())
        run.add_file("canary.txt", table(results).encode())
        return {}

    return Step(REPORT, "results.json, the looks over time, the timeline", write)


def leave(live: Live) -> Step:
    return Step(LEAVE, "stop renewing, release the locks", live.leave, always=True)


def _batches(production: Production, hosts: tuple[Host, ...]) -> list[tuple[Host, ...]]:
    floor = production.settings.min_available.of(len(production.workers))
    return batches(hosts, len(production.routed()), floor)


def together(hosts: tuple[Host, ...], act: Any) -> dict[str, PhaseError]:
    """Act on all side by side; what failed, by host. A bug is raised."""
    failed: dict[str, PhaseError] = {}
    with ThreadPoolExecutor(len(hosts)) as pool:
        futures = {host.name: pool.submit(act, host) for host in hosts}
    for name, future in futures.items():
        try:
            future.result()
        except PhaseError as fault:
            failed[name] = fault
    return failed


def _all_together(hosts: tuple[Host, ...], act: Any) -> None:
    """As `together`; the first failure is raised after all have ended."""
    for fault in together(hosts, act).values():
        raise fault


def names(hosts: Any) -> str:
    return ", ".join(host.name for host in hosts) or "nobody"


