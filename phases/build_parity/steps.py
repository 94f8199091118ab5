"""The mechanics behind the steps of Phase 1 (`phases.build_parity` tells their story)."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phases.base.errors import BuildError
from phases.base.extras import Extra
from phases.base.files import write_json
from phases.base.results import BenchmarkRecord, BuildRecord, Case, ParityRecord, Results
from phases.gate.gate import judge
from phases.gate.kernel_rules import undecided
from phases.gate.outcome import RuleOutcome
from phases.harness import contract, toolchain
from phases.harness import device as kernel_device
from phases.harness.load import LOOK_SECONDS, SPREAD, Meter, spread
from phases.ledger.checkpoint import RESULTS
from phases.playbook.schema import BuildParitySettings, CaseSelection, TimedSelection
from phases.run.closing import ledger_of
from phases.run.phase_run import PhaseRun
from phases.run.steps import Facts, Step, StepContext

LOOK, BUILD, PARITY, CEILINGS, BENCHMARK, REPORT = (
    "look around",
    "build",
    "prove parity",
    "measure ceilings",
    "benchmark",
    "write the report",
)


def look_around(run: PhaseRun) -> Step:
    """Everything that would stop the phase later, asked first."""
    wanted = architectures(run)
    detail = [f"must build: {', '.join(wanted) or 'nothing to compile'}"]
    if run.settings.optional_architectures:
        detail.append(f"if a compiler is at hand: {', '.join(run.settings.optional_architectures)}")

    def look(context: StepContext) -> Facts:
        device = kernel_device.choose(run.settings.device)
        compilers = toolchain.require(wanted)
        optional, skipped = toolchain.buildable(run.settings.optional_architectures)
        compilers |= toolchain.require(optional)
        for arch, why in skipped.items():
            context.progress(f"{arch} is skipped: {why}")
        free = _require_disk(run.work, run.settings.free_disk_mib)
        ledger_of(run.playbook).preflight()
        described = contract.describe(run.kernel, device)
        _anchors(run)
        facts = described["facts"]
        for what, selection in (("parity", run.settings.parity), ("benchmark", run.settings.benchmark)):
            contract.select(
                described[what], selection.cases or None, what
            )  # a pattern without a case, before minutes of building
        context.progress(
            f"device {device}: {facts.get('gpu') or facts.get('cpu')}; architectures: {', '.join([*wanted, *optional]) or 'none'}; {free} MiB free"
        )
        manifest = {
            **facts,
            **compilers,
            "device": device,
            "system": platform.platform(),
            "skipped_architectures": skipped,
        }
        return {"device": device, "archs": [*wanted, *optional], "skipped": skipped, "manifest": manifest}

    return Step(LOOK, "check device, compilers, architectures, disk space and ledger", look, detail=tuple(detail))


def build(run: PhaseRun) -> Step:
    """Compile every variant for every architecture."""

    def compile_all(context: StepContext) -> dict[str, Any]:
        from phases.harness import build as kernel_build

        facts = context.facts[LOOK]
        records = kernel_build.build(run.kernel, facts["archs"], build_cache(run.kernel), context.progress)
        skipped = tuple(
            BuildRecord("-", arch, ok=False, reason=f"skipped: {why}") for arch, why in facts["skipped"].items()
        )
        failed = [record for record in records if not record.ok]
        if records and len(failed) == len(records):
            raise BuildError(
                f"nothing of {run.kernel.name} could be built; first: {failed[0].reason}",
                hint="Mend what the compiler says.",
            )
        built = len(records) - len(failed)
        context.progress(
            f"{built} {'object' if built == 1 else 'objects'}, {sum(record.cached for record in records)} from the cache"
        )
        return {"build": records, "facts": {"skipped_builds": [vars(record) for record in skipped]}}

    return run.results_step(BUILD, f"compile {run.kernel.name} ({len(run.kernel.variants)} variants)", compile_all)


def prove_parity(run: PhaseRun) -> Step:
    """Every variant on every parity case against the float64 reference."""
    selection: CaseSelection = run.settings.parity

    def prove(context: StepContext) -> dict[str, Any]:
        from phases.harness import parity

        device = context.facts[LOOK]["device"]
        records = parity.prove(
            run.kernel, device, selection.variants or None, selection.cases or None, context.progress
        )
        wrong = [record for record in records if not record.ok and not record.refused]
        context.progress(
            f"{sum(record.ok for record in records)} right, {len(wrong)} wrong, {sum(bool(r.refused) for r in records)} refused"
        )
        return {"parity": records}

    return run.results_step(
        PARITY, f"{_words(selection, 'parity')} against the float64 reference", prove, detail=selection.cases
    )


def measure_ceilings(run: PhaseRun) -> Step:
    """What this device itself reaches: bandwidth and arithmetic."""

    def measure(context: StepContext) -> dict[str, Any]:
        from phases.harness import ceilings

        if why := _cannot_pass(run, context):
            context.progress(f"not measured: {why}")
            return {"facts": {"not_measured": why}}
        meter = Meter()
        context.clock.sleep(LOOK_SECONDS)
        seen = meter.read()
        measured = ceilings.measure(context.facts[LOOK]["device"], progress=context.progress)
        apart = spread(measured)
        context.progress(
            f"this machine: {seen}" + ("" if apart is None else f"; samples of a ceiling {apart:.0%} apart")
        )
        spread_by = [f"samples of a ceiling lay {apart:.0%} apart"] if apart is not None and apart >= SPREAD else []
        if spoils := [*seen.spoils(), *spread_by]:
            context.progress(f"BUSY: {' and '.join(spoils)}: timings will be spread, and may have to be taken again")
        return {
            "ceilings": measured,
            "facts": {"ceilings_load": {**seen.to_json(), "spread": apart, "spoils": spread_by}},
        }

    return run.results_step(CEILINGS, "this device's own read, gather and arithmetic rates", measure)


def benchmark(run: PhaseRun) -> Step:
    """Time the variants on the cases whose parity passed."""
    selection: TimedSelection = run.settings.benchmark
    effort = {"min_samples": selection.min_samples, "max_samples": selection.max_samples, "seconds": selection.seconds}
    chosen = {key: value for key, value in effort.items() if value is not None}

    def time(context: StepContext) -> dict[str, Any]:
        from phases.harness import benchmark as kernel_benchmark

        if why := _cannot_pass(run, context):
            context.progress(f"not timed: {why}")
            return {}
        so_far = run.gathered(context)

        def measure(variants: Sequence[str] | None, cases: Sequence[Case | str] | None) -> tuple[BenchmarkRecord, ...]:
            return kernel_benchmark.measure(
                run.kernel,
                context.facts[LOOK]["device"],
                so_far.ceilings,
                so_far.parity,
                variants,
                cases,
                context.progress,
                effort=kernel_benchmark.Effort(**chosen),
            )

        meter, most = Meter(), 1 + selection.retries
        records = measure(selection.variants or None, selection.cases or None)
        context.progress(f"{sum(bool(record.samples) for record in records)} of {len(records)} timed")
        taken = 1
        while taken < most and (open_ := _undecided(run, so_far, records, taken, most)):
            names, variants, keys = open_
            taken += 1
            busy = "".join(f", {clause}" for clause in meter.read().spoils())
            context.progress(
                f"undecided: {', '.join(names)}{busy}; {len(keys)} cases are timed again ({taken} of {most})"
            )
            again = [case for case in dict.fromkeys(record.case.key for record in records) if case in keys]
            records = kernel_benchmark.merged(records, measure(sorted(variants), again))
        seen = meter.read()
        context.progress(f"this machine meanwhile: {seen}")
        load = {**seen.to_json(), "spoils": list(seen.spoils())}
        return {"benchmark": records, "facts": {"benchmark_load": load, "looks": {"taken": taken, "most": most}}}

    return run.results_step(
        BENCHMARK, f"time {_words(selection, 'benchmark')}; parity again after timing", time, detail=selection.cases
    )


def _undecided(
    run: PhaseRun, so_far: Results, records: tuple[BenchmarkRecord, ...], taken: int, most: int
) -> tuple[list[str], set[str], set[str]] | None:
    """(rules, variants, keys of cases) that more samples might decide; None when every rule can tell after `taken` looks."""

    def judged(looks: int) -> list[RuleOutcome]:
        facts = {**so_far.facts, "looks": {"taken": looks, "most": most}}
        results = dataclasses.replace(so_far, benchmark=records, facts=facts)
        return [
            outcome for outcome in judge(run.section.name, run.section.rules, results).rules if undecided(outcome)[1]
        ]

    if not judged(taken):
        return None
    open_ = judged(
        taken + 1
    )  # by the narrower error of the next look, which may leave a case open that this one had decided
    parts = [undecided(outcome) for outcome in open_]
    return (
        [outcome.label for outcome in open_],
        set().union(*(variants for variants, _ in parts)),
        set().union(*(keys for _, keys in parts)),
    )


def _cannot_pass(run: PhaseRun, context: StepContext) -> str:
    """Why the gate is lost by what was proved so far, so that minutes of measuring tell nothing; empty when it is not."""
    proved = [
        record for record in run.gathered(context).parity if record.variant in run.candidates and not record.refused
    ]
    wrong = [record for record in proved if not record.ok]
    if not wrong or run.record.keep_going:
        return ""
    return (
        f"{len(wrong)} of {len(proved)} cases are wrong, first {wrong[0].variant} on {wrong[0].case.key} "
        "(--keep-going measures all the same)"
    )


def write_report(run: PhaseRun) -> Step:
    """results.json, tables and plots into the coming checkpoint."""

    def write(context: StepContext) -> Facts:
        look = context.facts[LOOK]["manifest"]
        plain = {key: value for key, value in look.items() if key != "skipped_architectures"}
        gathered = run.gathered(context)
        results = dataclasses.replace(gathered, facts={**plain, **gathered.facts, **_anchors(run)})
        shutil.rmtree(run.checkpoint_files, ignore_errors=True)
        run.checkpoint_files.mkdir(parents=True)
        write_json(run.checkpoint_files / RESULTS, results.to_json())
        for name, data in _rendered(results).items():
            run.add_file(name, data)
        failures = _failures(results)
        if failures:
            run.add_file("failures.txt", failures.encode())
        if not Extra.PLOTS.installed:
            context.progress(f"no plots: {Extra.PLOTS.missing} ({Extra.PLOTS.cure})")
        files = sorted(path.name for path in run.checkpoint_files.iterdir())
        context.progress(", ".join(files))
        return {"files": files}

    def holds(context: StepContext, facts: Facts) -> bool:
        return all((run.checkpoint_files / name).is_file() for name in facts["files"])

    return Step(REPORT, "results.json, tables and plots", write, holds=holds)


def architectures(run: PhaseRun) -> list[str]:
    """The architectures that must build: the playbook's, else those of kernel.yaml, without the optional ones."""
    settings: BuildParitySettings = run.settings
    return [
        arch
        for arch in (settings.architectures or run.kernel.architectures)
        if arch not in settings.optional_architectures
    ]


def build_cache(kernel: contract.Kernel) -> Path:
    """Where a kernel's objects are kept between runs: $<PACKAGE>_CACHE, else <package> in the user's cache directory.

    A kernel that loads its objects by itself looks there too, so what is proved is what was built.
    """
    named = os.environ.get(f"{kernel.package.upper().replace('.', '_')}_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / kernel.package


def _require_disk(work: Path, wanted_mib: int) -> int:
    """MiB free at the run's directory. Raises BuildError below what the playbook asks for."""
    free = shutil.disk_usage(work).free >> 20
    if free < wanted_mib:
        raise BuildError(
            f"{free} MiB are free at {work}, the playbook asks for {wanted_mib} (free_disk_mib).",
            hint="Free some space.",
        )
    return free


def _words(selection: CaseSelection, what: str) -> str:
    variants = ", ".join(selection.variants) or "every variant"
    return f"{variants} on {'the chosen' if selection.cases else 'all'} {what} cases"


def _anchors(run: PhaseRun) -> Facts:
    """Times of other kernels that the playbook names, as a fact of the results. Raises UsageError when the file is none."""
    from phases.report import anchors

    named: Path | None = run.settings.anchors
    return {anchors.FACT: anchors.read(run.playbook.path.parent / named)} if named else {}


def _rendered(results: Results) -> dict[str, bytes]:
    """The table a person reads in a terminal, named after the kernel, and the plots where they can be drawn."""
    from phases.report import anchors, plots, tables

    title = f"{results.kernel} on {results.facts.get('gpu') or results.facts.get('cpu') or 'this machine'}"
    images = {}
    if Extra.PLOTS.installed:
        images = {
            "roofline.png": plots.achieved(results.benchmark, title),
            "speedup.png": plots.speedups(results.benchmark, title),
        }
    beside = anchors.by_case(results.facts.get(anchors.FACT, {}))
    return {
        f"{results.kernel}.txt": tables.report(results, beside).encode(),
        **{name: data for name, data in images.items() if data},
    }


def _failures(results: Results) -> str:
    """Everything that went wrong, with the last lines of whoever said so; empty when nothing did."""
    lines = [f"build {record.variant} for {record.arch}\n{record.reason}" for record in results.build if not record.ok]
    lines += [_wrong(record) for record in results.parity if not record.ok and not record.refused]
    lines += [
        f"benchmark {r.variant} {r.case.key}\n{r.reason}" for r in results.benchmark if r.reason and not r.refused
    ]
    return "".join(f"{line}\n\n" for line in lines)


def _wrong(record: ParityRecord) -> str:
    return f"parity {record.variant} {record.case.key} on {record.device}\n{record.reason or 'error over tolerance'}"
