"""The gate itself, on real measurements: a playbook's rules pass an honest kernel and fail every cheat."""

import pytest

from phases.base.results import BuildRecord, Ceiling, Results
from phases.base.verdict import Verdict
from phases.gate import gate, rules
from phases.harness import benchmark, parity
from phases.playbook.located import Mistakes, load_text
from tests.harness import kernels
from tests.harness.test_benchmark import QUICK

RULES = """rules:
  - {rule: parity, variants: [%(candidate)s]}
  - {rule: speedup, baseline: plain, candidate: %(candidate)s, at_least: 0.02, confidence: 0.9, min_samples: 6}
  - {rule: bandwidth_fraction, variant: %(candidate)s, at_least: 0.000001, confidence: 0.9, min_samples: 6}
"""
CHEATS = (
    "caches_by_shape",
    "caches_after_warmup",
    "skips_half",
    "ignores_mask",
    "hides_its_time",
    "writes_after",
    "segfaults",
)


@pytest.fixture(scope="module")
def measured():
    kernel, names = kernels.cheats(), ["plain", "honest", *CHEATS]
    proofs = parity.prove(kernel, "cpu", variants=names, cases=["q5/*"], silence=120)
    tops = (Ceiling("cpu", "read", 40e9), Ceiling("cpu", "flops_float32", 400e9))
    timings = benchmark.measure(kernel, "cpu", tops, proofs, variants=names, effort=QUICK, silence=120)
    built = (BuildRecord("plain", "python", True),)
    return Results("build-parity", "cheats", build=built, parity=proofs, benchmark=timings, ceilings=tops)


def judge(results, candidate):
    mistakes = Mistakes()
    node = load_text(RULES % {"candidate": candidate}, "rules.yaml", mistakes)
    parsed = [rules.parse(item, mistakes) for item in node.get("rules").elements()]
    mistakes.raise_if_any()
    return gate.judge("build-parity", parsed, results, candidates=[candidate])


def test_honest_kernel_passes(measured):
    outcome = judge(measured, "honest")
    assert outcome.verdict is Verdict.PASS, [rule.reason for rule in outcome.rules]


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheat_fails(measured, cheat):
    outcome = judge(measured, cheat)
    assert outcome.verdict is Verdict.FAIL
    assert all(rule.verdict is Verdict.FAIL for rule in outcome.rules if rule.rule not in ("phase", "parity")), [
        rule.reason for rule in outcome.rules
    ]
