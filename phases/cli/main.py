"""The `phase` command: a table of commands, each imported only when it is used."""

from __future__ import annotations

import sys

import click

from phases import __version__
from phases.cli.failures import run_and_exit
from phases.cli.lazy import LazyGroup, Table

COMMANDS: Table = {
    "demo": ("phases.cli.demo:demo", "Show it at work on this machine, in two minutes; no GPU, no SGLang."),
    "init": ("phases.cli.init:init", "Scaffold a kernel of your own that can run phase 1 at once."),
    "doctor": ("phases.cli.doctor:doctor", "Check what this machine lacks, with the cure for each problem."),
    "plan": ("phases.cli.plan:plan", "Show what a run would do, step by step; changes nothing."),
    "run": ("phases.cli.run:run", "Run a phase, or all phases up to the next review."),
    "status": ("phases.cli.status:status", "Show how far the kernel has come, and what is running."),
    "gate": ("phases.cli.gate:gate", "Review, approve or reject a checkpoint."),
    "checkpoint": ("phases.cli.checkpoint:checkpoint", "List, show, compare, verify and export checkpoints."),
    "report": ("phases.cli.report:report", "Write a checkpoint as one HTML page."),
    "export": ("phases.cli.export:export", "Write a kernel and its results for flashinfer-bench."),
    "rollback": ("phases.cli.rollback:rollback", "Take production back to the last good release."),
    "watch": ("phases.cli.watch:watch", "Watch production and roll back on a latency regression."),
    "fleet": ("phases.cli.fleet:fleet", "Ask what runs where; a fleet's first release; end the embedded fleet."),
    "analyze": ("phases.cli.analyze:analyze", "Analyse recorded latencies of canary and control."),
    "kernel": ("phases.cli.kernel:kernel", "Survey installed kernels, tune ours, import those of others."),
    "playbook": ("phases.cli.playbook:playbook", "Check a playbook; print its JSON Schema."),
    "notify": ("phases.cli.notify:notify", "Send a test message to whom the playbook tells."),
    "completion": ("phases.cli.completion:completion", "Print the completion script for bash, zsh or fish."),
    "unlock": ("phases.cli.unlock:unlock", "Remove a lock whose owner is gone."),
}

EXIT_CODES = """\b
Exit codes:
  0  passed
  1  operational error
  2  usage or playbook error
  3  waiting for review
  4  gate failed, production untouched
  5  inconclusive, held
  6  locked by another run
  7  failed and rolled back, verified
  8  rollback incomplete, a person is needed
"""

EXAMPLE = """\b
Examples:
  phase run build-parity -p playbooks/local.yaml
  phase gate review
  phase gate approve --reason "4.1x, parity clean"
"""


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    epilog=f"{EXAMPLE}\n{EXIT_CODES}",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="phase")
def cli() -> None:
    """Take a GPU kernel from source to production serving, one gated phase at a time."""


def main() -> None:
    """Entry point: run the command; every failure ends in one paragraph on stderr and its exit code."""
    run_and_exit(cli, sys.argv[1:])


if __name__ == "__main__":
    main()
