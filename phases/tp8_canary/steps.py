"""The steps of Phase 3; `phases.tp8_canary` puts them in order.

However the phase ends, production ends on the incumbent: a canary that passed goes back as well, and the candidate reaches
the fleet only through Phase 4, after review. A canary that failed goes back at once, as a rollback with its timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phases.base.errors import Exit, PhaseError
from phases.base.results import Measurement, Results, StageEnd
from phases.base.verdict import Verdict
from phases.engines.ssh.host import Host
from phases.fleet import judging, shared_steps, traffic
from phases.fleet.live import Live, fleet_settings
from phases.fleet.shared_steps import PUSH, batches_under_floor, names, together
from phases.production import agreement
from phases.production.decided import JUDGED, decide, decided
from phases.production.production import Production
from phases.rollback.steps import Rollback, roll_back, strayed
from phases.rollback.takeover import let_others_finish
from phases.run.phase_run import PhaseRun
from phases.run.steps import Facts, Step, StepContext
from phases.trial.arms import Arms, choose_arms
from phases.trial.end import TrialEnd
from phases.trial.settings import Design

CONTROL, CANARY, BAKE, END = "restart the control", "switch the canary", "bake", "put production back"
GOING_BACK = "going back"  # the end of the bake, for the account of the load


def arms_of(run: PhaseRun) -> Arms:
    """Who is canary and who control; pure."""
    return choose_arms(fleet_settings(run).workers(), run.settings)


def look_at_fleet(run: PhaseRun, live: Live) -> Step:
    arms = arms_of(run)
    control = "the same workers, in turns" if run.settings.design is Design.SWITCHBACK else names(arms.control)
    detail = (f"canary: {names(arms.canary)}", f"control: {control}", f"share of requests exposed: {arms.share:.0%}")
    return shared_steps.look_at_fleet(run, live, detail)


def push_releases(run: PhaseRun, live: Live) -> Step:
    arms = arms_of(run)
    return shared_steps.push_releases(run, live, [*arms.canary, *arms.control])


def restart_control(run: PhaseRun, live: Live) -> list[Step]:
    """As old as the canary will be; nothing to do where the canary workers are their own control."""
    arms = arms_of(run)

    def restart(context: StepContext) -> Facts:
        production = live.production(context)
        with live.traffic(context).during(CONTROL) as load:
            for batch in batches_under_floor(production, arms.control):
                _all_together(batch, production.restart_same)
                context.progress(f"{names(batch)} restarted on the incumbent, warm and in service")
        return {"restarted": [host.name for host in arms.control], "load": traffic.kept(load)}

    step = Step(CONTROL, f"{names(arms.control)} restart on the incumbent, so that both arms are equally old", restart)
    return [] if run.settings.design is Design.SWITCHBACK else [step]


def switch_canary(run: PhaseRun, live: Live) -> Step:
    """Under a lease that reverts by itself."""
    arms = arms_of(run)

    def switch(context: StepContext) -> Facts:
        production, digest = live.production(context), context.facts[PUSH]["candidate"]
        there = {
            s.host.name for s in production.observe() if s.current == digest and s.leased and s.in_service
        }  # a killed process got so far
        failed: dict[str, Any] = {}
        with live.traffic(context).during(CANARY) as load:
            try:
                for batch in batches_under_floor(production, [host for host in arms.canary if host.name not in there]):
                    _all_together(batch, lambda host: production.switch(host, digest))
                    context.progress(f"{names(batch)} on {digest[:12]}: every rank reports it, warm and in service")
            except PhaseError as fault:
                failed = {"failed": str(fault), "detected": context.clock.now()}
                context.progress(f"did not succeed, and the canary will not bake: {fault}")
        agreements = [found.to_json() for found in production.agreements]
        return {
            "digest": digest,
            "switched": context.clock.now(),
            "load": traffic.kept(load),
            "agreement": agreements,
            **failed,
        }

    def holds(context: StepContext, facts: Facts) -> bool:
        """A canary that failed to switch or has been judged is not wanted on the candidate any more."""
        if "failed" in facts or _judged(context, facts):
            return True
        names = {host.name for host in arms.canary}
        states = [s for s in live.production(context).observe() if s.host.name in names]
        return all(s.current == facts["digest"] and s.leased and s.in_service for s in states)

    return Step(
        CANARY,
        f"{names(arms.canary)} to the candidate: drain, lease, switch, restart, prove every rank, warm up",
        switch,
        holds=holds,
    )


def bake(run: PhaseRun, live: Live) -> Step:
    arms = arms_of(run)

    def measure(context: StepContext) -> dict[str, Any]:
        switched = context.facts[CANARY]
        if "failed" in switched:
            context.progress("not begun: the canary was not switched")
            return {
                "measurements": agreement.measurements(switched["agreement"]),
                "ends": (StageEnd(BAKE, Verdict.FAIL, switched["failed"]),),
                "facts": {"detected": switched["detected"], "agreement": switched["agreement"]},
            }
        production, known = live.production(context), _judged(context, switched)
        with live.traffic(context).during(BAKE) as load:
            if known is None:
                if run.settings.design is Design.SWITCHBACK:
                    trial_end = judging.judge_turns(
                        run, production, run.settings, arms.canary, switched["digest"], context
                    )
                else:
                    trial_end = judging.judge(
                        run,
                        production,
                        run.settings.judge,
                        arms.canary,
                        arms.control,
                        switched["digest"],
                        context,
                        others=arms.rest,
                        share_tolerance=run.settings.share_tolerance,
                    )
                known = _decide(run, context, production, trial_end, judging.share_row(trial_end, arms))
        with live.traffic(context).during(GOING_BACK) as back_load:
            ended = _end_under_load(production, known)
        return {
            "measurements": known.measurements,
            "ends": known.ends,
            "facts": {**known.facts, **ended, traffic.during(BAKE): traffic.kept([*load, *back_load])},
        }

    settings = run.settings.judge
    shown = ", ".join(f"{m.metric} p{m.quantile * 100:g} within {m.margin:.0%}" for m in settings.metrics)
    every = settings.window
    if run.settings.design is Design.SWITCHBACK:
        turns = run.settings.turns
        lead_in = f", the first {turns.lead_in:g} s not judged" if turns.lead_in else ""
        shown, every = f"{shown}, in turns of {turns.period:g} s on the same workers{lead_in}", 2 * turns.period
    return run.results_step(
        BAKE, f"{shown}; {settings.bake:g} to {settings.deadline:g} s, looked at every {every:g} s", measure
    )


def _judged(context: StepContext, switched: Facts) -> Results | None:
    """The verdict on this very switch of the canary, where an earlier process of the run came that far."""
    known = decided(context.work, JUDGED)
    return known if known is not None and known.facts["switched"] == switched["switched"] else None


def _decide(
    run: PhaseRun, context: StepContext, production: Production, trial_end: TrialEnd, share: Measurement
) -> Results:
    context.progress(f"{trial_end.verdict.value}: {trial_end.reason}")
    sick = bool(trial_end.fault and trial_end.fault.incumbent)
    facts = {
        **judging.evidence(production, trial_end),
        "detected": context.clock.now(),
        "switched": context.facts[CANARY]["switched"],
        "incumbent_sick": sick,
    }
    return decide(
        context.work,
        JUDGED,
        Results(
            run.section.name,
            run.kernel.name,
            measurements=(*judging.measurements(trial_end), share),
            ends=(trial_end.stage(BAKE),),
            facts=facts,
        ),
    )


def _end_under_load(production: Production, judged: Results) -> dict[str, Any]:
    """Back to the incumbent while the load still runs, so that what going back costs users is measured too."""
    (end,), facts = judged.ends, judged.facts
    if facts["incumbent_sick"]:
        return {"halted": f"the incumbent is what is sick ({end.reason}); nothing was swapped"}
    failed = end.verdict is Verdict.FAIL
    let_others_finish(production)
    back = roll_back(
        production,
        end.reason if failed else "the canary has been judged",
        detected=facts["detected"],
        planned=not failed,
    )
    return {"rollback": back.to_json(), "timeline": list(back.events)}


def put_back(run: PhaseRun, live: Live) -> Step:
    """What the bake left, or a failed switch: observed, finished, and told by the exit code."""

    def end(context: StepContext) -> Facts:
        production = live.production(context)
        gathered = run.gathered(context)
        kept, bake = gathered.facts, gathered.end_of(BAKE)
        failed = bake is not None and bake.verdict is Verdict.FAIL
        if "halted" in kept:
            return {"halted": kept["halted"], "exit_code": int(Exit.OPERATIONAL)}
        back: Rollback | None = None
        load: list[traffic.Share] = []
        if not kept.get("rollback", {}).get("verified") or any(map(strayed, production.observe())):
            reason, detected = (bake.reason if bake else "the phase ended", kept.get("detected", context.clock.now()))
            with live.traffic(context).during(END) as load:
                back = roll_back(production, reason, detected=detected, planned=not failed)
        verified = back.verified if back else True
        facts: Facts = {
            "verified": verified,
            "rollback": back.to_json() if back else kept["rollback"],
            "load": traffic.kept(load),
        }
        if not verified:
            facts["exit_code"] = int(Exit.ROLLBACK_INCOMPLETE)
        elif failed:
            facts["exit_code"] = int(Exit.ROLLED_BACK)
        return facts

    return Step(END, "all workers observed on the incumbent again, in service", end)


def write_report(run: PhaseRun) -> Step:
    return shared_steps.report_step(run, "canary.txt", END)


def _all_together(hosts: Sequence[Host], act: Callable[[Host], Any]) -> None:
    """As `together`; the first failure is raised after all have ended."""
    for fault in together(hosts, act).values():
        raise fault
