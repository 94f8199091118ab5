"""`phase rollback`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from phases.cli.common import example, json_option, load_playbook, note, playbook_option, print_json
from phases.engine.clock import SystemClock
from phases.errors import Exit, UsageError


@click.command(epilog=example("phase rollback", 'phase rollback --yes --reason "p99 doubled since noon"', "phase rollback --to 0004-full-rollout-PASS"))
@click.option("--to", metavar="CHECKPOINT", default="", help="Go to the release this full rollout made last-good, instead of each host's own last-good.")
@click.option("-r", "--reason", default="asked for by hand", show_default=True, metavar="TEXT", help="Why; kept in the ledger for good.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@playbook_option
@json_option
def rollback(to: str, reason: str, yes: bool, playbook_path: Path | None, as_json: bool) -> None:
    """Take production back to the last release that was verified good.

    Works from any machine that reaches the hosts, in any state, also while a run is going on: it takes the hosts over from that
    run. Traffic leaves the candidate first, then workers are restored within the capacity floor. Exit 0: observed as restored;
    8: something is left, and what is printed.
    """
    from phases.rollback import roll_back_now

    playbook = load_playbook(playbook_path)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("a rollback changes production and nobody is here to confirm it.", hint="Give --yes.")
        click.confirm(f"Roll production of playbook {playbook.name!r} back?", abort=True, err=True)
    ended = roll_back_now(playbook, to=to, reason=reason, clock=SystemClock(), progress=note)
    if as_json:
        print_json({"rollback": ended.rollback.to_json(), "checkpoint": ended.checkpoint.to_json(), "exit": int(ended.code)})
    else:
        _print(ended)
    sys.exit(int(ended.code))


def _print(ended: object) -> None:
    back = ended.rollback  # type: ignore[attr-defined]
    for event in back.events:
        click.echo(f"{event['at']:8.1f} s  {event['event']}  {event['host']} {event['note']}".rstrip())
    for name, why in back.left.items():
        click.echo(f"not restored: {name}: {why}")
    state = "restored and verified" if ended.code is Exit.PASSED else "INCOMPLETE: a person is needed"  # type: ignore[attr-defined]
    click.echo(f"Production is {state}; recorded as {ended.checkpoint.name}.")  # type: ignore[attr-defined]
