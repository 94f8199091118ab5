"""Trials as steps run them: traffic on, every worker asked for own completions, leases kept alive, everything kept for the report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import queue
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from phases.analysis.decision import Decision
from phases.base.errors import ServingError
from phases.base.results import Measurement
from phases.engines.ssh.host import Host
from phases.fleet.traffic import prompts_of
from phases.production import agreement, hot
from phases.production.agreement import AgreementWatch
from phases.production.production import Production
from phases.rollback.takeover import put_back_by_others, taken_over
from phases.run.phase_run import PhaseRun
from phases.run.steps import StepContext
from phases.serving.activity import identity
from phases.serving.load import HttpSender, OpenLoopLoad, Prompt, RequestRecord
from phases.tp8_canary.settings import CanarySettings
from phases.trial.alive import Liveness
from phases.trial.arms import Arms, kinds_of
from phases.trial.bake import Bake
from phases.trial.end import Fault, TrialEnd
from phases.trial.looks import look_facts, name_of
from phases.trial.metrics import reader
from phases.trial.reference import Reference
from phases.trial.settings import JudgeSettings, ReferenceSettings
from phases.trial.soak import Soak
from phases.trial.switchback import Switchback


def judge(
    run: PhaseRun,
    production: Production,
    settings: JudgeSettings,
    canary: Sequence[Host],
    control: Sequence[Host],
    digest: str,
    context: StepContext,
    *,
    moved: Sequence[Host] = (),
    others: Sequence[Host] = (),
    share_tolerance: float | None = None,
) -> TrialEnd:
    """Bake the canary against the control until there is a verdict.

    Args:
        moved: workers on the candidate beside the canary: not compared, but one at fault ends the bake all the same.
        others: workers on the incumbent beside the control: part of the reference.
        share_tolerance: how far the canary's share of users' requests may be from its share of workers; None: not looked at.
    """
    arms = {"canary": canary, "control": control, "": others}
    urls = {name: {host.name: host.url for host in hosts} for name, hosts in arms.items()}
    candidates = [*canary, *(host for host in moved if host not in canary)]
    counted = [0]

    def check() -> Fault | None:
        counted[0] += 1
        wrong = watch.disagreement()
        if wrong:
            return Fault(wrong.worker, wrong.reason, incumbent=False)
        fault = _sick(production, candidates, control, digest, thorough=counted[0] % 3 == 0) or silent.check()
        fault = fault or routed.check()
        taken = (taken_over(production) or put_back_by_others(production)) if fault else ""
        return Fault(fault.worker, f"somebody else took over {taken}", incumbent=False) if fault and taken else fault

    def on_look(elapsed: float, decisions: Sequence[Decision]) -> None:
        context.progress(f"{elapsed:5.0f} s  " + "   ".join(map(_brief, decisions)))
        context.look(look_facts(elapsed, decisions, settings, {"canary": canary, "control": control}))

    silent = Answers(production, candidates, control)
    routed = Routed(production, candidates, control)
    watch = AgreementWatch(
        lambda turn: production.agreement(candidates[turn % len(candidates)]),
        production.settings.agreement,
        at_once=not production.agreements,
    )
    with probing(run, production, settings, canary, control) as probes, watch:
        bake = Bake(
            settings,
            urls["canary"],
            urls["control"],
            context.clock,
            check,
            on_look,
            probes=probes,
            others=urls[""],
            read=reader(production.settings, production.workers),
            kinds=kinds_of(production.workers),
            prove=silent.prove,
            own=production.own.of,
            share_tolerance=share_tolerance,
            stalled=production.settings.liveness.within,
        )
        trial_end = bake.run()
    return dataclasses.replace(
        trial_end, agreements=tuple(found.to_json() for found in [*production.agreements, *watch.found])
    )


def judge_turns(
    run: PhaseRun,
    production: Production,
    settings: CanarySettings,
    canary: Sequence[Host],
    digest: str,
    context: StepContext,
) -> TrialEnd:
    """Candidate and incumbent in turns on the canary workers, by the hot fallback, until there is a verdict."""

    def switch(arm: str) -> hot.HotSwitch:
        if arm == "canary":
            return hot.go_forward(production, canary, turn=True)
        return hot.fall_back(production, hosts=canary, everywhere=True, turn=True)

    def on_look(elapsed: float, decisions: Sequence[Decision]) -> None:
        context.progress(f"{elapsed:5.0f} s  " + "   ".join(map(_brief, decisions)))
        context.look(look_facts(elapsed, decisions, settings.judge, {"canary": canary, "control": canary}))

    silent, routed = Answers(production, canary), Routed(production, canary)

    def check() -> Fault | None:
        sick = _sick(production, canary, (), digest, thorough=True, turns=True)
        return sick or silent.check() or routed.check()

    with contextlib.ExitStack() as stack:
        probes = ArmProbes(run, production, settings.judge, {"": canary}) if settings.judge.probes else None
        for load in probes.loads if probes else ():
            load.start()
            stack.callback(load.abandon)
        bake = Switchback(
            settings.judge,
            settings.turns,
            {host.name: host.url for host in canary},
            context.clock,
            switch,
            check,
            on_look,
            reader(production.settings, production.workers),
            probes,
            kinds_of(production.workers),
            silent.prove,
            production.own.of,
        )
        trial_end = bake.run()
    return dataclasses.replace(trial_end, agreements=tuple(found.to_json() for found in production.agreements))


def soak(
    production: Production,
    settings: JudgeSettings,
    fit: ReferenceSettings,
    reference: Reference,
    digest: str,
    context: StepContext,
    seconds: float,
    lost: Collection[str] = (),
) -> TrialEnd:
    """The whole fleet for so long, against what Phase 3 recorded.

    Args:
        digest: release every worker must run; empty: whatever it runs.
        lost: workers that could not be moved and are not looked at; the failure budget allows them.
    """
    hosts = [host for host in production.workers if host.name not in lost]
    silent = Answers(production, hosts)

    def check() -> Fault | None:
        for host in hosts:
            if not _answers(production, host):
                return Fault(host.name, "it does not answer /health", incumbent=False)
            reason = production.seen_mixed(host, digest) if digest else production.tripped(host)
            if reason:
                return Fault(host.name, reason, incumbent=False)
        for name, why in production.lost_leases().items():
            return Fault(name, f"its lease cannot be renewed: {why}", incumbent=False)
        return silent.check()

    def on_look(elapsed: float, decisions: Sequence[Decision]) -> None:
        told = ", ".join(
            f"{name_of(d)} {d.estimate:.2f}x the reference: {d.word}" for d in decisions if d.estimate is not None
        )
        context.progress(f"{elapsed:5.0f} s  {told or 'every worker well, too little served to tell latencies'}")
        context.look(look_facts(elapsed, decisions, settings, {"all workers": hosts}, seconds))

    if about := reference.describe(context.clock.now()):
        context.progress(f"held against {about}")
    return Soak(
        settings,
        reference,
        {host.name: host.url for host in hosts},
        context.clock,
        check,
        fit,
        kinds_of(production.workers),
        silent.prove,
        reader(production.settings, production.workers),
        production.own.of,
        on_look,
        context.progress,
        production.settings.liveness.within,
    ).run(seconds)


class Answers:
    """Own completions of workers under judgement; one that does not come is a fault. The control being silent is the incumbent's."""

    def __init__(self, production: Production, workers: Sequence[Host], control: Sequence[Host] = ()) -> None:
        settings = production.settings.liveness
        self._control = {host.name for host in control}
        asks = {host.name: functools.partial(_complete, production, host) for host in (*workers, *control)}
        self._liveness = Liveness(asks, settings.every, settings.within, production.clock)

    def check(self) -> Fault | None:
        return self._fault(self._liveness.check())

    def prove(self) -> Fault | None:
        return self._fault(self._liveness.prove())

    def _fault(self, silent: tuple[str, str] | None) -> Fault | None:
        return Fault(*silent, incumbent=silent[0] in self._control) if silent else None


class Routed:
    """Whether the router still sends users to the workers under judgement: one that left it twice in a row is no canary any more.

    A router that does not answer, or lists nobody at all, says nothing about a worker: then there are too few users to pass anything.
    """

    def __init__(self, production: Production, workers: Sequence[Host], control: Sequence[Host] = ()) -> None:
        self._production, self._control = production, {host.name for host in control}
        self._hosts = [*workers, *control]
        self._missing: set[str] = set()

    def check(self) -> Fault | None:
        routed = self._production.routed(needed=False)
        somebody = any(routed.entries.values())
        missing = {host.name for host in self._hosts if somebody and routed.in_service(host.name) is False}
        gone, self._missing = sorted(missing & self._missing), missing
        if not gone:
            return None
        return Fault(gone[0], "the router sends it no users any more", incumbent=gone[0] in self._control)


def _complete(production: Production, host: Host) -> None:
    """One own completion through the scheduler; asked again before it counts as failed."""
    client = production.client(host, production.settings.liveness.within)
    try:
        client.generate("alive?", 4)
    except ServingError:
        client.generate("alive?", 4)


class ArmProbes:
    """Open-loop requests to both arms at one rate, each arm's workers in turn."""

    def __init__(
        self, run: PhaseRun, production: Production, settings: JudgeSettings, arms: dict[str, Sequence[Host]]
    ) -> None:
        self._finished: queue.Queue[tuple[str, RequestRecord]] = queue.Queue()
        load, timeout = production.settings.load, production.settings.server.request_timeout
        prompts = prompts_of(run, load)
        self.loads = [
            OpenLoopLoad(
                _in_turn(
                    [HttpSender(host.url, timeout=timeout, worker=host.name, own=production.own) for host in hosts]
                ),
                prompts,
                settings.probes,
                max_in_flight=load.max_in_flight,
                seed=number,
                on_record=functools.partial(self._keep, arm),
            )
            for number, (arm, hosts) in enumerate(arms.items())
        ]
        self._by_arm = dict(zip(arms, self.loads, strict=True))

    def take(self) -> list[tuple[str, RequestRecord]]:
        found = []
        while not self._finished.empty():
            found.append(self._finished.get())
        return sorted(found, key=lambda item: item[1].finished)

    def waiting(self, seconds: float) -> dict[str, int]:
        return {arm: load.waiting(seconds) for arm, load in self._by_arm.items()}

    def _keep(self, arm: str, record: RequestRecord) -> None:
        self._finished.put((arm, record))


@contextlib.contextmanager
def probing(
    run: PhaseRun, production: Production, settings: JudgeSettings, canary: Sequence[Host], control: Sequence[Host]
) -> Iterator[ArmProbes | None]:
    """Own requests straight to each arm while the block runs; None when the playbook wants none."""
    if settings.probes == 0:
        yield None
        return
    probes = ArmProbes(run, production, settings, {"canary": canary, "control": control})
    with contextlib.ExitStack() as stack:
        for load in probes.loads:
            load.start()
            stack.callback(load.abandon)  # the verdict is in: going back must not wait for a slow canary's answers
        yield probes


def _in_turn(senders: Sequence[HttpSender]) -> Callable[[Prompt, float], RequestRecord]:
    turns = itertools.cycle(senders)
    return lambda prompt, due: next(turns)(prompt, due)


def measurements(trial_end: TrialEnd) -> tuple[Measurement, ...]:
    """What rules may judge: each test's decision, and how far outputs agreed."""
    return (
        *(decision.measurement() for decision in trial_end.decisions),
        *agreement.measurements(trial_end.agreements),
    )


def share_row(trial_end: TrialEnd, arms: Arms) -> Measurement:
    """Users' requests the canary got, over what its share of both arms' workers would give it: 1 when the router spreads evenly."""
    canary, control = trial_end.requests.get("canary", 0.0), trial_end.requests.get("control", 0.0)
    total = canary + control
    wanted = len(arms.canary) / (len(arms.canary) + len(arms.control or arms.canary))  # in turns: half of the time
    ratio = canary / total / wanted if total else None
    return Measurement(
        "canary_share",
        ratio,
        ratio,
        ratio,
        n=int(total),
        unit="of the wanted share",
        source="response counters of both arms",
    )


def _sick(
    production: Production,
    canary: Sequence[Host],
    control: Sequence[Host],
    digest: str,
    *,
    thorough: bool,
    turns: bool = False,
) -> Fault | None:
    """Whether a worker is down, gone back by itself, or mixed. The control being sick is the incumbent's fault.

    Args:
        turns: the canary runs either kernel, as it is told; that a rank fell back by itself, or by somebody's order, is still a fault.
    """
    lost = production.lost_leases()
    for host in canary:
        if host.name in lost:
            return Fault(
                host.name, f"its lease cannot be renewed ({lost[host.name]}); it goes back by itself", incumbent=False
            )
        if not _answers(production, host):
            return Fault(host.name, "it does not answer /health", incumbent=False)
        if turns and (reason := production.tripped(host, ever=True) or production.ordered_back(host)):
            return Fault(host.name, reason, incumbent=False)
        if thorough and (reason := production.seen_mixed(host, digest, kernel=not turns)):
            return Fault(host.name, reason, incumbent=False)
    for host in control:
        if not _answers(production, host):
            return Fault(host.name, "the control does not answer /health", incumbent=True)
    return None


def _answers(production: Production, host: Host) -> bool:
    """Whether a worker answers /health; asked again before it counts as down."""
    client = production.client(host, 10.0)
    return client.health() or client.health()


def _brief(decision: Decision) -> str:
    if decision.estimate is None:
        return f"{name_of(decision)}: {decision.word} (n {decision.n})"
    low = "?" if decision.low is None else f"{decision.low:.2f}"
    high = "?" if decision.high is None else f"{decision.high:.2f}"
    return f"{name_of(decision)}: {decision.estimate:.2f} [{low}, {high}] {decision.word}"


def served_facts(production: Production, trial_end: TrialEnd) -> list[dict[str, Any]]:
    """What both arms served, with what a worker says of its model and server; a worker that does not say leaves that out."""
    about: dict[str, str] = {}
    for host in production.workers:
        with contextlib.suppress(ServingError):
            about = identity(production.client(host, 10.0).server_info())
            break
    return [dataclasses.replace(arm, server=about).to_json() for arm in trial_end.served]


def evidence(production: Production, trial_end: TrialEnd) -> dict[str, Any]:
    """Facts for results.json: the looks over time, the reference, the log's end of a worker at fault."""
    facts: dict[str, Any] = {"sequential": trial_end.facts()}
    facts |= {"reference": [level.to_json() for level in trial_end.reference], "agreement": list(trial_end.agreements)}
    facts["served"] = served_facts(production, trial_end)
    facts["reference_traffic"] = trial_end.traffic.to_json() if trial_end.traffic else None
    if trial_end.fault:
        host = next((h for h in production.workers if h.name == trial_end.fault.worker), None)
        facts["fault"] = {
            "worker": trial_end.fault.worker,
            "reason": trial_end.fault.reason,
            "log": production.logs(host).splitlines()[-40:] if host else [],
        }
    return facts
