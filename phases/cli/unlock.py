"""`phase unlock`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phases.base.errors import Exit, UsageError
from phases.cli.common import example, json_option, load_playbook, note, playbook_option, print_json, say

if TYPE_CHECKING:
    from phases.engines.ssh.fleet import Fleet
    from phases.playbook.schema import Playbook


@click.command(epilog=example("phase unlock", "phase unlock worker-07", "phase unlock --all-hosts --yes"))
@click.argument("hosts", nargs=-1, metavar="[HOST]...")
@click.option("--all-hosts", is_flag=True, help="Look at every host of the fleet, too.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask: you have made sure that the owners are gone.")
@playbook_option
@json_option
def unlock(hosts: tuple[str, ...], all_hosts: bool, yes: bool, playbook_path: Path | None, as_json: bool) -> None:
    """Show whose lock it is and whether that process is alive (known on its own machine only), ask, and remove it.

    Without HOST: the lock of this playbook in this repository. With HOST (a name from the fleet section): the locks of
    those hosts. Exactly the lock that was shown is removed; if it changes hands meanwhile, nothing is. Exits with 6 when
    a lock is left standing.
    """
    playbook = load_playbook(playbook_path)
    rows = _unlock_hosts(playbook, hosts, all_hosts, yes, as_json) if hosts or all_hosts else []
    if not hosts:
        rows.insert(0, _unlock_run(playbook, yes, as_json))
    if as_json:
        print_json({"locks": rows})
    if any(row["state"] == "failed" for row in rows):
        sys.exit(int(Exit.OPERATIONAL))
    sys.exit(int(Exit.LOCKED if any(row["state"] == "kept" for row in rows) else Exit.PASSED))


def _unlock_run(playbook: Playbook, yes: bool, as_json: bool) -> dict[str, Any]:
    """The local lock of the playbook."""
    from phases.base.clock import SystemClock
    from phases.ledger import repository as source
    from phases.run import run_directory
    from phases.run.lock import Lock, life

    clock = SystemClock()
    lock = Lock(run_directory.state_directory(source.repository_of(playbook.path.parent)), playbook.name, clock)
    owner = lock.owner()
    row: dict[str, Any] = {"host": "local", "lock": playbook.name, "state": "free", "owner": "", "owner_alive": None}
    if owner is None:
        _say(f"{playbook.name} is not locked here.", as_json)
        return row
    row.update(owner=owner.describe(clock.now()), owner_alive=life(owner).alive)
    _say(f"{playbook.name} is locked here: {row['owner']}; {life(owner).value}.", as_json)
    if not _agreed("Remove this lock?", yes):
        return {**row, "state": "kept"}
    broken = lock.break_lock(owner.token)
    _say("Removed." if broken else "It has changed hands or gone since; nothing was removed.", as_json)
    return {**row, "state": "removed" if broken else "kept"}


def _unlock_hosts(
    playbook: Playbook, names: tuple[str, ...], all_hosts: bool, yes: bool, as_json: bool
) -> list[dict[str, Any]]:
    """The locks of hosts: all are looked at side by side, then asked about one by one."""
    from phases.engines.ssh.fleet import Fleet
    from phases.engines.ssh.locks import show_lock

    settings = playbook.sections.get("fleet")
    if settings is None:
        raise UsageError(
            f"{playbook.path} has no fleet section.",
            hint="Without HOST, `phase unlock` removes the lock of this repository.",
        )
    rows = []
    with Fleet(settings.workers(), limit=settings.at_once) as fleet:
        chosen = fleet.hosts if all_hosts else [fleet[name] for name in names]
        for name, result in fleet.each(show_lock, hosts=chosen, deadline=60.0).items():
            if not result.ok:
                note(f"{name}: {result.reason}")
                rows.append(
                    {
                        "host": name,
                        "lock": name,
                        "state": "failed",
                        "owner": "",
                        "owner_alive": None,
                        "reason": result.reason,
                    }
                )
            else:
                rows.append(_unlock_host(fleet, name, result.value, yes, as_json))
    return rows


def _unlock_host(fleet: Fleet, name: str, seen: Any, yes: bool, as_json: bool) -> dict[str, Any]:
    from phases.base.clock import age
    from phases.base.errors import LockedError
    from phases.engines.ssh.lease import read_lease
    from phases.engines.ssh.locks import break_lock

    row: dict[str, Any] = {"host": name, "lock": name, "state": "free", "owner": "", "owner_alive": None}
    if seen is None:
        _say(f"{name} is not locked.", as_json)
        return row
    row.update(
        owner=f"{seen.owner}, for {seen.purpose or 'an unnamed purpose'}, taken {age(seen.age)} ago",
        owner_alive=seen.life.alive,
    )
    orphan = "; nobody stands behind it any more, the next run would take it over by itself" if seen.orphan else ""
    _say(f"{name} is locked: {row['owner']}; {seen.life.value}{orphan}.", as_json)
    session = fleet.session(fleet[name])
    lease = read_lease(session)
    if lease and lease.active:
        _say(
            f"{name} has a lease ({lease.state}, {max(0, lease.seconds_left):.0f} s left): left alone, it goes back by itself and frees the lock.",
            as_json,
        )
    if not _agreed(f"Remove the lock of {name}?", yes):
        return {**row, "state": "kept"}
    try:
        broken = break_lock(session, seen)
    except LockedError as fault:
        note(str(fault))
        return {**row, "state": "kept"}
    _say("Removed." if broken else "It was gone already.", as_json)
    return {**row, "state": "removed"}


def _agreed(question: str, yes: bool) -> bool:
    """Ask a person; without one (no terminal, no --yes) the answer is no."""
    if yes:
        return True
    if not sys.stdin.isatty():
        note(f"{question} Nobody is there to answer: give --yes after making sure that its owner is gone.")
        return False
    return click.confirm(question, default=False, err=True)


def _say(line: str, as_json: bool) -> None:
    note(line) if as_json else say(line)
