"""`phase rollback`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phases.base.clock import SystemClock
from phases.base.errors import Exit, UsageError, ended
from phases.cli.common import example, json_option, load_playbook, note, option_for, playbook_option, print_json, say

if TYPE_CHECKING:
    from phases.ledger.checkpoint import Checkpoint
    from phases.production.hot import HotSwitch
    from phases.rollback.by_hand import Ended
    from phases.rollback.steps import Rollback


@click.command(
    epilog=example(
        "phase rollback",
        'phase rollback --yes --reason "p99 doubled since noon"',
        "phase rollback --hot --yes",
        "phase rollback --to 0004-full-rollout-PASS",
    )
)
@click.option(
    "--to",
    metavar="CHECKPOINT",
    default="",
    help="Go to the release this full rollout made last-good, instead of each host's own last-good.",
)
@click.option(
    "--hot", is_flag=True, help="Only make traffic safe: running servers to the incumbent's kernel, without a restart."
)
@click.option("--restore", is_flag=True, help="With --hot: then restore by restarts, as without --hot.")
@click.option("--undo", is_flag=True, help="With --hot: servers that fell back go to the candidate's kernel again.")
@click.option(
    "-r",
    "--reason",
    default="asked for by hand",
    show_default=True,
    metavar="TEXT",
    help="Why; kept in the ledger for good.",
)
@click.option(
    "--below-floor",
    is_flag=True,
    help="Restart workers also where fewer than `production.min_available` then serve: users wait, and go back all the same.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@playbook_option
@json_option
def rollback(
    to: str,
    hot: bool,
    restore: bool,
    undo: bool,
    reason: str,
    below_floor: bool,
    yes: bool,
    playbook_path: Path | None,
    as_json: bool,
) -> None:
    """Take production back to the last release that was verified good.

    Works from any machine that reaches the hosts, in any state, also while a run is going on: it takes the hosts over from that
    run. Servers whose kernel can fall back hot do so first, and traffic is safe; then workers are restored by restarts within the
    capacity floor, at which it stops when they do not come back (users stay served; exit 8). With --hot it stops at safe, and
    `phase rollback` restores later. Exit 0: observed as restored (or safe, with --hot); 8: something is left, and what is printed.
    """
    from phases.rollback.phase import roll_back_now, undo_hot

    if (restore or undo) and not hot or (restore and undo):
        raise UsageError(
            "--restore and --undo each go with --hot, one of them at a time.",
            hint="Without --hot a rollback restores anyway.",
        )

    playbook = load_playbook(playbook_path)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("a rollback changes production and nobody is here to confirm it.", hint="Give --yes.")
        click.confirm(f"Roll production of playbook {playbook.name!r} back?", abort=True, err=True)
    if undo:
        _print_undone(*undo_hot(playbook, reason=reason, clock=SystemClock(), progress=note), as_json)
        return
    done = roll_back_now(
        playbook,
        to=to,
        reason=reason,
        clock=SystemClock(),
        progress=note,
        restore=restore or not hot,
        below_floor=below_floor,
    )
    with contextlib.suppress(OSError):  # whoever read it may be gone; the exit code still says how production is
        _show(done, option_for(playbook), as_json, to)
    sys.exit(int(done.code))


def _show(done: Ended, option: str, as_json: bool, to: str) -> None:
    if as_json:
        print_json(
            {"rollback": done.rollback.to_json(), "checkpoint": done.checkpoint.to_json(), "exit": int(done.code)}
        )
    else:
        _print(done, option)
        if not to:
            _print_left_alone(done.rollback, option)


def _print(done: Ended, option: str) -> None:
    """The timeline, what is left, and how it stands; with --hot, that was not to restore, what is left of making traffic safe."""
    back, recorded = done.rollback, done.checkpoint.name
    for event in back.events:
        say("  ".join(filter(None, [f"{event['at']:8.1f} s", event["event"], event["host"], event["note"]])))
    if back.restores or back.hot is None:
        for name, why in back.left.items():
            say(f"not restored: {name}: {why}")
        say(
            f"Production is {'restored and verified' if back.verified else 'INCOMPLETE: a person is needed'}; recorded as {recorded}."
        )
        return
    for name, why in back.hot.missing.items():
        say(f"not safe: {name}: {why}")
    if back.state == "safe":
        say(f"Traffic is safe, and nothing was restarted; recorded as {recorded}.")
        say(
            f"`phase rollback{option}` restores by restarts, `phase rollback --hot --undo{option}` takes the fallback back."
        )
    else:
        say(f"Production is INCOMPLETE: a person is needed; recorded as {recorded}.")
        say(f"`phase rollback{option}` makes the rest safe, and restores, by restarts.")


def _print_left_alone(back: Rollback, option: str) -> None:
    """With a host that cannot be asked, the others may be all that the latest rollout has reached: nobody may take them for safe then."""
    if back.hot and back.hot.left_alone:
        hot = "" if back.restores else " --hot"
        say(
            f"{', '.join(back.hot.left_alone)}: on what a rollback goes back to, and left on it. If that is what is sick, name the full rollout before it: "
            f"`phase rollback{hot} --to CHECKPOINT{option}`."
        )


def _print_undone(switched: HotSwitch, checkpoint: Checkpoint, as_json: bool) -> None:
    """Exit 8 when a rank did not go along: that worker then runs both kernels."""
    if as_json:
        print_json({**switched.to_json(), "checkpoint": checkpoint.to_json()})
    else:
        say(f"{ended(switched.describe())} Recorded as {checkpoint.name}.")
    sys.exit(int(Exit.ROLLBACK_INCOMPLETE if switched.missing else Exit.PASSED))
