"""`phase checkpoint list`, `show`, `diff`, `verify` and `export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phases.base.errors import Exit, LedgerError, UsageError
from phases.cli.common import (
    STYLES,
    completing,
    example,
    harmless,
    json_option,
    load_playbook,
    note,
    open_ledger,
    playbook_option,
    print_json,
    say,
    short,
    show_table,
    when,
)
from phases.cli.lazy import LazyGroup

if TYPE_CHECKING:
    from phases.base.results import Results
    from phases.ledger.checkpoint import Approval, Checkpoint
    from phases.ledger.ledger import Ledger

which = click.argument(
    "checkpoint", metavar="[CHECKPOINT]", default="latest", shell_complete=completing("complete_checkpoint")
)


@click.group(
    cls=LazyGroup,
    table={
        "list": ("phases.cli.checkpoint:list_", "List the checkpoints of the ledger."),
        "show": ("phases.cli.checkpoint:show", "Show one checkpoint: its manifest, its table, any of its files."),
        "diff": ("phases.cli.checkpoint:diff", "Compare the benchmarks of two checkpoints, with intervals."),
        "verify": ("phases.cli.checkpoint:verify", "Prove that nothing in the ledger was altered."),
        "export": ("phases.cli.checkpoint:export", "Write a checkpoint out as plain files that verify on their own."),
    },
    epilog=example("phase checkpoint list", "phase checkpoint diff 1 2", "phase checkpoint verify"),
)
def checkpoint() -> None:
    """List, show, compare, verify and export checkpoints.

    A checkpoint is named by its number, its name (0003-build-parity-PASS), its digest (six digits of it will do), or `latest`.
    """


def _ledger(playbook_path: Path | None) -> Ledger:
    return open_ledger(load_playbook(playbook_path))


@click.command("list", epilog=example("phase checkpoint list", "phase checkpoint list --json"))
@playbook_option
@json_option
def list_(playbook_path: Path | None, as_json: bool) -> None:
    """List all checkpoints, oldest first, with what was decided on them.

    Exits with 1 when one of them, or a decision, is damaged, and names it.
    """
    ledger = _ledger(playbook_path)
    sound, damaged = ledger.survey()
    faults = [found.error(ledger.tag_prefix) for found in damaged]
    rows = [(found, _decisions(ledger, found, faults)) for found in sound]
    if as_json:
        listed = [{**found.to_json(), "approvals": [vars(row) for row in made or []]} for found, made in rows]
        print_json({"checkpoints": listed, "damaged": [str(fault) for fault in faults]})
    elif rows:
        columns = ["number", "phase", "verdict", "digest", "recorded", "kernel", "decision"]
        show_table(columns, [_row(found, made) for found, made in rows], STYLES)
    elif not faults:
        click.echo(f"No checkpoint yet on branch {ledger.branch}.")
    for fault in faults:
        note(str(fault))
    if faults:
        sys.exit(int(Exit.OPERATIONAL))


def _decisions(ledger: Ledger, found: Checkpoint, faults: list[LedgerError]) -> list[Approval] | None:
    """What was decided on it; None, and one more fault, when that cannot be read."""
    try:
        return ledger.approvals(found)
    except LedgerError as fault:
        faults.append(fault)
        return None


def _row(found: Checkpoint, made: list[Approval] | None) -> list[str]:
    decision = "damaged" if made is None else made[-1].past if made else "-"
    recorded = when(str(found.manifest.get("recorded_at", "-")))
    return [
        str(found.number),
        found.phase,
        found.verdict.value,
        short(found.digest),
        recorded,
        str(found.manifest.get("kernel")),
        decision,
    ]


@click.command(
    epilog=example("phase checkpoint show", "phase checkpoint show 3", "phase checkpoint show 3 --file results.json")
)
@which
@click.option(
    "--file", "file_name", metavar="NAME", help="Write this file of the checkpoint to stdout instead, byte for byte."
)
@playbook_option
@json_option
def show(checkpoint: str, file_name: str | None, playbook_path: Path | None, as_json: bool) -> None:
    """Show a checkpoint: what it is of, its files, and its tables."""
    ledger = _ledger(playbook_path)
    found = ledger.find(checkpoint)
    files = ledger.files(found)
    if file_name is not None:
        _write_file(found, files, file_name)
        return
    if as_json:
        print_json(
            {**found.to_json(), "manifest": found.manifest, "files": {name: len(data) for name, data in files.items()}}
        )
        return
    click.echo(f"Checkpoint {found.name}\ndigest  {found.digest}\ncommit  {found.commit}")
    click.echo(f"by      {found.author}, {when(str(found.manifest.get('recorded_at')))} UTC\n")
    for name in sorted(files):
        click.echo(f"  {len(files[name]):>9}  {name}")
    for name in sorted(name for name in files if name.endswith(".txt")):
        click.echo(f"\n--- {name}\n{files[name].decode(errors='replace').rstrip()}")


def _write_file(found: Checkpoint, files: dict[str, bytes], name: str) -> None:
    if name not in files:
        from phases.playbook.located import nearest

        raise UsageError(f"{found.name} has no file {name!r}{nearest(name, files)}.")
    sys.stdout.buffer.write(files[name])
    sys.stdout.buffer.flush()


@click.command(
    epilog=example("phase checkpoint diff 1 2", "phase checkpoint diff 0001-build-parity-PASS latest --json")
)
@click.argument("first", shell_complete=completing("complete_checkpoint"))
@click.argument("second", default="latest", shell_complete=completing("complete_checkpoint"))
@playbook_option
@json_option
def diff(first: str, second: str, playbook_path: Path | None, as_json: bool) -> None:
    """Compare two checkpoints of one phase: what moved in rules, cases and playbook, loosening marked; then the benchmarks, case by
    case: ratio of medians with its interval."""
    from phases.ledger.verify import read_as_recorded
    from phases.report import diff as report_diff
    from phases.report import moved
    from phases.run.closing import read_gate

    ledger = _ledger(playbook_path)
    before, after = ledger.find(first), ledger.find(second)
    if before.phase != after.phase:
        raise UsageError(
            f"{before.name} and {after.name} are of two phases: nothing in them compares.",
            hint="`phase checkpoint list` shows which are of one.",
        )
    with read_as_recorded(ledger, before, after):
        old, new = _results(ledger, before), _results(ledger, after)
        compared = report_diff.compare(old, new)
        gates = [read_gate(found, ledger.files(found)) for found in (before, after)]
        moves = moved.moves((gates[0], old), (gates[1], new))
        playbook = moved.playbook_diff(*(ledger.files(found).get(moved.PLAYBOOK) for found in (before, after)))
        if as_json:
            print_json(
                {
                    "first": before.to_json(),
                    "second": after.to_json(),
                    "moves": [move.to_json() for move in moves],
                    "playbook": playbook,
                    "diff": compared.to_json(),
                }
            )
            return
        click.echo(f"{before.name} → {after.name}")
        for text in [*map(str, moves), *playbook.splitlines()]:
            say(f"  {harmless(text)}")
        click.echo(report_diff.text(compared, (str(before.number), str(after.number))).rstrip())


def _results(ledger: Ledger, found: Checkpoint) -> Results:
    from phases.base.results import Results
    from phases.ledger.checkpoint import RESULTS

    try:
        return Results.from_json(json.loads(ledger.files(found)[RESULTS]))
    except (KeyError, ValueError, TypeError) as fault:
        raise LedgerError(
            f"{found.name} holds no readable results: {fault}.", hint=f"Run `phase checkpoint verify {found.number}`."
        ) from fault


@click.command(
    epilog=example(
        "phase checkpoint verify", "phase checkpoint verify 3", "phase checkpoint verify ./0003-build-parity-PASS"
    )
)
@click.argument("checkpoint", metavar="[CHECKPOINT|DIRECTORY]", required=False)
@playbook_option
@json_option
def verify(checkpoint: str | None, playbook_path: Path | None, as_json: bool) -> None:
    """Prove that nothing was altered: in the whole ledger, one checkpoint, or the directory of an exported one.

    Exits with 1 and names every file that is not what was recorded.
    """
    from phases.ledger import verify as ledger_verify

    directory = Path(checkpoint) if checkpoint and Path(checkpoint).is_dir() else None
    if directory:
        problems, what = ledger_verify.verify_directory(directory), str(directory)
    else:
        ledger = _ledger(playbook_path)
        only = ledger.look_up(checkpoint) if checkpoint else None
        problems = ledger_verify.verify_ledger(ledger, only)
        what = only.name if only else "the ledger" if problems else _everything(ledger)
    if as_json:
        print_json({"verified": what, "ok": not problems, "problems": [vars(problem) for problem in problems]})
    else:
        for problem in problems:
            click.echo(f"ALTERED  {problem}")
        found = "nothing was altered" if not problems else f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        click.echo(f"{what}: {found}")
    sys.exit(int(Exit.PASSED if not problems else Exit.OPERATIONAL))


def _everything(ledger: Ledger) -> str:
    count = len(ledger.checkpoints())
    return f"{'the only checkpoint' if count == 1 else f'all {count} checkpoints'} on branch {ledger.branch}"


@click.command(
    epilog=example("phase checkpoint export 3 --to checkpoints", "phase checkpoint export latest --to /tmp/for-review")
)
@which
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("checkpoints"),
    show_default=True,
    help="Directory to write into.",
)
@playbook_option
@json_option
def export(checkpoint: str, target: Path, playbook_path: Path | None, as_json: bool) -> None:
    """Write a checkpoint out as a directory of plain files; `sha256sum -c SHA256SUMS` checks it without this toolkit."""
    from phases.ledger import export as ledger_export

    ledger = _ledger(playbook_path)
    found = ledger.find(checkpoint)
    directory = ledger_export.export(ledger, found, target)
    if as_json:
        print_json({**found.to_json(), "directory": str(directory)})
        return
    click.echo(f"{found.name} written to {directory}")
