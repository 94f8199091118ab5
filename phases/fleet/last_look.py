"""One more observation right before a phase is judged and again before it is recorded: what a run says of production is what is seen then.

Between its last change and its record a run may have been suspended, and somebody may have rolled production back meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from phases.base.errors import Exit, PhaseError, joined
from phases.base.results import Results, StageEnd
from phases.base.verdict import Verdict
from phases.engines.ssh.locks import superseded_by
from phases.fleet.live import lock_token, open_production
from phases.production.production import Production, WorkerState
from phases.run.closing import LastLook
from phases.run.phase_run import PhaseRun
from phases.run.steps import StepContext

LAST_LOOK = "last look"


def last_look(run: PhaseRun, end: str) -> LastLook:
    """What is asked before the verdict on a phase that changes production.

    Args:
        end: name of the step that says how production ended: its `last_good` is the digest every worker then runs and goes back to.
    """

    def look(context: StepContext, results: Results) -> tuple[StageEnd, Exit | None] | None:
        if not results.ends or any(not e.verdict.advances for e in results.ends if e.stage != LAST_LOOK):
            return None  # it has ended otherwise, and its exit code was observed with that
        digest = context.facts.get(end, {}).get("last_good", "")
        lost = results.facts.get("lost", {})
        try:
            with open_production(run, LAST_LOOK, context.clock, context.progress) as production:
                who = _superseded(production, lock_token(run.work))
                states = [state for state in production.observe() if state.host.name not in lost]
        except PhaseError as fault:
            return StageEnd(LAST_LOOK, Verdict.ERROR, f"production could not be observed: {fault.told}"), None
        wrong = _not_as_claimed(states, digest)
        if not who and not wrong:
            return StageEnd(LAST_LOOK, Verdict.PASS, f"{len(states)} workers observed as they should be"), None
        code = Exit.ROLLBACK_INCOMPLETE if _not_as_claimed(states, "") else Exit.ROLLED_BACK
        said = f"this run was taken over by {who}" if who else f"production is not what this run left: {joined(wrong)}"
        context.progress(said)
        return StageEnd(LAST_LOOK, Verdict.FAIL, said), code

    return look


def _superseded(production: Production, token: str) -> str:
    """Who took a host over from this run, whether or not they are done; empty when nobody did."""
    found = production.fleet.each(lambda session: superseded_by(session, token), deadline=60.0)
    return next((f"{r.value} on {r.host.name}" for r in found.values() if r.ok and r.value), "")


def _not_as_claimed(states: Sequence[WorkerState], digest: str) -> list[str]:
    """What is not as it should be. Without a digest: not every worker on one release that is its last-good."""
    goal = digest or (states[0].last_good if states else "")
    wrong = []
    for state in states:
        why = (
            state.error
            or ("" if state.serving else "does not answer")
            or state.unserved
            or (
                ""
                if state.current == goal == state.last_good
                else f"runs {state.current[:12]}, last-good {state.last_good[:12]}"
            )
        )
        if why:
            wrong.append(f"{state.host.name}: {why}")
    return wrong
