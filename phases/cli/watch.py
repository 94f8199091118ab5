"""`phase watch`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from phases.base.clock import SystemClock
from phases.cli.common import example, json_option, load_playbook, note, playbook_option, print_json, say


@click.command(epilog=example("phase watch", "phase watch --once --json   # from cron"))
@click.option(
    "--once",
    is_flag=True,
    help="One look, then exit: 0 well, 5 too little traffic to tell, 7 or 8 after a rollback, 4 where the policy only reports.",
)
@playbook_option
@json_option
def watch(once: bool, playbook_path: Path | None, as_json: bool) -> None:
    """Guard production after a rollout against the recorded reference.

    Every look asks whether each worker is well and whether latencies are within the playbook's margins of what Phase 3 recorded. A
    regression that a second look confirms is rolled back where `watch: roll_back` says so. Ctrl-C ends it.
    """
    from phases.watch.phase import watch as guard

    code, facts = guard(load_playbook(playbook_path), once=once, clock=SystemClock(), progress=note)
    with contextlib.suppress(OSError):  # whoever read it may be gone; the exit code still says how production is
        if as_json:
            print_json({**facts, "exit": int(code)})
        else:
            say(f"{facts['verdict']}: {facts['reason']}")
    sys.exit(int(code))
