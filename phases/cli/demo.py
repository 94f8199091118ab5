"""`phase demo`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from phases.base.errors import Exit, ServingError
from phases.cli.common import example, json_option, note, print_json


@click.command(epilog=example("phase demo", "phase demo --keep && cd phasegate-demo && phase status"))
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), default=Path("phasegate-demo"))
@click.option("--keep", is_flag=True, help="Leave the fleet standing, to try things on; `phase fleet down` ends it.")
@json_option
def demo(directory: Path, keep: bool, as_json: bool) -> None:
    """Show phasegate at work, in two minutes: a canary that passes, one that is slow and goes back by itself, its report.

    Engine, leases, router, rollback and ledger are the real ones; the workers are stand-ins without a model and say so. Needs git
    and pip; no SGLang, no torch, no GPU. Everything is below DIRECTORY and the cache directory.
    """
    from phases.demo import repository

    repository.make(directory)
    note(f"a repository with a kernel and {len(repository.CANDIDATES)} playbooks is in {directory}")
    try:
        note("1. a canary on a good candidate, beside a control, with users on both")
        _phase(directory, "run", "tp8-canary", "--yes", expected=Exit.PASSED, quiet=as_json)
        note("2. a canary on a slow candidate: seen, and rolled back by itself (exit 7)")
        _phase(directory, "run", "tp8-canary", "--yes", "-p", "slow.yaml", expected=Exit.ROLLED_BACK, quiet=as_json)
        note("3. its report")
        _phase(directory, "report", "-p", "slow.yaml", expected=Exit.PASSED, quiet=as_json)
    finally:
        if not keep:
            _phase(directory, "fleet", "down", "--purge", quiet=as_json)
    if as_json:
        pages = sorted(str(path) for path in directory.glob("*.html"))
        print_json({"directory": str(directory), "kept": keep, "reports": pages})
    if keep:
        note(f"The fleet stands. Go on in {directory}: see {repository.MARK} there.")


def _phase(directory: Path, *arguments: str, expected: Exit | None = None, quiet: bool = False) -> None:
    """One `phase` command, as a person would give it; ServingError when it ends with another exit code than expected."""
    click.echo(f"\n$ phase {' '.join(arguments)}", err=True)
    done = subprocess.run(
        [sys.executable, "-m", "phases.cli.main", *arguments],
        cwd=directory,
        check=False,
        stdout=sys.stderr if quiet else None,
    )
    if expected is not None and done.returncode != expected:
        raise ServingError(
            f"`phase {' '.join(arguments)}` ended with {done.returncode}, not {int(expected)}.",
            hint="What it said is above; `phase status` there tells where it stands.",
        )
