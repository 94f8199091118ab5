"""Sections of a playbook that production phases share, and the fleet they name: what is needed to reach the hosts, and no more."""

from __future__ import annotations

from typing import Any

from phases.base.errors import PlaybookError
from phases.engines.ssh.settings import FleetSettings
from phases.ledger.repository import repository_of
from phases.playbook.schema import Playbook


def section_of(playbook: Playbook, name: str, needed_by: str) -> Any:
    """A shared section of the playbook; PlaybookError when it is missing."""
    found = playbook.sections.get(name)
    if found is None:
        raise PlaybookError(
            f"{playbook.path} has no section {name!r}, which {needed_by} needs.",
            hint=f"Add `{name}:` at the top level.",
        )
    return found


def fleet_of_playbook(playbook: Playbook, needed_by: str, *, choose_ports: bool = False) -> FleetSettings:
    """The hosts: as the playbook lists them, or the embedded fleet's.

    Args:
        choose_ports: of an embedded fleet that has none yet; otherwise nothing is written, and its ports are 0.
    Raises:
        PlaybookError: the playbook names no fleet.
    """
    embedded = playbook.sections.get("embedded_fleet")
    if embedded is None:
        return section_of(playbook, "fleet", needed_by)  # type: ignore[no-any-return]
    from phases.engines.embedded.fleet import fleet_of

    return fleet_of(embedded, repository_of(playbook.path), playbook.name, choose_ports=choose_ports)
