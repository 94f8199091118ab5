"""How every phase ends: judge the gate, record the checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

from phases.base.errors import Exit, JournalError
from phases.base.files import is_leftover, write_json
from phases.base.results import Results, StageEnd
from phases.base.verdict import Verdict, severity
from phases.gate.gate import judge
from phases.gate.outcome import GateOutcome
from phases.gate.own import own_labels
from phases.ledger.checkpoint import GATE, PROVENANCE, RESULTS, Checkpoint, Draft, sha256
from phases.ledger.ledger import Ledger
from phases.ledger.provenance import statement
from phases.ledger.repository import repository_of
from phases.playbook.schema import Playbook
from phases.report import page
from phases.report.moved import PLAYBOOK
from phases.report.view import view_of_draft
from phases.run.phase_run import PhaseRun, load_results
from phases.run.steps import Facts, Step, StepContext

PAGE = "report.html"
JUDGE = "judge the gate"
RECORD = "record the checkpoint"


# Observes production once more: how that ended, and the exit code if it is not as the run left it; None where there is nothing to look at.
LastLook = Callable[[StepContext, Results], "tuple[StageEnd, Exit | None] | None"]


def closing_steps(run: PhaseRun, last_look: LastLook | None = None, stages: Sequence[str] = ()) -> list[Step]:
    """The last two steps of a phase. What the checkpoint holds lies in `run.checkpoint_files` by then, results.json included.

    Args:
        last_look: asked before the gate is judged, and again right before the checkpoint is recorded.
        stages: what must have been judged for a PASS: the phase's own rules.
    """
    rules = (
        *own_labels(run.section.name, stages),
        *(f"{rule.label} ({rule.where}): {rule.terms}" for rule in run.section.rules),
    )
    where = f"branch {run.playbook.ledger.branch}" + (
        f", pushed to {run.playbook.ledger.remote}" if run.playbook.ledger.remote else ""
    )
    return [
        Step(
            JUDGE,
            f"judge {len(rules)} rules; the worst verdict decides",
            lambda context: judge_gate(run, context, last_look, stages),
            holds=lambda context, facts: all((run.checkpoint_files / name).is_file() for name in (GATE, PAGE)),
            detail=rules,
        ),
        Step(
            RECORD,
            f"commit results, tables and verdict to the ledger ({where})",
            lambda context: record_checkpoint(run, context, last_look, stages),
            holds=lambda context, facts: _is_recorded(run, facts),
        ),
    ]


def ledger_of(playbook: Playbook, warn=lambda line: None) -> Ledger:  # type: ignore[no-untyped-def]
    """The ledger a playbook keeps its checkpoints in: of the repository that holds the playbook."""
    settings = playbook.ledger
    return Ledger(
        repository_of(playbook.path), settings.branch, settings.remote, settings.sign.value, settings.tag_prefix, warn
    )


def judge_gate(
    run: PhaseRun, context: StepContext, last_look: LastLook | None = None, stages: Sequence[str] = ()
) -> Facts:
    """Judge results.json; write gate.json and the page for the reviewer beside it."""
    results = load_results(run.checkpoint_files / RESULTS)
    seen = last_look(context, results) if last_look else None
    if seen:
        earlier = tuple(end for end in results.ends if end.stage != seen[0].stage)  # a look taken before this one
        results = dataclasses.replace(results, ends=(*earlier, seen[0]))
        write_json(run.checkpoint_files / RESULTS, results.to_json())
    outcome = judge(run.section.name, run.section.rules, results, candidates=run.candidates, stages=stages)
    write_json(run.checkpoint_files / GATE, outcome.to_json())
    passed = [rule for rule in outcome.rules if rule.verdict.advances]
    others = [rule for rule in outcome.rules if not rule.verdict.advances]
    for rule in [
        *passed,
        *sorted(reversed(others), key=lambda rule: severity(rule.verdict)),
    ]:  # first of the worst last: a terminal keeps that line
        context.progress(f"{rule.verdict.value:12} {rule.label}: {rule.reason}")
    now = context.clock.now()
    _keep_playbook(run)
    draft = _draft(run, outcome.verdict, now, _manifest_facts(run, context))
    run.add_file(PAGE, page.render(view_of_draft(ledger_of(run.playbook), draft, run.record.author)).encode())
    failed = [f"{rule.label}: {rule.reason}" for rule in outcome.rules if not rule.verdict.advances]
    facts: Facts = {"verdict": outcome.verdict.value, "judged_at": now, "failed": failed}
    if seen and seen[1] is not None:
        facts["exit_code"] = int(seen[1])
    return facts


def _keep_playbook(run: PhaseRun) -> None:
    """The playbook's text into the checkpoint, so that a reviewer sees what changed in it; not one that was edited since the run read it."""
    text = run.playbook.path.read_bytes() if run.playbook.path.is_file() else b""
    if sha256(text) == run.playbook.digest:
        run.add_file(PLAYBOOK, text)


def record_checkpoint(
    run: PhaseRun, context: StepContext, last_look: LastLook | None = None, stages: Sequence[str] = ()
) -> Facts:
    """Record everything below `run.checkpoint_files`. Safe to repeat: the same run gives the same checkpoint."""
    judged = context.facts[JUDGE]
    again = last_look(context, load_results(run.checkpoint_files / RESULTS)) if last_look else None
    if again and not again[0].verdict.advances:  # what the gate was judged on does not hold any more
        judged = judge_gate(run, context, lambda _context, _results: again, stages)
    draft = _draft(run, Verdict(judged["verdict"]), judged["judged_at"], _manifest_facts(run, context))
    draft.files[PROVENANCE] = statement(draft, run.record.started)
    checkpoint = ledger_of(run.playbook, context.progress).record(draft)
    context.progress(f"{checkpoint.name} is {checkpoint.digest[:12]}, commit {checkpoint.commit[:10]}")
    return {
        "number": checkpoint.number,
        "name": checkpoint.name,
        "digest": checkpoint.digest,
        "commit": checkpoint.commit,
        "verdict": judged["verdict"],
        **({"exit_code": judged["exit_code"]} if "exit_code" in judged else {}),
    }


def read_gate(checkpoint: Checkpoint, files: dict[str, bytes]) -> GateOutcome:
    """The verdicts kept in a checkpoint. Raises JournalError when they cannot be read."""
    try:
        return GateOutcome.from_json(json.loads(files[GATE]))
    except (KeyError, ValueError, TypeError) as fault:
        raise JournalError(
            f"{checkpoint.name} holds no readable {GATE}.", hint=f"Run `phase checkpoint verify {checkpoint.number}`."
        ) from fault


def _draft(run: PhaseRun, verdict: Verdict, at: float, facts: Facts) -> Draft:
    root = run.checkpoint_files
    files = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not is_leftover(path)
    }
    return Draft(
        phase=run.section.name,
        verdict=verdict,
        kernel=run.kernel.name,
        run=identity_of(run),
        files=files,
        source=run.record.source,
        recorded_at=at,
        facts=facts,
        playbook=f"{run.playbook.name} sha256:{run.playbook.digest}",
    )


def identity_of(run: PhaseRun) -> str:
    """Identity of the attempt: unique across machines, since two clones may both have a run 0001."""
    return f"{run.record.run_id}@{int(run.record.started * 1000)}"


def _manifest_facts(run: PhaseRun, context: StepContext) -> Facts:
    """Toolchain, torch, driver, GPU, host: what the steps reported under `manifest`, and what was run."""
    merged: Facts = {
        "kernel_digest": run.record.kernel_digest,
        "section_digest": run.section.digest,
        "toolkit": run.record.toolkit,
        "attempt": run.record.attempt,
    }
    if run.record.overrides:
        merged["overrides"] = run.record.overrides
    for facts in context.facts.values():
        merged.update(facts.get("manifest", {}))
    return merged


def _is_recorded(run: PhaseRun, facts: Facts) -> bool:
    known = ledger_of(run.playbook).checkpoints()
    return any(checkpoint.digest == facts["digest"] for checkpoint in known)
