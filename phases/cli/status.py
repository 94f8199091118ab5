"""`phase status`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phases.cli.common import (
    STYLES, example, json_option, load_playbook, open_ledger, option_for, playbook_option, print_json, short, show_table, when,
)  # fmt: skip
from phases.engine.clock import SystemClock

if TYPE_CHECKING:
    from phases.engine.lock import Owner
    from phases.engine.progress import Standing
    from phases.playbook.schema import Playbook


@click.command(epilog=example("phase status", "phase status -p playbooks/local.yaml --json"))
@playbook_option
@json_option
def status(playbook_path: Path | None, as_json: bool) -> None:
    """Show each phase of the playbook, its newest checkpoint and who approved it; and what is running or unfinished."""
    from phases.engine import progress, session

    playbook = load_playbook(playbook_path)
    known = progress.standings(playbook, open_ledger(playbook), session.kernel_digest(playbook))
    owner, unfinished = _running(playbook)
    if as_json:
        print_json({
            "playbook": playbook.name, "kernel": str(playbook.kernel), "phases": [standing.to_json() for standing in known],
            "running": vars(owner) if owner else None, "unfinished": unfinished,
        })  # fmt: skip
        return
    show_table(["phase", "state", "checkpoint", "digest", "recorded", "reviewed by"], [_row(standing) for standing in known], STYLES)
    _print_reason(known)
    if owner:
        click.echo(f"Locked: {owner.describe(SystemClock().now())}.")
    for run_id in unfinished if not owner else ():
        phase = run_id.removeprefix(playbook.name + "-").rpartition("-")[0]
        click.echo(f"Unfinished: {run_id}; `phase run {phase} --resume{option_for(playbook)}` goes on with it.")


def _row(standing: Standing) -> list[str]:
    checkpoint = standing.checkpoint
    if checkpoint is None:
        return [standing.section.name, standing.state.value, "-", "-", "-", "-"]
    reviewer = standing.approvals[-1].person if standing.approvals else "-"
    recorded = when(str(checkpoint.manifest.get("recorded_at", "-")))
    return [standing.section.name, standing.state.value, checkpoint.name, short(checkpoint.digest), recorded, reviewer]


def _print_reason(known: tuple[Standing, ...]) -> None:
    for standing in known:
        for approval in standing.approvals[-1:]:
            verb = {"approve": "Approved", "reject": "Rejected"}[approval.decision]
            click.echo(f"{verb} {standing.section.name}: {approval.reason} ({approval.person}, {when(approval.at)})")
        if standing.state.value == "stale":
            click.echo(f"Stale: the kernel's files or its gate in the playbook changed since {standing.section.name} passed; run it again.")


def _running(playbook: Playbook) -> tuple[Owner | None, list[str]]:
    """(who holds the lock, attempts that were cut off); nothing is created where no run ever was."""
    from phases.engine import run_directory, session, source
    from phases.engine.lock import Lock, is_dead

    state = source.repository_of(playbook.path) / ".phase"
    if not state.is_dir():
        return None, []
    owner = Lock(state, playbook.name, SystemClock()).owner()
    if owner and is_dead(owner):
        owner = None  # killed: the next run takes its lock over, so nothing stands in the way
    latest: list[Any] = [run_directory.attempts(state, playbook.name, section.name)[-1:] for section in playbook.phases]
    return owner, [run.record.run_id for runs in latest for run in runs if not session.finished(run)]
