"""`phase report`."""

from __future__ import annotations

from pathlib import Path

import click

from phases.base.errors import LedgerError
from phases.cli.common import completing, example, json_option, load_playbook, open_ledger, playbook_option, print_json
from phases.cli.gate import choose
from phases.playbook.schema import Review


@click.command(
    epilog=example(
        "phase report",
        "phase report 3 --to /tmp/review.html",
        "phase report checkpoints/h200/0001-build-parity-PASS --anchors anchors.json",
    )
)
@click.argument("checkpoint", required=False, shell_complete=completing("complete_checkpoint"))
@click.option(
    "--to",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write it. Default: <checkpoint>.html here.",
)
@click.option(
    "--anchors",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    metavar="FILE",
    help='Times of other kernels to show beside: {"about": "...", "recorded": true, "rows": [{"case": KEY, "microseconds": {NAME: US}}]}.',
)
@playbook_option
@json_option
def report(
    checkpoint: str | None, target: Path | None, anchors: Path | None, playbook_path: Path | None, as_json: bool
) -> None:
    """Write a checkpoint as one self-contained HTML page: verdict first, each rule with its interval, charts, what changed since the
    last approved checkpoint, provenance.

    CHECKPOINT as for `phase gate review`, or the directory of an exported checkpoint. The page inside the checkpoint itself lacks
    what came later: digest and decisions.
    """
    from phases.ledger.export import read_directory
    from phases.report.page import render
    from phases.report.view import view_of_checkpoint, view_of_directory, with_anchors

    playbook = load_playbook(playbook_path)
    ledger = open_ledger(playbook)
    facts: dict[str, object]
    directory = Path(checkpoint).resolve() if checkpoint and Path(checkpoint).is_dir() else None
    try:
        if directory:
            name = directory.name
            view, facts = (
                view_of_directory(ledger, name, *read_directory(directory)),
                {"name": name, "directory": str(directory)},
            )
        else:
            chosen = choose(playbook, ledger, checkpoint)
            sections = [section for section in playbook.phases if section.name == chosen.phase]
            required = any(section.review is Review.REQUIRED for section in sections)
            signed = any(section.signed_decisions for section in sections)
            name, view, facts = (
                chosen.name,
                view_of_checkpoint(ledger, chosen, review_required=required, signed=signed),
                chosen.to_json(),
            )
        page = render(with_anchors(view, anchors) if anchors else view).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise LedgerError(
            f"{checkpoint or 'the newest checkpoint'} cannot be shown: {fault!r}.",
            hint="Run `phase checkpoint verify`.",
        ) from fault
    path = target or Path(f"{name}.html")
    path.write_bytes(page)
    if as_json:
        print_json({"checkpoint": facts, "page": str(path), "bytes": len(page)})
    else:
        click.echo(f"{name} written to {path} ({len(page) >> 10} KiB)")
