"""`phase doctor`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phases.base.errors import Exit, UsageError
from phases.cli.common import STYLES, example, find_playbook, json_option, playbook_option, print_json, say, show_table

if TYPE_CHECKING:
    from phases.playbook.schema import Playbook

# Parts that add checks of their own: "module:function"; called with the playbook, they return (name, check) pairs.
MORE_CHECKS = ("phases.engines.ssh.doctor:checks", "phases.notify.doctor:checks")


@click.command(epilog=example("phase doctor", "phase doctor -p playbooks/local.yaml --json"))
@playbook_option
@json_option
def doctor(playbook_path: Path | None, as_json: bool) -> None:
    """Check this machine (and the playbook's fleet) for whatever a run would trip over; each problem has its cure.

    Exits with 1 when there is a problem; warnings alone are no failure.
    """
    from phases.run import checks

    playbook = _playbook(playbook_path)
    directory = playbook.path.parent if playbook else Path.cwd()
    findings = checks.run_checks([*checks.local_checks(playbook, directory), *_more(playbook)])
    problems = [finding for finding in findings if finding.health is checks.Health.PROBLEM]
    if as_json:
        rows = [{**vars(finding), "health": finding.health.value} for finding in findings]
        print_json({"playbook": str(playbook.path) if playbook else None, "findings": rows, "problems": len(problems)})
    else:
        _print(findings, playbook)
    sys.exit(int(Exit.OPERATIONAL if problems else Exit.PASSED))


def _playbook(path: Path | None) -> Playbook | None:
    """The playbook asked for or found; a broken one is an error, a missing one only means fewer checks."""
    from phases.playbook import loader

    if path is None:
        try:
            path = find_playbook()
        except UsageError:
            return None
    return loader.load(path)


def _more(playbook: Playbook | None) -> list[Any]:
    found: list[Any] = []
    for reference in MORE_CHECKS if playbook else ():
        module, _, function = reference.partition(":")
        if importlib.util.find_spec(module):
            found += getattr(importlib.import_module(module), function)(playbook)
    return found


def _print(findings: list[Any], playbook: Playbook | None) -> None:
    hosts = any(finding.host != "local" for finding in findings)
    columns = ["check", "state", *(["host"] if hosts else []), "found", "cure"]
    rows = [[f.name, f.health.value, *([f.host] if hosts else []), f.found, f.cure] for f in findings]
    show_table(columns, rows, STYLES)
    problems = sum(finding.health.value == "problem" for finding in findings)
    say("No problems." if not problems else f"{problems} {'problem' if problems == 1 else 'problems'}.")
    if playbook is None:
        say("No playbook here: ledger, remote and architectures were not checked (-p FILE).")
