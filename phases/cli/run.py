"""`phase run`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phases.base.clock import SystemClock
from phases.base.errors import Exit, UsageError
from phases.cli.common import (
    completing,
    example,
    json_option,
    load_playbook,
    note,
    open_ledger,
    option_for,
    playbook_option,
    print_json,
    say,
)
from phases.playbook.phase_kinds import ROLLBACK_PHASE
from phases.playbook.schema import PhaseSection, Playbook, Review

if TYPE_CHECKING:
    from phases.ledger.checkpoint import Approval
    from phases.run.session import Outcome


@dataclass(frozen=True)
class Done:
    """A run of one phase, and the approval that --yes gave to it; None where it gave none."""

    outcome: Outcome
    approval: Approval | None

    @property
    def code(self) -> Exit:
        return Exit.PASSED if self.approval else self.outcome.code

    def to_json(self) -> dict[str, Any]:
        return {
            **self.outcome.to_json(),
            "exit": int(self.code),
            "approved_by_yes": vars(self.approval) if self.approval else None,
        }


@click.command(
    epilog=example(
        "phase run",
        "phase run build-parity -p playbooks/local.yaml",
        "phase run build-parity --resume   # after Ctrl-C or a crash",
    )
)
@click.argument("phases", metavar="[PHASE]...", nargs=-1, shell_complete=completing("complete_phase"))
@playbook_option
@click.option("--resume", is_flag=True, help="Go on with the latest attempt instead of starting a new one.")
@click.option(
    "-y",
    "--yes",
    is_flag=True,
    help="Stand in for the person, where the playbook says `allow_yes: true`: start production phases, approve passed gates.",
)
@click.option(
    "--allow-dirty",
    is_flag=True,
    help="Let what this run records be approved although the tree has uncommitted changes; every page then says so.",
)
@click.option(
    "--keep-going", is_flag=True, help="Phase 1: measure also a kernel that computes wrong numbers and so cannot pass."
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    envvar="PHASE_VERBOSE",
    help="Every line of every step. Default: a live view on a terminal, a line a step elsewhere. Also: PHASE_VERBOSE=1.",
)
@json_option
def run(
    phases: tuple[str, ...],
    playbook_path: Path | None,
    resume: bool,
    yes: bool,
    allow_dirty: bool,
    keep_going: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Run phases: do the steps, judge the gate, record a checkpoint.

    Without PHASE the phases of the playbook are run in order; those that have already passed (and been approved) for
    this very kernel are skipped, and the run stops at a gate that waits for review (exit 3). With --yes it goes on through
    phases whose section allows that; the ledger then says that nobody looked. Ctrl-C leaves a run that --resume continues.
    """
    from phases.run import session

    playbook = load_playbook(playbook_path)
    done: list[Done] = []
    code = Exit.PASSED
    _require_yes_allowed(_to_run(playbook, phases), yes)
    if resume and (allow_dirty or keep_going):
        raise UsageError(
            f"{'--allow-dirty' if allow_dirty else '--keep-going'} is said when a run starts; --resume goes on with what its run said.",
            hint="Leave out one of the two.",
        )
    _warn_of_dirty_tree(playbook, _to_run(playbook, phases))
    for section in _to_run(playbook, phases):
        again = resume
        if not phases:
            code, skip = _standing_code(playbook, section)
            if code is Exit.WAITING_FOR_REVIEW and yes and section.allow_yes:
                _approve(playbook, section)
                code = Exit.PASSED
            if skip and code is Exit.PASSED:
                continue
            if skip:
                break
            again = resume and session.has_unfinished(playbook, section)
        if yes and not again and not allow_dirty:
            _require_clean_for_yes(playbook, section)
        outcome = _run_one(
            playbook, section, again, yes, as_json, allow_dirty=allow_dirty, keep_going=keep_going, verbose=verbose
        )
        waits = outcome.code is Exit.WAITING_FOR_REVIEW
        done.append(Done(outcome, _approve(playbook, section) if waits and yes and section.allow_yes else None))
        code = done[-1].code
        if code is not Exit.PASSED:
            break
    with contextlib.suppress(OSError):  # whoever read it may be gone; the exit code still says how it ended
        _report(playbook, done, code, as_json)
    sys.exit(int(code))


def _to_run(playbook: Playbook, names: tuple[str, ...]) -> tuple[PhaseSection, ...]:
    return tuple(playbook.phase(name) for name in names) or playbook.phases


def _require_yes_allowed(sections: tuple[PhaseSection, ...], yes: bool) -> None:
    """Before anything runs: --yes counts only where the playbook says so."""
    refused = [section for section in sections if section.kind.changes_production and not section.allow_yes]
    if yes and refused:
        raise UsageError(
            f"{refused[0].where}: {refused[0].name} changes production and does not allow --yes.",
            hint="Leave --yes out and answer on a terminal, or set `allow_yes: true` there if nobody needs to look.",
        )


def _require_clean_for_yes(playbook: Playbook, section: PhaseSection) -> None:
    """Before it takes its minutes: what is not in git is not approved, by --yes neither."""
    from phases.ledger.git import Git
    from phases.ledger.repository import repository_of
    from phases.ledger.source import changed_paths

    if not section.allow_yes or section.review is not Review.REQUIRED:
        return
    if changed := changed_paths(Git(repository_of(playbook.path))):
        raise UsageError(
            f"there are uncommitted changes ({changed}), and --yes approves only what is in git.",
            hint="Commit them; or add --allow-dirty, which every page then says.",
        )


def _approve(playbook: Playbook, section: PhaseSection) -> Approval:
    """Approve the phase's newest checkpoint for whoever runs this; the ledger says that nobody looked."""
    from phases.cli.gate import choose
    from phases.ledger import approvals
    from phases.ledger.checkpoint import BY_YES
    from phases.status.textfile import keep_written

    ledger = open_ledger(playbook)
    checkpoint = choose(playbook, ledger, section.name)
    terms = approvals.Terms(section.four_eyes, section.signed_decisions)
    reason = f"{BY_YES}went on without anybody looking, as the playbook allows"
    made = approvals.approve(
        ledger, checkpoint, reason=reason, seen=checkpoint.digest, at=SystemClock().now(), terms=terms
    )
    note(f"{checkpoint.name}: approved by --yes for {made.person}; branch {ledger.branch} records that nobody looked")
    keep_written(playbook, SystemClock(), note)
    return made


def _warn_of_dirty_tree(playbook: Playbook, sections: tuple[PhaseSection, ...]) -> None:
    """Said before an earlier phase takes its minutes: a later one will not start."""
    from phases.ledger.git import Git
    from phases.ledger.repository import repository_of
    from phases.ledger.source import changed_paths

    strict = [section.name for section in sections[1:] if section.kind.clean_tree]
    if strict and (changed := changed_paths(Git(repository_of(playbook.path)))):
        note(
            f"there are uncommitted changes ({changed}): {strict[0]} will refuse them, so commit first if you want to get that far"
        )


def _standing_code(playbook: Playbook, section: PhaseSection) -> tuple[Exit, bool]:
    """(exit code if the run ended here, whether the phase need not run): for a run of all phases."""
    from phases.ledger.lost import require_whole
    from phases.run import progress, session

    ledger = open_ledger(playbook)
    require_whole(ledger)
    known = progress.standings(playbook, ledger, session.kernel_digest(playbook))
    standing = next(row for row in known if row.section.name == section.name)
    if standing.state.lets_next_start:
        note(
            f"{section.name}: {standing.state.value} with {standing.checkpoint.name if standing.checkpoint else ''}; skipped"
        )
        return Exit.PASSED, True
    if standing.state is progress.State.WAITING:
        return Exit.WAITING_FOR_REVIEW, True
    return Exit.PASSED, False


def _run_one(
    playbook: Playbook,
    section: PhaseSection,
    resume: bool,
    yes: bool,
    as_json: bool,
    *,
    allow_dirty: bool,
    keep_going: bool,
    verbose: bool,
) -> Any:
    from phases.cli.watchers import watcher
    from phases.harness import contract
    from phases.ledger import repository as source
    from phases.notify.teller import teller_of
    from phases.notify.watcher import Telling
    from phases.run import session
    from phases.run.expected import step_seconds
    from phases.run.live_state import Noting
    from phases.status.textfile import keep_written

    _confirm(section, yes)
    runs = source.repository_of(playbook.path) / ".phase" / "runs"
    with teller_of(playbook, contract.load(playbook.kernel).name, section.name, note) as teller:
        approves = yes and section.allow_yes
        expected = step_seconds(runs.parent, playbook.name, section.name)
        seen = watcher(as_json, approves, verbose=verbose, expected=expected)
        watching = Noting(
            Telling(seen, teller, approves), runs, started=lambda: keep_written(playbook, SystemClock(), note)
        )
        try:
            return session.run_phase(
                playbook,
                section,
                resume=resume,
                clock=SystemClock(),
                watcher=watching,
                notice=note,
                allow_dirty=allow_dirty,
                keep_going=keep_going,
            )
        finally:
            keep_written(playbook, SystemClock(), note)


def _confirm(section: PhaseSection, yes: bool) -> None:
    if not section.kind.changes_production or yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            f"{section.name} changes production and nobody is here to confirm it.",
            hint="Start it on a terminal, or give --yes where the playbook says `allow_yes: true`.",
        )
    click.confirm(f"{section.name} changes production. Go on?", abort=True, err=True)


def _report(playbook: Playbook, done: list[Done], code: Exit, as_json: bool) -> None:
    if as_json:
        print_json({"playbook": playbook.name, "exit": int(code), "runs": [row.to_json() for row in done]})
        return
    for row in done:
        outcome, checkpoint = row.outcome, row.outcome.checkpoint
        approved = ", approved by --yes" if row.approval else ""
        say(
            f"{outcome.phase}: {outcome.verdict.value}, recorded as checkpoint {checkpoint['name']} ({checkpoint['digest'][:16]}){approved}"
        )
        if outcome.verdict.value != "PASS":
            say(f"See why with `phase gate review {checkpoint['number']}{option_for(playbook)}`.")
    if code is Exit.WAITING_FOR_REVIEW:
        say(
            f"Waiting for review: `phase gate review{option_for(playbook)}`, then `phase gate approve` or `phase gate reject`."
        )
    if playbook.sections.get("embedded_fleet") and any(
        playbook.phase(row.outcome.phase).kind.changes_production for row in done
    ):
        say(
            f"The embedded fleet goes on serving, as production does; `phase fleet down{option_for(playbook)}` ends it."
        )
    if code is Exit.PASSED and not done:
        say("Every phase has passed; nothing to do.")
        _say_rolled_back(playbook)


def _say_rolled_back(playbook: Playbook) -> None:
    """That all has passed does not say that production still runs it."""
    from phases.run.progress import of_playbook
    from phases.status.overview import rolled_back

    ledger = open_ledger(playbook)
    ended = [
        c for c in ledger.checkpoints() if of_playbook(c, playbook) and c.phase in ("full-rollout", ROLLBACK_PHASE)
    ]
    if ended and ended[-1].phase == ROLLBACK_PHASE and (back := rolled_back(ledger, ended)) and back.state != "undone":
        say(
            f"Production was rolled back since ({ended[-1].name}): `phase run full-rollout{option_for(playbook)}` rolls out again."
        )
