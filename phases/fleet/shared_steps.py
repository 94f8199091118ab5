"""Steps that Phases 3 and 4 share: look at the fleet, push the releases, write the report, leave; and acting on several hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phases.base.errors import FleetError, PhaseError, ended, joined
from phases.base.files import write_json
from phases.base.results import Results, StageEnd
from phases.engines.ssh.host import Host
from phases.engines.ssh.placing import CURE
from phases.fleet import traffic
from phases.fleet.live import Live, fleet_settings
from phases.fleet.report import table
from phases.ledger.checkpoint import RESULTS
from phases.ledger.remote import RemoteUnreachable
from phases.production.capacity import CapacityError
from phases.production.production import Production, WorkerState
from phases.production.releases import require_values
from phases.run.closing import ledger_of
from phases.run.phase_run import PhaseRun
from phases.run.steps import Facts, Step, StepContext
from phases.serving.environment import environment_facts
from phases.trial.metrics import require_metrics

FLEET, PUSH, REPORT, LEAVE = "look at the fleet", "push the releases", "write the report", "leave production"


def look_at_fleet(run: PhaseRun, live: Live, detail: tuple[str, ...]) -> Step:
    """Every worker is reached, serves, is in service and runs what the others run; an embedded fleet is brought up first."""

    def look(context: StepContext) -> Facts:
        _require_ledger(run, context)
        require_values(live.settings, fleet_settings(run).workers())
        if live.settings.load.rate or run.settings.judge.probes:
            traffic.prompts_of(run, live.settings.load)  # read by now, not first while a canary bakes
        environment = _environment(run, live, context)
        bundles = live.bundles(context, environment)
        _bring_up(run, live, context, bundles)
        states = live.production(context).observe()
        _require_well(states)
        _require_one_release(states, bundles["candidate"].digest)
        require_metrics(live.production(context), run.settings.judge)
        return {
            "environment": environment,
            "workers": [s.describe() for s in states],
            "digests": {side: b.digest for side, b in bundles.items()},
        }

    return Step(
        FLEET,
        f"each of {len(fleet_settings(run).workers())} workers must be reached, serving, in service, and all on one release",
        look,
        detail=detail,
    )


def push_releases(run: PhaseRun, live: Live, hosts: Sequence[Host]) -> Step:
    """Nothing that serves changes."""

    def push(context: StepContext) -> Facts:
        bundles = live.bundles(context, context.facts[FLEET]["environment"])
        live.production(context).push(list(bundles.values()), hosts)
        return {side: bundle.digest for side, bundle in bundles.items()}

    return Step(PUSH, f"incumbent and candidate onto {names(hosts)}; nothing that serves changes", push)


def report_step(
    run: PhaseRun, name: str, end: str, more: Callable[[Results], dict[str, Any]] = lambda results: {}
) -> Step:
    """results.json and a text table.

    Args:
        name: of the table's file. end: name of the step that says how production ended. more: further facts, from all there is.
    """

    def write(context: StepContext) -> Facts:
        results = run.gathered(context)
        load = traffic.shares_of(run, context)
        facts = {**results.facts, "end": context.facts.get(end, {}), "load": load, **more(results)}
        if "timeline" not in facts and facts["end"].get("rollback"):
            facts["timeline"] = facts["end"]["rollback"]["timeline"]
        stage = facts["end"].get("stage")
        results = dataclasses.replace(
            results,
            facts=facts,
            measurements=(*results.measurements, *traffic.measured(load)),
            ends=(*results.ends, *([StageEnd.from_json(stage)] if stage else [])),
        )
        run.checkpoint_files.mkdir(parents=True, exist_ok=True)
        write_json(run.checkpoint_files / RESULTS, results.to_json())
        run.add_file(name, table(results).encode())
        for row in traffic.measured(load):
            context.progress(f"{row.metric.replace('_', ' ')}: {row.estimate:.0f} of {row.n} ({row.source})")
        return {}

    return Step(REPORT, "results.json, the looks over time, the timeline", write)


def leave(live: Live) -> Step:
    return Step(LEAVE, "stop the own load, stop renewing, release the locks", live.leave, always=True)


def batches_under_floor(production: Production, hosts: Sequence[Host]) -> Iterator[tuple[Host, ...]]:
    """Groups that may be out of service together. The capacity is asked before each: what was to come back from the one before may not have.

    Raises: CapacityError when not one of those left may go.
    """
    left = list(hosts)
    while left:
        batch = production.capacity.grant(left)
        if not batch:
            raise CapacityError(
                f"{names(left)} cannot be taken out: {production.capacity.floor} workers must serve.",
                hint="Bring more workers into service, or lower `production.min_available`.",
            )
        yield batch
        left = [host for host in left if host not in batch]


def together(hosts: Sequence[Host], act: Callable[[Host], Any]) -> dict[str, PhaseError]:
    """Act on all side by side; what failed, by host. A bug is raised."""
    failed: dict[str, PhaseError] = {}
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        futures = {host.name: pool.submit(act, host) for host in hosts}
    for name, future in futures.items():
        try:
            future.result()
        except PhaseError as fault:
            failed[name] = fault
    return failed


def names(hosts: Iterable[Host]) -> str:
    return ", ".join(host.name for host in hosts) or "nobody"


def _environment(run: PhaseRun, live: Live, context: StepContext) -> Facts:
    """What the workers are started with: Python and models."""
    facts = environment_facts(live.settings.server, context.progress)
    embedded = run.playbook.sections.get("embedded_fleet")
    if embedded is None or embedded.model is None:
        return facts
    from phases.engines.embedded.models import ensure_model
    from phases.engines.embedded.provision import ensure

    made = ensure_model(ensure(progress=context.progress), embedded.model, context.progress)
    return {**facts, "model": str(made / "target"), "draft_model": str(made / "draft")}


def _bring_up(run: PhaseRun, live: Live, context: StepContext, bundles: dict[str, Any]) -> None:
    """An embedded fleet starts here; a real one is expected to run."""
    embedded = run.playbook.sections.get("embedded_fleet")
    if embedded is None:
        return
    from phases.engines.embedded.fleet import ensure_up

    ensure_up(embedded, run.repo, run.playbook.name, live.production(context), bundles["incumbent"], context.progress)


def _require_ledger(run: PhaseRun, context: StepContext) -> None:
    """What would keep this run from being recorded at its end is found before anything moves. A remote that is only out of reach is not."""
    ledger = ledger_of(run.playbook, context.progress)
    ledger.preflight()
    try:
        ledger.sync()
    except RemoteUnreachable as fault:
        context.progress(fault.message)


def _require_well(states: Sequence[WorkerState]) -> None:
    ill = [f"{s.host.name}: {s.error or 'does not answer'}" for s in states if s.error or not s.serving]
    if ill:
        raise FleetError(
            f"{len(ill)} workers are not well before anything has moved: {ended(joined(ill))}",
            hint="Mend them, or take them out of the playbook.",
        )
    if doubtful := [f"{s.host.name}: {s.doubt}" for s in states if s.doubt]:
        raise FleetError(
            f"nobody can tell whom users are served by before anything has moved: {ended(joined(doubtful))}", hint=CURE
        )
    out = [s.host.name for s in states if not s.in_service]
    if out:
        raise FleetError(f"the router does not send anything to {', '.join(out)}.", hint="Put them into service first.")


def _require_one_release(states: Sequence[WorkerState], candidate: str) -> None:
    """Whatever a worker under a lease of this very run runs, the others must agree: else canary and control differ by more than the candidate."""
    settled = {s.host.name: s.current for s in states if not (s.lease and s.lease.active)}
    found = sorted(set(settled.values()))
    if len(found) > 1:
        shown = "; ".join(
            f"{digest[:12]} on {', '.join(name for name, current in settled.items() if current == digest)}"
            for digest in found
        )
        raise FleetError(
            f"workers run different releases before anything has moved: {shown}.",
            hint="Bring them together first: `phase rollback`.",
        )
    if found == [candidate]:
        raise FleetError(
            f"all workers run the candidate {candidate[:12]} already.",
            hint="There is nothing to try out; `phase fleet status` shows it.",
        )
