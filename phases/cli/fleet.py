"""`phase fleet`: what is live where, and ending the embedded fleet."""

from __future__ import annotations

from pathlib import Path

import click

from phases.base.clock import SystemClock
from phases.base.errors import LedgerError, UsageError
from phases.cli.common import example, json_option, load_playbook, note, playbook_option, print_json, show_blocks


@click.group(epilog=example("phase fleet status", "phase fleet down"))
def fleet() -> None:
    """The workers of a playbook's production."""


@fleet.command(epilog=example("phase fleet status", "phase fleet status --timeout 3 --json"))
@click.option(
    "--timeout",
    type=click.FloatRange(0.1, 3600),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time to wait for an answer.",
)
@playbook_option
@json_option
def status(timeout: float, playbook_path: Path | None, as_json: bool) -> None:
    """Ask every host and the router what runs where.

    What does not answer in time is shown as such. `phase status` shows this too.
    """
    from phases.cli.status import STYLES_OF_WORKERS, fleet_blocks
    from phases.status.fleet_view import FleetWatcher

    with FleetWatcher(load_playbook(playbook_path)) as watcher:
        look = watcher.look(timeout)
    if as_json:
        print_json(look.to_json())
        return
    show_blocks(fleet_blocks(look), STYLES_OF_WORKERS)


@fleet.command(epilog=example("phase fleet adopt", "phase fleet adopt --yes   # from a script"))
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@playbook_option
@json_option
def adopt(yes: bool, playbook_path: Path | None, as_json: bool) -> None:
    """Put the incumbent's release on workers that have none yet.

    The first thing to do with a real fleet: until a worker has a release recorded as good there is nothing to go back to. Workers
    that serve are restarted a few at a time, under `production.min_available`. Again: does what is left to do.
    """
    from phases.fleet.adopt import adopt as put_on
    from phases.fleet.adopt import incumbent_of
    from phases.fleet.live import open_production
    from phases.run.session import adhoc_run

    playbook, clock = load_playbook(playbook_path), SystemClock()
    if playbook.sections.get("embedded_fleet") is not None:
        raise UsageError(
            f"{playbook.path} has an embedded fleet.", hint="It starts by itself with the first production phase."
        )
    run = adhoc_run(playbook, "adopt", clock)
    with open_production(run, "adopt", clock, note) as production:
        if not yes and not click.confirm(
            f"Restart up to {len(production.workers)} workers of {playbook.name} on the incumbent's release?", err=True
        ):
            raise UsageError("nothing was changed.", hint="Answer y, or give --yes.")
        done = put_on(production, incumbent_of(run, production))
    if as_json:
        print_json({"adopted": list(done.adopted), "there": list(done.there)})
        return
    click.echo(
        f"Adopted {', '.join(done.adopted) or 'nobody'}"
        + (f"; {', '.join(done.there)} had a release." if done.there else ".")
    )


@fleet.command(epilog=example("phase fleet down", "phase fleet down --purge"))
@click.option("--purge", is_flag=True, help="Remove the workers' directories and ports as well.")
@playbook_option
@json_option
def down(purge: bool, playbook_path: Path | None, as_json: bool) -> None:
    """Stop the embedded fleet: its workers and its router.

    Leases end first, so that no worker is started again. `phase status` then says when it was taken down, and by whom. Stopped half way:
    given again, it finishes. Exit 6 while a run or a rollback is at work; 1 when a worker could not be stopped, or something that is not
    shown to be the worker still listens on its port.
    """
    from phases.engines.embedded.down import down as stop
    from phases.ledger.repository import repository_of
    from phases.run.lock import Lock
    from phases.run.run_directory import state_directory

    playbook, clock = load_playbook(playbook_path), SystemClock()
    settings = playbook.sections.get("embedded_fleet")
    if settings is None:
        raise UsageError(f"{playbook.path} has no embedded fleet.", hint="A real fleet is not stopped by this command.")
    repo = repository_of(playbook.path)
    with Lock(state_directory(repo), playbook.name, clock).held("phase fleet down"):
        stopped = stop(repo, playbook.name, settings, by=_person(repo), clock=clock, progress=note, purge=purge)
    if as_json:
        print_json({"stopped": stopped})
        return
    click.echo(f"Stopped {', '.join(stopped)}." if stopped else "Nothing was running.")


def _person(repo: Path) -> str:
    """As git names whoever works here; where it does not, as the system does."""
    from phases.engines.ssh.locks import owner_name
    from phases.ledger.repository import identity

    try:
        return identity(repo)
    except LedgerError:
        return owner_name().partition(" pid ")[0]
