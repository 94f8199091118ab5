"""`phase report`."""

from __future__ import annotations

from pathlib import Path

import click

from phases.cli.common import completing, example, json_option, load_playbook, open_ledger, playbook_option, print_json
from phases.cli.gate import choose
from phases.errors import LedgerError
from phases.playbook.schema import Review


@click.command(epilog=example("phase report", "phase report 3 --to /tmp/review.html", "phase report checkpoints/h200/0001-build-parity-PASS --anchors anchors.json"))
@click.argument("checkpoint", required=False, shell_complete=completing("complete_checkpoint"))
@click.option("--to", "target", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Where to write it. Default: <checkpoint>.html here.")
@playbook_option
@json_option
def report(checkpoint: str | None, target: Path | None, playbook_path: Path | None, as_json: bool) -> None:
    """Write a checkpoint as one self-contained HTML page: verdict first, each rule with its interval, charts, what changed since the
    last approved checkpoint, provenance.

    CHECKPOINT as for `phase gate review`. The page inside the checkpoint itself lacks what came later: digest and decisions.
    """
    from phases.report.page import render
    from phases.report.view import view_of_checkpoint

    playbook = load_playbook(playbook_path)
    ledger = open_ledger(playbook)
    chosen = choose(playbook, ledger, checkpoint)
    required = any(section.name == chosen.phase and section.review is Review.REQUIRED for section in playbook.phases)
    try:
        page = render(view_of_checkpoint(ledger, chosen, review_required=required))
    except (ValueError, KeyError) as fault:
        raise LedgerError(f"{chosen.name} cannot be shown: {fault}.", hint=f"Run `phase checkpoint verify {chosen.number}`.") from fault
    path = target or Path(f"{chosen.name}.html")
    path.write_text(page)
    if as_json:
        print_json({"checkpoint": chosen.to_json(), "page": str(path), "bytes": len(page)})
    else:
        click.echo(f"{chosen.name} written to {path} ({len(page) >> 10} KiB)")
