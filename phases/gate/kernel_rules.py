"""Rules on what Phase 1 measured: build, parity, speedup, longest prefix, share of the roofline.

Each rule is a frozen dataclass: its fields are its parameters in the playbook, its `judge` the verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from phases.base.results import BenchmarkRecord, ParityRecord, Results
from phases.base.verdict import Verdict
from phases.gate.decide import Quantity, absent, at_least
from phases.gate.intervals import Interval, median_interval, ratio_interval
from phases.gate.outcome import RuleOutcome
from phases.playbook.typed import setting

ABSENT_CHOICES = ("fail", "inconclusive", "zero")
_NOTHING = Interval(math.nan, math.nan, math.nan)
_SHOWN = 20  # failures listed in a rule's detail; the results hold them all


def absent_setting() -> Any:
    return setting(
        "inconclusive",
        choices=ABSENT_CHOICES,
        help="verdict when there is nothing to judge: fail, inconclusive, or zero (judge the number 0; what was measured too seldom stays inconclusive)",
    )


def cases_setting() -> Any:
    return setting((), help="shell patterns of case keys such as q9/*/h64/float32; all when empty")


def confidence_setting() -> Any:
    return setting(0.99, at_least=0.5, at_most=0.999999, help="coverage of the interval")


def on_setting() -> Any:
    return setting("worst", choices=("worst", "median"), help="judge the worst case or the median over cases")


@dataclass(frozen=True)
class BuildRule:
    """Every object compiled, for every architecture named."""

    archs: tuple[str, ...] = setting((), help="architectures that must be there; whatever was built when empty")
    absent: str = absent_setting()

    def judge(self, results: Results) -> RuleOutcome:
        records = [r for r in results.build if not self.archs or r.arch in self.archs]
        missing = sorted(set(self.archs) - {r.arch for r in records})
        problems = [f"{r.variant}/{r.arch}: {_first_line(r.reason) or 'failed'}" for r in records if not r.ok]
        problems += [f"{arch}: not built" for arch in missing]
        built = sum(r.ok for r in records)
        quantity = Quantity(
            "build",
            Interval(built, built, built),
            len(records),
            "objects",
            "build",
            {"archs": sorted({r.arch for r in records}), "failed": problems[:_SHOWN]},
        )
        if not records and not missing:
            return absent(quantity, self.absent, "no object was built")
        verdict = Verdict.FAIL if problems else Verdict.PASS
        return quantity.outcome(
            verdict, "; ".join(problems) or f"all {built} objects built", float(len(records) + len(missing))
        )


@dataclass(frozen=True)
class ParityRule:
    """The right numbers on every parity case, against the float64 reference."""

    variants: tuple[str, ...] = setting((), help="variants judged; the candidates when empty")
    may_refuse: tuple[str, ...] = setting((), help="variants whose refusals of a case are no fault")
    cases: tuple[str, ...] = cases_setting()
    min_samples: int = setting(1, at_least=1, help="fewest cases the verdict may rest on")
    absent: str = absent_setting()

    def judge(self, results: Results) -> RuleOutcome:
        variants = set(self.variants) or _candidates(results) or {r.variant for r in results.parity}
        records = [r for r in _matching(results.parity, self.cases) if r.variant in variants]
        computed = [r for r in records if not r.refused]
        problems = [f"{r.variant} {r.case.key}: {problem}" for r in records if (problem := self._problem(r))]
        worst = max((r.error / r.tolerance for r in computed if r.error is not None and r.tolerance), default=math.nan)
        quantity = Quantity(
            "parity",
            Interval(worst, worst, worst),
            len(computed),
            "of the tolerance",
            "parity",
            {"variants": sorted(variants), "failed": problems[:_SHOWN], "refused": len(records) - len(computed)},
        )
        if problems:
            return quantity.outcome(
                Verdict.FAIL, f"{len(problems)} of {len(records)} cases are wrong; first: {problems[0]}", 1.0
            )
        missing = sorted(set(self.variants) - {r.variant for r in computed})
        if missing:
            return absent(quantity, self.absent, f"no parity case ran for {', '.join(missing)}", ceiling=1.0)
        if len(computed) < self.min_samples:
            return absent(quantity, self.absent, f"{len(computed)} cases ran, {self.min_samples} needed", ceiling=1.0)
        return quantity.outcome(
            Verdict.PASS, f"{len(computed)} cases right, worst error {worst:.2g} of its tolerance", 1.0
        )

    def _problem(self, record: ParityRecord) -> str:
        if record.refused:
            return "" if record.variant in self.may_refuse else f"refused: {record.refused}"
        if not record.ok:
            return record.reason or "error over tolerance"
        return ""


@dataclass(frozen=True)
class SpeedupRule:
    """Median time of the baseline over the candidate's, by its lower confidence bound."""

    baseline: str = setting(help="variant compared with")
    candidate: str = setting(help="variant judged")
    at_least: float = setting(above=0, help="times faster that the lower bound must reach")
    on: str = on_setting()
    cases: tuple[str, ...] = cases_setting()
    confidence: float = confidence_setting()
    min_samples: int = setting(10, at_least=1, help="fewest samples a case and variant")
    absent: str = absent_setting()

    def judge(self, results: Results) -> RuleOutcome:
        records = _matching(results.benchmark, self.cases)
        baseline = {r.case.key: r for r in records if r.variant == self.baseline}
        candidate = {r.case.key: r for r in records if r.variant == self.candidate}
        detail: dict[str, Any] = {"baseline": self.baseline, "candidate": self.candidate, "on": self.on}
        detail["skipped"] = [
            f"{r.variant} {r.case.key}: {r.refused}" for r in (*baseline.values(), *candidate.values()) if r.refused
        ]
        dishonest = _untrusted([*baseline.values(), *candidate.values()])
        if dishonest:
            return _no_honest_timing("speedup", dishonest, self.at_least, detail)
        pairs = {
            k: (baseline[k].samples, c.samples)
            for k, c in candidate.items()
            if c.samples and k in baseline and baseline[k].samples
        }
        fewest = min((min(len(b), len(c)) for b, c in pairs.values()), default=0)
        if fewest < self.min_samples:
            why = f"{len(pairs)} cases timed for both {self.baseline} and {self.candidate}, fewest samples {fewest}, {self.min_samples} needed"
            return absent(
                Quantity("speedup", _NOTHING, fewest, "x", "benchmark", detail), self.absent, why, floor=self.at_least
            )
        level = _level(self.confidence, self.on, len(pairs), results)
        intervals = {k: ratio_interval(b, c, level) for k, (b, c) in pairs.items()}
        return _judge_cases("speedup", intervals, self.on, self.at_least, fewest, "x", detail, results)


@dataclass(frozen=True)
class BandwidthFractionRule:
    """Share that is reached of a ceiling measured on the same device in the same run."""

    variant: str = setting(help="variant judged")
    at_least: float = setting(above=0, at_most=1.0, help="share the lower bound must reach")
    of: str = setting("roofline", choices=("roofline", "bandwidth", "compute"), help="which ceiling")
    on: str = on_setting()
    cases: tuple[str, ...] = cases_setting()
    confidence: float = confidence_setting()
    min_samples: int = setting(10, at_least=1, help="fewest samples a case")
    absent: str = absent_setting()

    def judge(self, results: Results) -> RuleOutcome:
        rule = "bandwidth_fraction"
        records = [r for r in _matching(results.benchmark, self.cases) if r.variant == self.variant]
        detail: dict[str, Any] = {"variant": self.variant, "of": self.of, "on": self.on}
        dishonest = _untrusted(records)
        if dishonest:
            return _no_honest_timing(rule, dishonest, self.at_least, detail)
        usable = {r.case.key: r for r in records if r.samples and self._fraction(r) is not None}
        fewest = min((len(r.samples) for r in usable.values()), default=0)
        if fewest < self.min_samples:
            why = (
                f"{len(usable)} timed cases with a measured ceiling, fewest samples {fewest}, {self.min_samples} needed"
            )
            return absent(
                Quantity(rule, _NOTHING, fewest, f"of {self.of}", "benchmark", detail),
                self.absent,
                why,
                floor=self.at_least,
            )
        level = _level(self.confidence, self.on, len(usable), results)
        intervals = {k: self._interval(r, level) for k, r in usable.items()}
        return _judge_cases(rule, intervals, self.on, self.at_least, fewest, f"of {self.of}", detail, results)

    def _fraction(self, record: BenchmarkRecord) -> float | None:
        if self.of == "bandwidth":
            return record.bandwidth_fraction
        if self.of == "compute":
            return record.compute_fraction
        return record.roofline_seconds / record.median if record.roofline_seconds and record.median else None

    def _interval(self, record: BenchmarkRecord, level: float) -> Interval:
        time = median_interval(record.samples, level)
        ideal = (self._fraction(record) or 0.0) * time.estimate  # seconds the ceiling alone would take
        return Interval(ideal / time.estimate, ideal / time.high, ideal / time.low if time.low > 0 else math.inf)


@dataclass(frozen=True)
class LongestPrefixRule:
    """Longest prefix computed right and timed; what other variants refuse is listed beside it."""

    variant: str = setting(help="variant judged")
    at_least: float = setting(above=0, help="keys")
    min_samples: int = setting(1, at_least=1, help="fewest timed cases")
    absent: str = absent_setting()

    def judge(self, results: Results) -> RuleOutcome:
        records = [r for r in results.benchmark if "prefix" in r.case.params]
        mine = [r for r in records if r.variant == self.variant]
        done = [float(r.case.params["prefix"]) for r in mine if _trusted(r)]
        longest = max(done, default=math.nan)
        quantity = Quantity(
            "longest_prefix",
            Interval(longest, longest, longest),
            len(done),
            "keys",
            "benchmark",
            {
                "variant": self.variant,
                "failed": _untrusted(mine)[:_SHOWN],
                "refused": sorted(
                    {f"{r.variant} {r.case.params['prefix']}: {r.refused}" for r in records if r.refused}
                ),
            },
        )
        if len(done) < self.min_samples:
            return absent(
                quantity,
                self.absent,
                f"{self.variant} has {len(done)} timed cases with a prefix, {self.min_samples} needed",
                floor=self.at_least,
            )
        return at_least(quantity, self.at_least)


# -- shared ------------------------------------------------------------------------------------------------------------


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _matching(records: Iterable[Any], patterns: tuple[str, ...]) -> list[Any]:
    return [r for r in records if not patterns or any(fnmatchcase(r.case.key, pattern) for pattern in patterns)]


def _candidates(results: Results) -> set[str]:
    return {r.variant for r in results.benchmark if r.role == "candidate"}


def _trusted(record: BenchmarkRecord) -> bool:
    """A performance number exists only for a case whose parity passed before and after timing."""
    return bool(record.samples) and record.parity_after is True and not record.reason


def _untrusted(records: Iterable[BenchmarkRecord]) -> list[str]:
    return [
        f"{r.variant} {r.case.key}: {r.reason or 'parity not confirmed after timing'}"
        for r in records
        if not r.refused and not _trusted(r)
    ]


def _no_honest_timing(rule: str, problems: list[str], threshold: float, detail: dict[str, Any]) -> RuleOutcome:
    quantity = Quantity(rule, _NOTHING, 0, "", "benchmark", {**detail, "failed": problems[:_SHOWN]})
    return quantity.outcome(
        Verdict.FAIL, f"{len(problems)} cases have no honest timing; first: {problems[0]}", threshold
    )


def _level(confidence: float, on: str, cases: int, results: Results) -> float:
    """Confidence of one case. For a median over cases the error is divided among them (Bonferroni). Where timings may be looked at
    several times, and are taken again while no verdict is reached, each look spends half of the error that is left, the last one all."""
    looks = looks_of(results)
    error = (1 - confidence) / 2 ** min(looks.taken, looks.most - 1)
    return 1 - (error / cases if on == "median" else error)


def _judge_cases(
    rule: str,
    intervals: dict[str, Interval],
    on: str,
    threshold: float,
    n: int,
    unit: str,
    detail: dict[str, Any],
    results: Results,
) -> RuleOutcome:
    """Judge the worst case or the median over cases.

    Worst: all cases must hold, an intersection-union test (Berger 1982), so each keeps its own level; the upper bound is the
    smallest one. Median: the bounds hold simultaneously, so their medians bound the median.
    """
    where = min(intervals, key=lambda key: intervals[key].estimate)
    parts = intervals.values()
    judged = Interval(intervals[where].estimate, min(p.low for p in parts), min(p.high for p in parts))
    if on == "median":
        where = "median"
        judged = Interval(*(statistics.median(getattr(p, side) for p in parts) for side in ("estimate", "low", "high")))
    cases = {key: [p.estimate, p.low, p.high if math.isfinite(p.high) else None] for key, p in intervals.items()}
    looks = looks_of(results)
    source = f"benchmark: {where} of {len(intervals)} cases" + (
        f", timed {looks.taken} times" if looks.taken > 1 else ""
    )
    outcome = at_least(Quantity(rule, judged, n, unit, source, {**detail, "cases": cases}), threshold)
    busy = [
        clause
        for name in ("benchmark_load", "ceilings_load")
        for clause in results.facts.get(name, {}).get("spoils", [])
    ]
    if outcome.verdict.advances or not busy:
        return outcome
    return replace(outcome, reason=f"{outcome.reason}, while {' and '.join(busy)}")


@dataclass(frozen=True)
class Looks:
    """How often timings were judged, and how often they might have been: a fact of the results."""

    taken: int = 1
    most: int = 1


def looks_of(results: Results) -> Looks:
    return Looks(**results.facts["looks"]) if "looks" in results.facts else Looks()


def undecided(outcome: RuleOutcome) -> tuple[set[str], set[str]]:
    """(variants, keys of cases) whose intervals include the threshold of a rule that could not tell: more samples might decide it."""
    cases, threshold = outcome.detail.get("cases"), outcome.threshold
    if outcome.verdict is not Verdict.INCONCLUSIVE or not cases or threshold is None:
        return set(), set()
    variants = {outcome.detail[name] for name in ("baseline", "candidate", "variant") if name in outcome.detail}
    return variants, {
        key for key, (_, low, high) in cases.items() if low < threshold and (high is None or high >= threshold)
    }
