"""`phase gate review`, `approve`, `reject` and `override`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phases.base.clock import SystemClock, age
from phases.base.errors import Exit, LedgerError, UsageError
from phases.base.verdict import Verdict
from phases.cli.common import (
    STYLES,
    completing,
    example,
    is_terminal,
    json_option,
    load_playbook,
    note,
    open_ledger,
    option_for,
    playbook_option,
    print_json,
    say,
    short,
    show_blocks,
)
from phases.cli.lazy import LazyGroup

if TYPE_CHECKING:
    from phases.ledger.checkpoint import Checkpoint
    from phases.ledger.ledger import Ledger
    from phases.playbook.schema import Playbook
    from phases.report.view import ReportView

UNDECIDED = "An interval that includes its threshold narrows with a quieter machine or more samples (`benchmark: max_samples` and `seconds`, a longer `deadline`): see to that"
reason_option = click.option("-r", "--reason", required=True, metavar="TEXT", help="Why; kept in the ledger for good.")
digest_option = click.option(
    "--digest",
    metavar="HEX",
    help="The digest you saw in `phase gate review` (16 digits). Without it a terminal shows the digest and asks.",
)
which = click.argument(
    "checkpoint", metavar="[CHECKPOINT]", required=False, shell_complete=completing("complete_checkpoint")
)


@click.group(
    cls=LazyGroup,
    table={
        "review": (
            "phases.cli.gate:review",
            "Show each rule's numbers of a checkpoint, so that you can say yes or no.",
        ),
        "approve": ("phases.cli.gate:approve", "Say yes to exactly the checkpoint you saw."),
        "reject": ("phases.cli.gate:reject", "Say no; the next phase stays closed."),
        "override": ("phases.cli.gate:override", "Go on from an INCONCLUSIVE gate, where the playbook allows it."),
    },
    epilog=example("phase gate review", 'phase gate approve --digest 3f2a… --reason "faster everywhere"'),
)
def gate() -> None:
    """Review, approve, reject or override a checkpoint.

    CHECKPOINT is a number, a name such as 0003-build-parity-PASS, a digest, or a phase of the playbook (its newest);
    without it, the newest checkpoint of the playbook.
    """


@click.command(
    epilog=example(
        "phase gate review", "phase gate review build-parity --no-ask", "phase gate review 3 --html review.html"
    )
)
@which
@click.option(
    "--html",
    "html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the review as one self-contained page.",
)
@click.option(
    "--ask/--no-ask",
    default=True,
    help="On a terminal, ask for the decision after showing what waits for one. Default: ask.",
)
@playbook_option
@json_option
def review(checkpoint: str | None, html: Path | None, ask: bool, playbook_path: Path | None, as_json: bool) -> None:
    """Show what a gate concluded, verdict first: each rule's estimate, interval, samples, threshold and source; benchmark; canary against
    control; rollback timeline; what changed since the last approved checkpoint; provenance.

    CHECKPOINT is a number, a name, a digest or a phase; without it, the newest of the playbook.

    Exits with 0 whatever the verdict: showing it worked. Nothing is decided unless you answer.
    """
    from phases.ledger.verify import read_as_recorded

    playbook = load_playbook(playbook_path)
    ledger = open_ledger(playbook)
    chosen = choose(playbook, ledger, checkpoint)
    with read_as_recorded(ledger, chosen):
        view = _view(ledger, chosen, playbook)
        if html is not None:
            from phases.report import page

            html.write_text(page.render(view), encoding="utf-8")
            note(f"wrote {html}")
        if as_json:
            print_json(
                {
                    "checkpoint": chosen.to_json(),
                    "gate": view.gate.to_json(),
                    "approvals": [vars(row) for row in view.approvals],
                    "review": view.review,
                    "since": None
                    if view.change is None
                    else {
                        "against": view.change.against,
                        "moves": [move.to_json() for move in view.change.moves],
                        "playbook": view.change.playbook,
                    },
                    "attempts": list(view.attempts),
                }
            )
            return
        _show(view, chosen, ledger)
    _decide(view, chosen, ledger, playbook, ask)


def _view(ledger: Ledger, chosen: Checkpoint, playbook: Playbook) -> ReportView:
    from phases.report.view import view_of_checkpoint
    from phases.run.closing import read_gate

    read_gate(chosen, ledger.files(chosen))
    sections = [section for section in playbook.phases if section.name == chosen.phase]
    required = any(section.review.value == "required" for section in sections)
    signed = any(section.signed_decisions for section in sections)
    try:
        return view_of_checkpoint(ledger, chosen, review_required=required, signed=signed)
    except (ValueError, KeyError, TypeError) as fault:
        raise LedgerError(
            f"{chosen.name} cannot be shown: {fault}.", hint=f"Run `phase checkpoint verify {chosen.number}`."
        ) from fault


def _show(view: ReportView, chosen: Checkpoint, ledger: Ledger) -> None:
    from phases.report.review_text import review_blocks

    show_blocks(review_blocks(view, age=age(SystemClock().now() - chosen.recorded_at)), STYLES)
    others = sorted(name for name in ledger.files(chosen) if name.endswith((".txt", ".png", ".html")))
    if others:
        say(f"  tables and plots: {', '.join(others)} (`phase checkpoint show {chosen.number} --file NAME`)")
    click.echo("")


def _decide(view: ReportView, chosen: Checkpoint, ledger: Ledger, playbook: Playbook, ask: bool) -> None:
    """The commands that decide, or, on a terminal, the question itself. Only what waits for a decision is asked about."""
    option = option_for(playbook)
    if not view.gate.verdict.advances and not view.approvals:
        cure = UNDECIDED if view.gate.verdict is Verdict.INCONCLUSIVE else "Mend the cause"
        say(f"Nothing to approve: only PASS can be. {cure}, then `phase run {chosen.phase}{option}`.")
        if view.gate.verdict is Verdict.INCONCLUSIVE and _may_override(playbook, chosen):
            arguments = f'{chosen.number} --digest {short(chosen.digest)} --reason "…"{option}'
            click.echo(f"To go on all the same, which every page then says: phase gate override {arguments}")
    if view.approvals or not view.gate.verdict.advances or view.review == "":
        return
    if not (ask and sys.stdin.isatty() and is_terminal()):
        arguments = f'{chosen.number} --digest {short(chosen.digest)} --reason "…"{option}'
        click.echo(f"To decide: phase gate approve {arguments}")
        click.echo(f"       or: phase gate reject {arguments}")
        return
    try:
        answer = (
            click.prompt(
                "Approve, reject, or decide later? [a/r/Enter]", default="", show_default=False, prompt_suffix=" "
            )
            .strip()
            .lower()
        )
    except click.Abort:  # Ctrl-D or Ctrl-C: the review was read, and that is all that was asked for
        click.echo("\nNothing was decided.")
        return
    decision = {"a": "approve", "approve": "approve", "r": "reject", "reject": "reject"}.get(answer)
    if decision is None:
        click.echo("Nothing was decided." if not answer else f"{answer!r} is neither; nothing was decided.")
        return
    _record(
        decision,
        ledger,
        chosen,
        playbook,
        click.prompt("Why? It is kept in the ledger for good"),
        chosen.digest,
        as_json=False,
    )


def _may_override(playbook: Playbook, chosen: Checkpoint) -> bool:
    return any(section.name == chosen.phase and section.allow_override for section in playbook.phases)


def _record(
    decision: str, ledger: Ledger, chosen: Checkpoint, playbook: Playbook, reason: str, seen: str, as_json: bool
) -> None:
    """Write a decision into the ledger, and say so."""
    from phases.ledger import approvals
    from phases.status.textfile import keep_written

    now = SystemClock().now()
    if decision == "reject":
        made = approvals.reject(ledger, chosen, reason=reason, seen=seen, at=now)
    else:
        section = playbook.phase(chosen.phase)
        let_on = approvals.approve if decision == "approve" else approvals.override
        terms = approvals.Terms(section.four_eyes, section.signed_decisions)
        made = let_on(ledger, chosen, reason=reason, seen=seen, at=now, terms=terms)
    _print_decision(chosen, made, as_json)
    keep_written(playbook, SystemClock(), note)


@click.command(epilog=example('phase gate approve 3 --digest 3f2a91c07be45d18 --reason "4.1x, parity clean"'))
@which
@reason_option
@digest_option
@playbook_option
@json_option
def approve(checkpoint: str | None, reason: str, digest: str | None, playbook_path: Path | None, as_json: bool) -> None:
    """Approve a checkpoint: your git identity, the reason and the digest you saw go into the ledger."""
    playbook = load_playbook(playbook_path)
    ledger = open_ledger(playbook)
    chosen = choose(playbook, ledger, checkpoint)
    playbook.phase(chosen.phase)  # one that the playbook does not have cannot be approved by it
    _record("approve", ledger, chosen, playbook, reason, digest or _ask_digest(chosen), as_json)


@click.command(epilog=example('phase gate reject 3 --digest 3f2a91c07be45d18 --reason "slower at q65"'))
@which
@reason_option
@digest_option
@playbook_option
@json_option
def reject(checkpoint: str | None, reason: str, digest: str | None, playbook_path: Path | None, as_json: bool) -> None:
    """Reject a checkpoint: the next phase stays closed until the phase is run again."""
    playbook = load_playbook(playbook_path)
    ledger = open_ledger(playbook)
    chosen = choose(playbook, ledger, checkpoint)
    _record("reject", ledger, chosen, playbook, reason, digest or _ask_digest(chosen), as_json)


@click.command(
    epilog=example(
        'phase gate override 3 --digest 3f2a91c07be45d18 --reason "interval touches the limit at q65 only; no traffic has q65"'
    )
)
@which
@reason_option
@digest_option
@playbook_option
@json_option
def override(
    checkpoint: str | None, reason: str, digest: str | None, playbook_path: Path | None, as_json: bool
) -> None:
    """Go on from an INCONCLUSIVE gate, where the playbook says `allow_override: true`.

    It stays INCONCLUSIVE and is no approval: `phase status`, its page and every checkpoint built on it say that it was overridden, by whom
    and why. A FAIL, an ERROR and an ABORTED cannot be overridden.
    """
    playbook = load_playbook(playbook_path)
    ledger = open_ledger(playbook)
    chosen = choose(playbook, ledger, checkpoint)
    section = playbook.phase(chosen.phase)
    if not section.allow_override:
        raise UsageError(
            f"{section.where}: {chosen.phase} does not allow an override.",
            hint=f"{UNDECIDED}; or set `allow_override: true` there, which a reviewer of the playbook sees.",
        )
    _record("override", ledger, chosen, playbook, reason, digest or _ask_digest(chosen), as_json)


def choose(playbook: Playbook, ledger: Ledger, wanted: str | None) -> Checkpoint:
    """The checkpoint meant. Raises LedgerError when there is none, or several."""
    from phases.run.progress import of_playbook

    mine = [checkpoint for checkpoint in ledger.checkpoints() if of_playbook(checkpoint, playbook)]
    if wanted is None and mine:
        return mine[-1]
    of_phase = [checkpoint for checkpoint in mine if checkpoint.phase == wanted]
    return of_phase[-1] if of_phase else ledger.find(wanted or "latest")


def _ask_digest(checkpoint: Checkpoint) -> str:
    """The reviewer confirms on a terminal what they are looking at; elsewhere the digest must be given."""
    if not sys.stdin.isatty():
        raise UsageError(
            "a decision is bound to the digest that was seen.",
            hint="Give --digest with what `phase gate review` shows.",
        )
    note(f"{checkpoint.name}, recorded by {checkpoint.author}, digest {short(checkpoint.digest)}")
    click.confirm("Is this the checkpoint you reviewed?", abort=True, err=True)
    return checkpoint.digest


def _print_decision(checkpoint: Checkpoint, made: Any, as_json: bool) -> None:
    if as_json:
        print_json({"checkpoint": checkpoint.to_json(), "approval": vars(made), "exit": int(Exit.PASSED)})
        return
    say(f"{checkpoint.name} {made.past} by {made.person}: {made.reason}")
