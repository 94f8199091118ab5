"""Requests that a worker still has to answer: those that run and those that wait in one of its queues, by its own gauges."""

from __future__ import annotations

from dataclasses import dataclass

from phases.analysis.scrape import PREFIXES, Scrape
from phases.base.errors import PhaseError
from phases.serving.address import WorkerAddress
from phases.serving.client import Client

RUNNING, QUEUED = "num_running_reqs", "num_queue_reqs"
OTHER_QUEUES = (
    "_queue_reqs"  # how the names of the others end (grammar, and those between prefill and decode): where they exist
)
ASK_SECONDS = 5.0


@dataclass(frozen=True)
class InFlight:
    """How many requests run and wait; None where that is not known, and then `why` says what is missing: a missing gauge is not zero."""

    running: float | None = None
    queued: float | None = None
    why: str = ""

    @property
    def empty(self) -> bool:
        """Whether it is known that there are none."""
        return self.running == 0 and self.queued == 0

    def __str__(self) -> str:
        told = [f"{count:g} {what}" for count, what in ((self.running, "running"), (self.queued, "queued")) if count]
        return ", ".join(told + ([f"how many it has is not known: {self.why}"] if self.why else [])) or "none"


NOTHING = InFlight(0.0, 0.0)


def in_flight(client: Client) -> InFlight:
    """Asks the worker. One where nothing listens any more has none; one that does not answer in time may have any number."""
    try:
        scrape = Scrape.parse(client.metrics(), t=0.0, source=f"/metrics of {client.name}")
    except PhaseError as fault:
        return NOTHING if WorkerAddress.parse(client.url).refuses(ASK_SECONDS) else InFlight(why=fault.message)
    running, queued = (_sum(scrape, {prefix + name for prefix in PREFIXES}) for name in (RUNNING, QUEUED))
    others = {name for name in scrape.samples if name.endswith(OTHER_QUEUES) and not name.endswith(QUEUED)}
    if queued is not None:
        queued += _sum(scrape, others) or 0.0
    missing = [name for name, count in ((RUNNING, running), (QUEUED, queued)) if count is None]
    why = f"{scrape.source} has no {' and no '.join(missing)}" if missing else ""
    return InFlight(running, queued, why)


def _sum(scrape: Scrape, names: set[str]) -> float | None:
    """Over all series of these names; None where there is none."""
    values = [value for name in names for value in scrape.samples.get(name, {}).values()]
    return sum(values) if values else None
