"""Leases that a run finds on its hosts when it is resumed: an earlier process of it armed them and was killed."""

from __future__ import annotations

from phases.base.errors import FleetError, PhaseError
from phases.engines.ssh.errors import LeaseError
from phases.engines.ssh.lease import Lease, read_lease
from phases.production.production import Production


def adopt_leases(production: Production) -> None:
    """Go on renewing the leases an earlier process of this run left, at once, since nobody knows how much of their time is left. A host whose
    lease has run out meanwhile is put back before anything else looks at it. Hosts that cannot be asked are left to go back."""
    found = production.fleet.each(read_lease, deadline=60.0)
    for name, result in found.items():
        if result.ok and result.value and result.value.active and name not in production.leases:
            session = production.fleet.session(production.fleet[name])
            production.leases[name] = Lease(session, production.take_lock(session).token, lease_id=result.value.id)
            if (
                result.value.state == "confirmed"
            ):  # an armed one cannot be renewed: its switch was cut short, and is begun anew
                _go_on_with(production, production.leases[name])


def _go_on_with(production: Production, lease: Lease) -> None:
    host = lease.session.host
    try:
        lease.renew(
            production.fleet_settings.lease.bake, production.turns().of(list(production.leases).index(host.name))
        )
    except LeaseError as late:
        production.progress(f"{host.name}: {late.message} It goes back before this run goes on.")
        try:
            production.go_back(host)
        except PhaseError as fault:  # what has become of it is observed by whoever needs it
            production.progress(f"{host.name}: {fault}")
        return
    except FleetError as fault:
        production.progress(f"{host.name}: {fault.message} Its lease is tried again.")
    production.renewer().add(host.name, lease.id)
