"""No performance number for a kernel that lies about its result or its time; real numbers for honest ones."""

import dataclasses

import pytest

from phases.base.results import BenchmarkRecord, Case, Ceiling, ParityRecord
from phases.harness import benchmark
from phases.harness.benchmark import Effort, audit, with_fractions
from tests.harness import kernels

QUICK = Effort(min_samples=6, max_samples=12, seconds=0.2, max_warmup_sweeps=3, audit_seconds=0.02)
CEILINGS = (Ceiling("cpu", "read", 40e9), Ceiling("cpu", "flops_float32", 400e9))
CAUGHT = {
    "caches_after_warmup": "outputs produced while timing are wrong",
    "caches_by_pointer": (
        "with other values in the same memory",
        "outputs produced while timing are wrong",
    ),  # the second where fresh inputs got an old place
    "skips_half": "before timing: out is off",
    "ignores_mask": "before timing: out is off",
    "slows_the_clock": "the kernel replaced time.perf_counter",
    "hides_its_time": "time is being hidden",
    "writes_later": "never written at",
    "writes_after": "wrote out of bounds",
    "returns_nan": "out is NaN",
    "mutates_inputs": "changed its inputs",
    "random_bits": "a rerun on the same inputs gives other bits",
    "segfaults": "killed by SIGSEGV",
}


@pytest.fixture(scope="module")
def records():
    variants = ["plain", "honest", *CAUGHT]
    found = benchmark.measure(kernels.cheats(), "cpu", CEILINGS, (), variants=variants, effort=QUICK, silence=120)
    assert len(found) == len(variants)
    return {record.variant: record for record in found}


@pytest.mark.parametrize("variant", CAUGHT)
def test_cheats_get_no_number(records, variant):
    assert records[variant].samples == () and records[variant].median is None
    told = CAUGHT[variant] if isinstance(CAUGHT[variant], tuple) else (CAUGHT[variant],)
    assert any(reason in records[variant].reason for reason in told)


@pytest.mark.parametrize("variant", ["plain", "honest"])
def test_honest_kernels_keep_every_sample(records, variant):
    record = records[variant]
    assert record.reason == "" and record.parity_after is True
    assert QUICK.min_samples <= len(record.samples) <= QUICK.max_samples and min(record.samples) > 0
    assert record.detail["cold"] and record.detail["moving_inputs"] == ["q"]
    keys, rows = 2048 + 9, 9 * 8
    assert record.bytes_needed == 4 * 32 * (keys + 2 * rows) and record.flops == 4 * 32 * keys * rows
    floor = max(record.bytes_needed / 40e9, record.flops / 400e9)
    assert record.roofline_seconds == pytest.approx(floor)
    assert record.bandwidth_fraction == pytest.approx(record.bytes_needed / record.median / 40e9)


def test_a_kernel_that_spoils_every_clock_is_named_and_its_neighbour_is_not():
    found = benchmark.measure(
        kernels.cheats(), "cpu", CEILINGS, (), variants=["poisons_all_clocks", "honest"], effort=QUICK
    )
    by_name = {record.variant: record for record in found}
    assert "replaced phases.harness.guards.perf_counter" in by_name["poisons_all_clocks"].reason
    assert by_name["honest"].samples


def test_failed_parity_stands_against_a_number():
    kernel = kernels.cheats()
    case = kernel.benchmark_cases[0]
    wrong = ParityRecord(case=case, variant="honest", device="cpu", ok=False, reason="off by a mile")
    found = benchmark.measure(kernel, "cpu", CEILINGS, (wrong,), variants=["plain", "honest"], effort=QUICK)
    assert found[0].samples and not found[1].samples
    assert found[1].reason == "parity failed on this case: off by a mile"


def test_another_kind_of_kernel_is_timed_the_same_way():
    found = benchmark.measure(kernels.five_line(), "cpu", (), (), effort=QUICK)
    assert [record.role for record in found] == ["baseline", "candidate"]
    assert all(record.samples and record.roofline_seconds is None for record in found)


def test_audit():
    samples = [1e-3, 1.1e-3, 1.2e-3]
    assert audit(samples, [(0.0112, 10), (0.03, 10)]) == ""
    assert "hidden" in audit(samples, [(0.5, 100)])
    assert "invented" in audit([0.1, 0.1], [(0.01, 10)])
    assert "not audited" in audit(samples, [])


def test_fractions_need_the_ceilings_of_the_same_device():
    record = BenchmarkRecord(
        Case("x", "float32"), "v", "candidate", "cpu", samples=(2e-3,), bytes_needed=40_000_000, flops=400_000_000
    )
    full = with_fractions(record, "read", CEILINGS)
    assert (full.bandwidth_fraction, full.compute_fraction, full.roofline_seconds) == (0.5, 0.5, 1e-3)
    assert with_fractions(dataclasses.replace(record, device="cuda"), "read", CEILINGS).roofline_seconds is None
    gather = with_fractions(record, "gather", (*CEILINGS, Ceiling("cpu", "gather", 20e9)))
    assert gather.bandwidth_fraction == 1.0 and gather.roofline_seconds == 2e-3
