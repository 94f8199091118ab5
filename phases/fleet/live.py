"""What the production steps of one process share: the open `Production`, made when first needed and closed at the end."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phases.base.errors import UsageError
from phases.base.files import write_atomically
from phases.engines.embedded import taken_down
from phases.engines.ssh.bundle import Bundle
from phases.engines.ssh.fleet import Fleet
from phases.engines.ssh.settings import FleetSettings
from phases.fleet.inherited_leases import adopt_leases
from phases.fleet.sections import fleet_of_playbook, section_of
from phases.fleet.traffic import Traffic
from phases.notify.teller import teller_of
from phases.production.production import Production
from phases.production.releases import fleet_releases
from phases.production.settings import ProductionSettings
from phases.run.phase_run import PhaseRun
from phases.run.steps import Facts, StepContext


@dataclass
class Live:
    """One run's hold on production. Steps of a plan make none of this; the first step that runs does."""

    run: PhaseRun
    _production: Production | None = None
    _bundles: dict[str, Bundle] = field(default_factory=dict)
    _traffic: Traffic | None = None

    @property
    def settings(self) -> ProductionSettings:
        return section(self.run, "production")

    def production(self, context: StepContext) -> Production:
        """Connect, and go on renewing what an earlier process of this run left under a lease. UsageError where its fleet was taken down since."""
        if self._production is None:
            if context.facts:  # it is resumed, past the step that starts an embedded fleet
                _require_not_taken_down(self.run)
            self._production = open_production(
                self.run, f"{self.run.section.name} {self.run.record.run_id}", context.clock, context.progress
            )
            self._production.token = lock_token(self.run.work)
            adopt_leases(self._production)
        self._production.progress = context.progress
        return self._production

    def bundles(self, context: StepContext, environment: dict[str, Any]) -> dict[str, Bundle]:
        if not self._bundles:
            self._bundles = fleet_releases(
                self.settings, self.run.kernel, environment, context.progress, self.run.playbook.path.parent
            )
        return self._bundles

    def traffic(self, context: StepContext) -> Traffic:
        """The own load: begins with the first change and goes on until production is left."""
        if self._traffic is None:
            self._traffic = Traffic(self.run, self.production(context))
        return self._traffic

    def leave(self, context: StepContext) -> Facts:
        if self._traffic is not None:
            self._traffic.stop()
            self._traffic = None
        if self._production is not None:
            self._production.close()
            self._production = None
        return {}


def _require_not_taken_down(run: PhaseRun) -> None:
    record = taken_down.of_playbook(run.playbook)
    if record is not None and record.is_down:
        raise UsageError(
            f"{record.describe()}, and with it what this run had begun.",
            hint="Begin anew, without --resume: that starts the fleet again.",
        )


def lock_token(work: Path) -> str:
    """The token of this attempt's locks on hosts, the same for each of its processes: a killed run's lock is held on by its lease, and is its own."""
    path = work / "lock-token"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_atomically(path, secrets.token_hex(16).encode())
    return path.read_text()


def section(run: PhaseRun, name: str) -> Any:
    """A shared section of the playbook; PlaybookError when it is missing."""
    return section_of(run.playbook, name, run.section.name)


def fleet_settings(run: PhaseRun) -> FleetSettings:
    """The hosts: as the playbook lists them, or the embedded fleet's, which a plan leaves without ports."""
    return fleet_of_playbook(run.playbook, run.section.name, choose_ports=not run.is_plan)


def open_production(
    run: PhaseRun, purpose: str, clock: Any, progress: Callable[[str], None], *, reached: Fleet | None = None
) -> Production:
    """Production as this playbook names it. Nothing is connected yet, except by `reached`, whose sessions it then uses and closes."""
    from phases.engines.ssh.router import make_router

    fleet = fleet_settings(run)
    teller = teller_of(run.playbook, run.kernel.name, run.section.name, progress)
    made = Production(
        section(run, "production"),
        fleet,
        make_router(fleet.router, clock, fleet.workers()),
        run.kernel.package,
        purpose,
        clock,
        progress,
        teller=teller,
    )
    made.fleet = reached or made.fleet
    return made
