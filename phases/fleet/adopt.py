"""A fleet's first release: workers that the toolkit has put nothing on yet get the incumbent's, a few at a time.

Until then there is nothing to go back to, so nothing else may be done with a worker. What serves there now is replaced by the incumbent's
release with the playbook's launch arguments: the same server, started from a place that can be switched.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from phases.base.errors import FleetError, PhaseError, ended, joined
from phases.engines.ssh.bundle import Bundle
from phases.engines.ssh.deploy import first_release
from phases.engines.ssh.host import Host
from phases.engines.ssh.placing import CURE
from phases.engines.ssh.releases import NEVER
from phases.fleet.shared_steps import batches_under_floor
from phases.production.production import Production
from phases.production.releases import fleet_releases, require_values
from phases.run.phase_run import PhaseRun
from phases.serving.environment import environment_facts


@dataclass(frozen=True)
class Adopted:
    """What became of the workers, by name; `there` had a release already."""

    adopted: tuple[str, ...]
    there: tuple[str, ...]


def incumbent_of(run: PhaseRun, production: Production) -> Bundle:
    """The incumbent's release; BuildError when it does not build, PlaybookError when a worker has no value for its launch arguments."""
    require_values(production.settings, production.workers)
    environment = environment_facts(production.settings.server, production.progress)
    return fleet_releases(
        production.settings, run.kernel, environment, production.progress, run.playbook.path.parent, ("incumbent",)
    )["incumbent"]


def adopt(production: Production, incumbent: Bundle) -> Adopted:
    """Put the incumbent's release on every worker that has none recorded as good, in batches under the capacity floor; stops at the
    batch in which one fails. Workers that have one and serve, but get no traffic, are put into service.

    Raises:
        FleetError: a worker cannot be asked, or the router has what may be one of them under another name, or one did not come up; those adopted before it stay adopted.
        CapacityError: not one worker can be spared.
    """
    states = production.observe()
    lost = [f"{s.host.name}: {s.error}" for s in states if s.error]
    if lost:
        raise FleetError(
            f"{len(lost)} workers cannot be asked: {ended(joined(lost))}", hint="`phase doctor` says what is wrong."
        )
    if doubtful := [f"{s.host.name}: {s.doubt}" for s in states if s.doubt]:
        raise FleetError(f"nobody can tell whom users are served by: {ended(joined(doubtful))}", hint=CURE)
    new = [s.host for s in states if s.last_good == NEVER]  # what an earlier attempt left half done is done again
    production.push([incumbent], new)
    done: list[str] = []
    for batch in batches_under_floor(production, new):
        with ThreadPoolExecutor(len(batch)) as pool:
            outcomes = list(pool.map(lambda host: _one(production, host, incumbent.digest), batch))
        failed = [outcome for outcome in outcomes if outcome]
        done += [host.name for host, outcome in zip(batch, outcomes, strict=True) if not outcome]
        if failed:
            raise FleetError(
                f"{ended(joined(failed))} Adopted so far: {', '.join(done) or 'nobody'}.",
                hint="Mend it, then run `phase fleet adopt` again.",
            )
    for state in states:
        if state.host not in new and state.serving and not state.in_service:
            production.put_in(state.host)
    return Adopted(tuple(done), tuple(s.host.name for s in states if s.host not in new))


def _one(production: Production, host: Host, digest: str) -> str:
    """Why it failed; empty when it serves."""
    try:
        production.take_out(host, production.fleet_settings.service.drain)
        session = production.fleet.session(host)
        first_release(session, production.take_lock(session), production.driver(host), digest, production.ready(host))
        production.warm_up(host)
        production.put_in(host)
    except PhaseError as fault:
        return f"{host.name}: {fault}"
    production.progress(f"{host.name} serves release {digest[:12]}, its last-good from now on")
    return ""
