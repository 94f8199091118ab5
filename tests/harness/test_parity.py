"""Each kind of wrong kernel is caught by parity, each by the check made for it; honest ones pass."""

import pytest

from phases.base.errors import UsageError
from phases.harness import parity
from tests.harness import kernels

CAUGHT = {
    "caches_by_shape": "with other values in the same memory: out is off",
    "caches_by_pointer": "with other values in the same memory: out is off",
    "skips_half": "out is off by",
    "writes_zeros": "out is off by 1 ",
    "writes_nothing": "no output was written",
    "skips_last_row": "out was never written at 64 of 320 elements, first at [4, 0, 0]",
    "ignores_mask": "out is off by",
    "slows_the_clock": "the kernel replaced time.perf_counter",
    "poisons_all_clocks": "the kernel replaced phases.harness.guards.perf_counter",
    "writes_later": "no output was written when run() returned",
    "returns_promise": "run() returned Thread instead of None",
    "writes_before": "wrote out of bounds: 5 bytes before output 'out'",
    "writes_after": "wrote out of bounds: 1 bytes after output 'out'",
    "mutates_inputs": "changed its inputs: q",
    "returns_nan": "out is NaN at 1 of 320 elements, first at [0, 0, 0]",
    "random_bits": "a rerun on the same inputs gives other bits in out",
    "batch_dependent": "the same rows in the batch q5/16/s1/twice give other bits in out",
    "raises": "run() raised ValueError: this kernel cannot at ",
    "segfaults": "killed by SIGSEGV; last lines: about to read address 8",
    "exits": "run() raised SystemExit",
    "exits_hard": "ended the process with exit code 0",
    "hangs": "gave no sign of life for 15 s and was killed",
}
HONEST = ("plain", "honest", "prints")


@pytest.fixture(scope="module")
def records():
    said = []
    variants = [*HONEST, *CAUGHT, "refuses"]
    found = parity.prove(kernels.cheats(), "cpu", variants=variants, cases=["q5/*"], progress=said.append, silence=15)
    assert len(said) == len(found) == len(variants)
    return {record.variant: record for record in found}


@pytest.mark.parametrize("variant", CAUGHT)
def test_caught(records, variant):
    record = records[variant]
    assert not record.ok and not record.refused
    assert CAUGHT[variant] in record.reason


@pytest.mark.parametrize("variant", HONEST)
def test_honest(records, variant):
    record = records[variant]
    assert record.ok and record.reason == "" and record.rerun_identical and record.batch_invariant
    assert 0 < record.error < 1e-6 < record.tolerance


def test_nondeterminism_is_a_field_of_the_record(records):
    assert records["random_bits"].rerun_identical is False
    assert records["batch_dependent"].batch_invariant is False


def test_refusal_keeps_the_variants_own_words(records):
    record = records["refuses"]
    assert record.refused == "it only does even numbers of queries" and not record.ok and record.error is None


def test_another_kind_of_kernel_goes_through_the_same_contract():
    records = parity.prove(kernels.five_line(), "cpu")
    assert len(records) == 6 and all(record.ok for record in records)


def test_a_variant_that_kills_two_workers_is_not_tried_again():
    records = parity.prove(
        kernels.cheats(), "cpu", variants=["exits_hard", "honest"], cases=["q5/*", "q9/*", "q9/64/*", "q3/*"][:2]
    )
    assert [record.ok for record in records if record.variant == "honest"] == [True, True]
    assert all("exit code 0" in record.reason for record in records if record.variant == "exits_hard")


def test_unknown_variant_and_case_name_the_nearest():
    with pytest.raises(UsageError, match="no variant 'honset' .did you mean 'honest'"):
        parity.prove(kernels.cheats(), "cpu", variants=["honset"])
    with pytest.raises(
        UsageError, match="no parity case matches 'q9/65/s1/h2/float32' .did you mean 'q9/64/s1/h2/float32'"
    ):
        parity.prove(kernels.cheats(), "cpu", cases=["q9/65/s1/h2/float32"])
