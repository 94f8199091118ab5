"""Own load through the router, from the first change of a phase until production is left, counted step by step.

It runs while workers drain, restart, are judged and go back, so that "no request failed" is measured and not assumed.
A request is counted in the step in which it ended. The client never repeats a request; what the router repeated by itself is
read from the router's own metrics and counted apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phases.analysis.scrape import Scrape
from phases.base.errors import AnalysisError, PlaybookError
from phases.base.results import Measurement
from phases.production.production import Production
from phases.production.settings import LoadSettings
from phases.run.phase_run import PhaseRun
from phases.run.steps import StepContext
from phases.serving.load import HttpSender, LoadSummary, OpenLoopLoad, Prompt, RequestRecord
from phases.serving.prompts import load_prompts
from phases.trial.metrics import read_metrics

KEPT_FAILURES = 20
RETRIES = ("smg_worker_retries_total", "sgl_router_retries_total")  # newest first


@dataclass(frozen=True)
class Share:
    """What the own load did during one step.

    Attributes:
        late: requests that could not be sent within a second of their due time.
        retried: requests the router sent again by itself; None where its metrics are not known.
        failures: the first of those that failed: when, which, and how.
    """

    during: str
    sent: int
    failed: int
    late: int
    retried: int | None
    failures: tuple[dict[str, Any], ...] = ()


class Traffic:
    """The own load of one process. Without a rate in the playbook nothing is sent, and nothing counted.

    Raises:
        PlaybookError: there is no address to send to.
    """

    def __init__(self, run: PhaseRun, production: Production) -> None:
        settings = production.settings.load
        self._production, self._lock = production, threading.Lock()
        self._failures: list[dict[str, Any]] = []
        self._load: OpenLoopLoad | None = None
        self._told = False
        if settings.rate > 0:
            sender = HttpSender(_address(settings, production), timeout=production.settings.server.request_timeout)
            self._load = OpenLoopLoad(
                sender,
                prompts_of(run, settings),
                settings.rate,
                max_in_flight=settings.max_in_flight,
                seed=settings.seed,
                on_record=self._keep,
            ).start()

    @contextlib.contextmanager
    def during(self, step: str) -> Iterator[list[Share]]:
        """Appends what the load did while the block ran."""
        shares: list[Share] = []
        before, retried = self._summary(), self._retries()
        with self._lock:
            self._failures.clear()
        yield shares
        if self._load is None:
            return
        now, again = self._summary(), self._retries()
        repeats = None if retried is None or again is None else max(0, round(again - retried))
        with self._lock:
            failures = tuple(self._failures)
        shares.append(
            Share(step, now.sent - before.sent, now.failed - before.failed, now.late - before.late, repeats, failures)
        )

    def stop(self) -> None:
        """Send nothing new and wait for what is in flight."""
        if self._load is not None:
            self._load.stop()

    def _keep(self, record: RequestRecord) -> None:
        if not record.ok:
            with self._lock:
                if len(self._failures) < KEPT_FAILURES:
                    self._failures.append(
                        {"at": record.finished, "prompt": record.prompt, "status": record.status, "error": record.error}
                    )

    def _summary(self) -> LoadSummary:
        return self._load.summary() if self._load is not None else LoadSummary(0, 0, 0, 0.0)

    def _retries(self) -> float | None:
        """The router's own count of requests it repeated; 0 before the first."""
        address = self._production.fleet_settings.router.metrics
        if not address:
            return None
        try:
            scrape = Scrape.parse(read_metrics(address), t=0.0, source="router")
        except AnalysisError as fault:
            if not self._told:
                self._production.progress(f"what the router repeats is not counted: {fault.message}")
            self._told = True
            return None
        name = scrape.resolve(RETRIES)
        return sum(scrape.samples[name].values()) if name else 0.0


@contextlib.contextmanager
def own_load(run: PhaseRun, production: Production) -> Iterator[Traffic]:
    """The own load while the block runs."""
    traffic = Traffic(run, production)
    try:
        yield traffic
    finally:
        traffic.stop()


def prompts_of(run: PhaseRun, settings: LoadSettings) -> list[Prompt]:
    """What own requests ask for."""
    path = None if settings.prompts is None else run.playbook.path.parent / settings.prompts
    return [Prompt(p.name, p.text, settings.tokens, {"ignore_eos": True}) for p in load_prompts(path)]


def kept(shares: Sequence[Share]) -> list[dict[str, Any]]:
    """For the facts of a step: under `load` of a plain one, under `load during STEP` in the results of another."""
    return [dataclasses.asdict(share) for share in shares]


def during(step: str) -> str:
    """Key of a results step's shares: facts of all results steps lie in one dictionary."""
    return f"load during {step}"


def shares_of(run: PhaseRun, context: StepContext) -> list[dict[str, Any]]:
    """What the steps so far kept of the load, in their order."""
    results = run.gathered(context).facts
    return [
        row for name, facts in context.facts.items() for row in (*facts.get("load", ()), *results.get(during(name), ()))
    ]


def measured(shares: Sequence[dict[str, Any]]) -> tuple[Measurement, ...]:
    """Requests of the own load that failed, and that the router repeated; nothing without a load."""
    if not shares:
        return ()
    sent, source = (
        sum(share["sent"] for share in shares),
        "own load through the router, from the first change to the last",
    )
    found = [
        Measurement(
            "failed_requests", float(sum(share["failed"] for share in shares)), n=sent, unit="requests", source=source
        )
    ]
    if all(share["retried"] is not None for share in shares):
        repeated = float(sum(share["retried"] for share in shares))
        found.append(
            Measurement("retried_requests", repeated, n=sent, unit="requests", source="the router's own metrics")
        )
    return tuple(found)


def _address(settings: LoadSettings, production: Production) -> str:
    url = settings.url or getattr(production.router, "url", "")
    if not url:
        raise PlaybookError(
            "`production.load` has no address to send to: the router is driven by hooks.", hint="Give `load.url`."
        )
    return str(url)
