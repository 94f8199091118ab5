"""`phase gate review`, `approve` and `reject`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phases.cli.common import STYLES, example, json_option, load_playbook, note, open_ledger, playbook_option, print_json, short, show_table, when
from phases.cli.lazy import LazyGroup
from phases.engine.clock import SystemClock
from phases.errors import Exit, UsageError

if TYPE_CHECKING:
    from phases.gates.outcome import GateOutcome, RuleOutcome
    from phases.ledger.checkpoint import Checkpoint
    from phases.ledger.ledger import Ledger
    from phases.playbook.schema import Playbook

reason_option = click.option("-r", "--reason", required=True, metavar="TEXT", help="Why; kept in the ledger for good.")
digest_option = click.option(
    "--digest", metavar="HEX", help="The digest you saw in `phase gate review` (16 digits). Without it a terminal shows the digest and asks."
)
which = click.argument("checkpoint", metavar="[CHECKPOINT]", required=False)


@click.group(cls=LazyGroup, table={
    "review": ("phases.cli.gate:review", "Show each rule's numbers of a checkpoint, so that you can say yes or no."),
    "approve": ("phases.cli.gate:approve", "Say yes to exactly the checkpoint you saw."),
    "reject": ("phases.cli.gate:reject", "Say no; the next phase stays closed."),
}, epilog=example("phase gate review", 'phase gate approve --digest 3f2a… --reason "faster everywhere"'))  # fmt: skip
def gate() -> None:
    """Review, approve or reject a checkpoint.

    CHECKPOINT is a number, a name such as 0003-build-parity-PASS, a digest, or a phase of the playbook (its newest);
    without it, the newest checkpoint of the playbook.
    """


@click.command(epilog=example("phase gate review", "phase gate review build-parity", "phase gate review 3 --html review.html"))
@which
@click.option("--html", "html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write the review as one self-contained page.")
@playbook_option
@json_option
def review(checkpoint: str | None, html: Path | None, playbook_path: Path | None, as_json: bool) -> None:
    """Show what a gate concluded, rule by rule: estimate, interval, samples, threshold, source.

    Exits with 0 whatever the verdict: showing it worked.
    """
    from phases.engine.closing import read_gate

    playbook = load_playbook(playbook_path)
    ledger = open_ledger(playbook)
    chosen = choose(playbook, ledger, checkpoint)
    files = ledger.files(chosen)
    outcome = read_gate(chosen, files)
    approvals = ledger.approvals(chosen)
    if html is not None:
        _write_page(ledger, chosen, playbook, html)
    if as_json:
        print_json({"checkpoint": chosen.to_json(), "gate": outcome.to_json(), "approvals": [vars(row) for row in approvals]})
        return
    _print_head(chosen)
    _print_rules(outcome)
    for row in approvals:
        click.echo(f"{row.decision}: {row.person}, {when(row.at)}: {row.reason}")
    others = sorted(name for name in files if name.endswith((".txt", ".png", ".html")))
    click.echo(f"Tables and plots: {', '.join(others)} (`phase checkpoint show {chosen.number} --file NAME`)." if others else "")
    if outcome.verdict.advances and not approvals:
        click.echo(f'To decide: phase gate approve {chosen.number} --digest {short(chosen.digest)} --reason "…"   (or reject)')


@click.command(epilog=example('phase gate approve 3 --digest 3f2a91c07be45d18 --reason "4.1x on every case, parity clean"'))
@which
@reason_option
@digest_option
@playbook_option
@json_option
def approve(checkpoint: str | None, reason: str, digest: str | None, playbook_path: Path | None, as_json: bool) -> None:
    """Approve a checkpoint: your git identity, the reason and the digest you saw go into the ledger."""
    from phases.ledger import approvals

    playbook = load_playbook(playbook_path)
    ledger = open_ledger(playbook)
    chosen = choose(playbook, ledger, checkpoint)
    section = playbook.phase(chosen.phase)
    seen = digest or _ask_digest(chosen)
    made = approvals.approve(ledger, chosen, reason=reason, seen=seen, at=SystemClock().now(), four_eyes=section.four_eyes)
    _print_decision(chosen, made, as_json)


@click.command(epilog=example('phase gate reject 3 --digest 3f2a91c07be45d18 --reason "slower at q65"'))
@which
@reason_option
@digest_option
@playbook_option
@json_option
def reject(checkpoint: str | None, reason: str, digest: str | None, playbook_path: Path | None, as_json: bool) -> None:
    """Reject a checkpoint: the next phase stays closed until the phase is run again."""
    from phases.ledger import approvals

    playbook = load_playbook(playbook_path)
    ledger = open_ledger(playbook)
    chosen = choose(playbook, ledger, checkpoint)
    made = approvals.reject(ledger, chosen, reason=reason, seen=digest or _ask_digest(chosen), at=SystemClock().now())
    _print_decision(chosen, made, as_json)


def choose(playbook: Playbook, ledger: Ledger, wanted: str | None) -> Checkpoint:
    """The checkpoint meant. Raises LedgerError when there is none, or several."""
    from phases.engine.progress import of_playbook

    mine = [checkpoint for checkpoint in ledger.checkpoints() if of_playbook(checkpoint, playbook)]
    if wanted is None and mine:
        return mine[-1]
    of_phase = [checkpoint for checkpoint in mine if checkpoint.phase == wanted]
    return of_phase[-1] if of_phase else ledger.find(wanted or "latest")


def _write_page(ledger: Ledger, checkpoint: Checkpoint, playbook: Playbook, path: Path) -> None:
    from phases.report import page
    from phases.report.view import view_of_checkpoint

    required = any(section.name == checkpoint.phase and section.review.value == "required" for section in playbook.phases)
    path.write_text(page.render(view_of_checkpoint(ledger, checkpoint, review_required=required)), encoding="utf-8")
    note(f"wrote {path}")


def _ask_digest(checkpoint: Checkpoint) -> str:
    """The reviewer confirms on a terminal what they are looking at; elsewhere the digest must be given."""
    import sys

    if not sys.stdin.isatty():
        raise UsageError("a decision is bound to the digest that was seen.", hint="Give --digest with what `phase gate review` shows.")
    note(f"{checkpoint.name}, recorded by {checkpoint.author}, digest {short(checkpoint.digest)}")
    click.confirm("Is this the checkpoint you reviewed?", abort=True, err=True)
    return checkpoint.digest


def _print_head(checkpoint: Checkpoint) -> None:
    manifest = checkpoint.manifest
    source = manifest.get("source", {})
    tree = " with uncommitted changes" if source.get("dirty") else ""
    click.echo(f"Checkpoint {checkpoint.name}  digest {short(checkpoint.digest)}")
    click.echo(f"  kernel {manifest.get('kernel')}, commit {(source.get('commit') or 'none')[:12]}{tree}")
    click.echo(f"  by {checkpoint.author}, {when(str(manifest.get('recorded_at')))} UTC, run {manifest.get('run')}")


def _print_rules(outcome: GateOutcome) -> None:
    rows = [
        [rule.verdict.value, rule.label, _number(rule.estimate), _interval(rule), str(rule.n), _number(rule.threshold), rule.unit, rule.source]
        for rule in outcome.rules
    ]
    show_table(["verdict", "rule", "estimate", "interval", "n", "threshold", "unit", "source"], rows, STYLES)
    for rule in outcome.rules:
        click.echo(f"  {rule.label}: {rule.reason}")
    click.echo(f"Verdict: {outcome.verdict.value}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _interval(rule: RuleOutcome) -> str:
    return "-" if rule.low is None or rule.high is None else f"{rule.low:.4g} … {rule.high:.4g}"


def _print_decision(checkpoint: Checkpoint, made: Any, as_json: bool) -> None:
    if as_json:
        print_json({"checkpoint": checkpoint.to_json(), "approval": vars(made), "exit": int(Exit.PASSED)})
        return
    verb = {"approve": "approved", "reject": "rejected"}[made.decision]
    click.echo(f"{checkpoint.name} {verb} by {made.person}: {made.reason}")
