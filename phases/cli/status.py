"""`phase status`: where the playbook stands, what is live where, who is waited for."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phases.base.clock import SystemClock, age
from phases.base.errors import UsageError, ended, joined
from phases.cli.common import (
    STYLES,
    example,
    harmless,
    is_terminal,
    json_option,
    load_playbook,
    open_ledger,
    option_for,
    playbook_option,
    print_json,
    show_blocks,
    when,
)
from phases.report.blocks import Block, line

if TYPE_CHECKING:
    from phases.playbook.schema import Playbook
    from phases.run.progress import Standing
    from phases.status.fleet_view import FleetLook, FleetWatcher, WorkerView
    from phases.status.overview import Overview

STYLES_OF_WORKERS = {**STYLES, "yes": "green", "no": "bold red", "?": "yellow"}


@click.command(
    epilog=example(
        "phase status",
        "phase status --watch   # until Ctrl-C",
        "phase status --no-fleet --json",
        "phase status --textfile /var/lib/node_exporter/phasegate.prom",
    )
)
@click.option("--watch", is_flag=True, help="Show it again and again until Ctrl-C; with --json one object a line.")
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 86400),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks of --watch.",
)
@click.option(
    "--fleet/--no-fleet",
    "ask",
    default=True,
    help="Ask hosts and router what is live where, if the playbook has a fleet. Default: ask.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.1, 3600),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time to wait for the fleet.",
)
@click.option(
    "--textfile",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the state for node_exporter's textfile collector, which reads *.prom only.",
)
@playbook_option
@json_option
def status(
    watch: bool,
    interval: float,
    ask: bool,
    timeout: float,
    textfile: Path | None,
    playbook_path: Path | None,
    as_json: bool,
) -> None:
    """Show each phase and who it waits for, what is running, and what is live on which worker.

    Looking changes nothing and exits with 0 whatever it finds; a host or router that does not answer within --timeout is shown as such.
    """
    _require_readable(textfile)
    playbook = load_playbook(playbook_path)
    with contextlib.ExitStack() as stack:
        look = _Look(playbook, stack.enter_context(_fleet(playbook)) if ask else None, timeout, textfile)
        if not watch:
            _print(look, as_json)
            return
        try:
            _watch(look, interval, as_json)
        except KeyboardInterrupt:
            pass  # that is how one ends it


def _require_readable(textfile: Path | None) -> None:
    """UsageError for a file that node_exporter would pass over without a word."""
    from phases.status.textfile import SUFFIX

    if textfile is not None and textfile.suffix != SUFFIX:
        raise UsageError(
            f"--textfile {textfile} does not end in {SUFFIX}, and node_exporter reads no other files.",
            hint=f"Call it {textfile.name}{SUFFIX}, say.",
        )


def _fleet(playbook: Playbook) -> FleetWatcher:
    from phases.status.fleet_view import FleetWatcher

    return FleetWatcher(playbook)


@dataclass
class _Look:
    """How to look once."""

    playbook: Playbook
    fleet: FleetWatcher | None
    timeout: float
    textfile: Path | None

    def take(self) -> tuple[Overview, FleetLook | None]:
        from phases.status import overview, textfile

        seen = overview.gather(self.playbook, open_ledger(self.playbook), SystemClock())
        live = self.fleet.look(self.timeout) if self.fleet else None
        if self.textfile is not None:
            textfile.write(self.textfile, seen, live)
        return seen, live


def _print(look: _Look, as_json: bool) -> None:
    seen, live = look.take()
    if as_json:
        print_json(_json(seen, live))
        return
    show_blocks(_blocks(seen, live), STYLES_OF_WORKERS)


def _watch(look: _Look, interval: float, as_json: bool) -> None:
    if as_json or not is_terminal():
        while True:
            if as_json:
                import json

                click.echo(json.dumps(_json(*look.take()), sort_keys=True, allow_nan=False, default=str))
            else:
                click.echo(f"--- {time.strftime('%H:%M:%S')}")
                _print(look, as_json=False)
            sys.stdout.flush()
            time.sleep(interval)
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as display:
        while True:
            display.update(_drawn(*look.take(), interval), refresh=True)
            time.sleep(interval)


def _drawn(seen: Overview, live: FleetLook | None, interval: float) -> Any:
    """All blocks for a terminal; what does not fit below is cut off by rich."""
    from rich.console import Group
    from rich.text import Text

    from phases.cli.terminal_table import TerminalTable

    parts: list[Any] = [
        Text(f"{seen.playbook.name}  {time.strftime('%H:%M:%S')}, every {interval:g} s, Ctrl-C ends\n", style="dim")
    ]
    for block in _blocks(seen, live):
        style = " ".join(filter(None, ["bold" if block.bold else "", block.colour]))
        rows = [[harmless(cell) for cell in row] for row in block.rows]
        parts.append(
            TerminalTable(block.columns, rows, STYLES_OF_WORKERS)
            if block.columns
            else Text(harmless(block.text), style=style)
        )
    return Group(*parts)


def _json(seen: Overview, live: FleetLook | None) -> dict[str, Any]:
    return {**seen.to_json(), "fleet": live.to_json() if live else None}


def _blocks(seen: Overview, live: FleetLook | None) -> list[Block]:
    columns = ("phase", "state", "checkpoint", "age", "reviewed by")
    blocks = [Block(columns, tuple(_row(standing, seen.at) for standing in seen.phases))] if seen.phases else []
    option = option_for(seen.playbook)
    if seen.damaged:
        blocks.append(
            line(
                f"Damaged ledger, so what phases and rollbacks have recorded is not shown: {seen.damaged}",
                "red",
                bold=True,
            )
        )
    if seen.lost:
        blocks.append(line(f"Lost: {seen.lost}", "red", bold=True))
    for row in seen.waiting:
        text = f"Waiting: {row.phase} for {row.reviewer} since {_moment(row.since)} ({age(seen.at - row.since)}): `phase gate review {row.phase}{option}`"
        blocks.append(line(text, "yellow"))
    blocks += _reasons(seen.phases) + _running(seen, option) + _production(seen, live)
    return blocks


def _row(standing: Standing, now: float) -> tuple[str, ...]:
    checkpoint = standing.checkpoint
    if checkpoint is None:
        return standing.section.name, standing.state.value, "-", "-", "-"
    last = standing.approvals[-1] if standing.approvals else None
    reviewer = "-" if last is None else "nobody" if last.by_yes else last.person.partition(" <")[0]
    return standing.section.name, standing.state.value, checkpoint.name, age(now - checkpoint.recorded_at), reviewer


def _reasons(known: tuple[Standing, ...]) -> list[Block]:
    lines = []
    for standing in known:
        for approval in standing.approvals[-1:]:
            lines.append(
                line(
                    f"{approval.past.capitalize()} {standing.section.name}: {approval.reason} ({approval.person}, {when(approval.at)})"
                )
            )
        if standing.state.value == "stale":
            lines.append(
                line(
                    f"Stale: the kernel's files or its gate in the playbook changed since {standing.section.name} passed; run it again."
                )
            )
    return lines


def _running(seen: Overview, option: str) -> list[Block]:
    if seen.running is None:
        phase_of = lambda run: run.removeprefix(seen.playbook.name + "-").rpartition("-")[0]  # noqa: E731
        return [
            line(f"Unfinished: {run}; `phase run {phase_of(run)} --resume{option}` goes on with it.", "yellow")
            for run in seen.unfinished
        ]
    lines = [line(f"Running: {seen.running.describe(seen.at)}.", bold=True)]
    if seen.live:
        from phases.cli.live_view import is_look, look_head, look_row

        state, room = seen.live, shutil.get_terminal_size().columns - 7
        said = "" if is_look(state["said"]) else f": {state['said']}"
        lines.append(
            line(
                f"  step {state['number']} of {state['steps']}, {state['step']}, for {age(seen.at - state['since'])}{said}"
            )
        )
        if look := state.get("look"):
            lines += [
                line(f"  {look_head(look)}"),
                *(line(f"  {row['verdict']:<5}{look_row(row, room)}") for row in look["tests"]),
            ]
    return lines


def _production(seen: Overview, live: FleetLook | None) -> list[Block]:
    blocks: list[Block] = []
    good, back = seen.last_good, seen.rolled_back
    if live and live.workers:
        blocks.append(line(""))
    if live and (live.workers or "has no fleet" not in live.note):
        blocks += fleet_blocks(live)
    if good:
        blocks.append(
            line(
                f"Last good: {good.release[:12]}, since {good.checkpoint} ({_moment(good.at)}, {age(seen.at - good.at)} ago)"
            )
        )
    if back:
        end = "verified" if back.verified else "INCOMPLETE: a person is needed"
        if back.state == "restored":
            end = "restored and verified"
        elif seen.taken_down and not back.verified and not seen.left_to_restore:
            end = f"not restored before {seen.taken_down.describe()}" + (
                ", so that nothing is left to restore" if seen.taken_down.purged else ""
            )
        elif back.state == "undone":
            end = "hot fallback taken back" + (
                ""
                if back.verified
                else " on some servers only: `phase rollback` restores, `phase rollback --hot --undo` goes on"
            )
        elif back.state == "safe":
            end = "traffic is safe (hot fallback), NOT restored: `phase rollback` restores"
        text = f"Rolled back: {back.checkpoint}, {_moment(back.at)}, {age(seen.at - back.at)} ago, {end}: {back.reason}"
        blocks.append(line(text, "red" if seen.left_to_restore else "", bold=seen.left_to_restore))
    return blocks + _unrestored(seen)


def _unrestored(seen: Overview) -> list[Block]:
    """What a rollback left, worker by worker, also where a hot fallback, or its end, is the newest that was done."""
    back = seen.unrestored
    if back is None or not seen.left_to_restore:
        return []
    left = joined(f"{name}: {why}" for name, why in back.left.items()) or "see it in `phase checkpoint show`"
    return [
        line(
            f"Not restored by {back.checkpoint}, {age(seen.at - back.at)} ago: {ended(left)} `phase rollback` does what is left.",
            "red",
            bold=True,
        )
    ]


def fleet_blocks(live: FleetLook) -> list[Block]:
    """The workers, and what could not be asked."""
    columns = ("worker", "runs", "kernel", "last good", "lease", "serving", "in service", "problem")
    table = [Block(columns, tuple(_worker(row) for row in live.workers))] if live.workers else []
    return [*table, *([line(live.note, "yellow" if live.workers else "")] if live.note else [])]


def _worker(row: WorkerView) -> tuple[str, ...]:
    runs = row.current[:12] or "-"
    kernel = {"incumbent": "fell back", "candidate": "as released", "mixed": "MIXED"}.get(row.kernel, "-")
    return (
        row.name,
        runs,
        kernel,
        row.last_good[:12] or "-",
        row.lease or "-",
        _yes(row.serving),
        _yes(row.in_service),
        row.problem,
    )


def _yes(value: bool | None) -> str:
    return "?" if value is None else "yes" if value else "no"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
