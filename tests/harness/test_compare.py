"""Comparison with the reference, guarded outputs, fingerprints."""

import pytest
import torch

from phases.harness.buffers import GUARD_BYTES, GuardedOutputs, fingerprint, is_poison, same_bits
from phases.harness.compare import compare
from phases.harness.parity_worker import negate_rows, overwrite


def check(out, ref, tolerance=1e-5):
    return compare({"o": out}, {"o": ref}, tolerance)


def test_relative_error_is_frobenius():
    ref = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    result = check(torch.tensor([[3.0, 4.5]]), ref, 0.2)
    assert result.ok and result.error == pytest.approx(0.1) and result.max_abs == 0.5
    assert not check(torch.tensor([[3.0, 4.5]]), ref, 0.05).ok


def test_one_wrong_row_among_many_is_seen():
    ref = torch.randn(20000, 16, dtype=torch.float64)
    ref[777] = 1.0
    out = ref.float()
    out[777] *= -1
    result = check(out, ref, 2e-2)
    assert result.error < 2e-2 and "has a row off by" in result.reason and "[777]" in result.reason


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_never_pass(bad):
    ref = torch.ones(4, 4, dtype=torch.float64)
    out = ref.float()
    out[2, 1] = bad
    assert "[2, 1]" in check(out, ref, 0.99).reason


def test_infinity_of_the_reference_must_be_matched():
    ref = torch.tensor([1.0, float("-inf")], dtype=torch.float64)
    assert check(torch.tensor([1.0, float("-inf")]), ref).ok
    assert not check(torch.tensor([1.0, float("inf")]), ref).ok
    assert not check(torch.tensor([1.0, -1e30]), ref).ok


def test_nan_of_the_reference_means_leave_it_untouched():
    outputs = GuardedOutputs({"o": torch.empty(3)})
    outputs.poison()
    ref = torch.tensor([1.0, 2.0, float("nan")], dtype=torch.float64)
    outputs.tensors["o"][:2] = torch.tensor([1.0, 2.0])
    assert check(outputs.tensors["o"], ref).ok
    outputs.tensors["o"][2] = float("nan")
    assert "must stay untouched" in check(outputs.tensors["o"], ref).reason


def test_reference_of_zeros_uses_the_absolute_error():
    ref = torch.zeros(10, dtype=torch.float64)
    assert check(torch.zeros(10), ref).ok and not check(torch.full((10,), 1e-3), ref).ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_poison_is_a_nan_no_arithmetic_gives(dtype):
    outputs = GuardedOutputs({"o": torch.empty(5, 3, dtype=dtype)})
    outputs.poison()
    assert outputs.unwritten() == 15 and bool(torch.isnan(outputs.tensors["o"]).all())
    computed = torch.zeros(4, dtype=dtype) / torch.zeros(4, dtype=dtype)
    assert not bool(is_poison(computed).any())


def test_guards_keep_strides_and_see_both_sides():
    like = torch.empty(4, 6).t()
    outputs = GuardedOutputs({"o": like, "n": torch.empty(0), "i": torch.empty(3, dtype=torch.int32)})
    assert outputs.tensors["o"].stride() == like.stride() and outputs.overrun() == ""
    outputs.poison()
    assert outputs.overrun() == ""
    base = outputs.tensors["o"]._base
    base = base if base.dtype == torch.uint8 else base.view(torch.uint8)
    outputs._guards["o"][0][-3] = 0
    assert outputs.overrun() == "wrote out of bounds: 3 bytes before output 'o'"
    outputs._guards["i"][1][GUARD_BYTES - 1] = 1
    assert "after output 'i'" in outputs.overrun() and outputs.overrun() == ""


@pytest.mark.parametrize("change", [0, 5, 1 << 20, (1 << 21) + 3])
def test_fingerprint_sees_any_byte_and_any_swap(change):
    tensor = torch.randint(0, 255, ((1 << 21) + 5,), dtype=torch.uint8)
    before = fingerprint({"x": [tensor]})
    assert list(before) == ["x[0]"] and fingerprint({"x": [tensor]}) == before
    tensor[change] ^= 1
    assert fingerprint({"x": [tensor]}) != before
    words = torch.arange(1 << 20)
    other = words.clone()
    other[[3, 70000]] = other[[70000, 3]]
    assert fingerprint({"x": words}) != fingerprint({"x": other})


def test_same_bits_tells_signed_zeros_and_accepts_equal_nans():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")])) and same_bits(
        torch.tensor(1.0), torch.tensor(1.0)
    )


def test_overwrite_keeps_addresses():
    old = {"a": torch.zeros(3), "l": [torch.zeros(2)], "n": 1, "grown": torch.zeros(2)}
    pointer = old["a"].data_ptr()
    new = overwrite(old, {"a": torch.ones(3), "l": [torch.ones(2)], "n": 2, "grown": torch.ones(5)})
    assert new["a"].data_ptr() == pointer and float(new["a"].sum()) == 3 and new["l"][0] is old["l"][0]
    assert new["n"] == 2 and new["grown"].shape == (5,)


def test_negate_rows_touches_a_sixteenth_of_floating_rows():
    inputs = {"x": torch.ones(64, 2), "i": torch.ones(64, dtype=torch.int64), "one": torch.ones(1, 3)}
    negate_rows(inputs, 1)
    assert (
        int((inputs["x"] < 0).all(-1).sum()) == 4
        and bool((inputs["i"] == 1).all())
        and bool((inputs["one"] == -1).all())
    )


def test_only_interchangeable_inputs_change_places():
    from phases.harness.input_sets import _moving_paths

    def one(seed, hole):
        generator = torch.Generator().manual_seed(seed)
        pool = torch.randn(8, 4, generator=generator)
        pool[hole] = float("nan")
        return {
            "q": torch.randn(30, 4, generator=generator),
            "pool": pool,
            "draft": torch.randn(2, 4, generator=generator),
            "n": 3,
        }

    assert _moving_paths([one(0, 1), one(1, 2)]) == {"draft"}  # q is the largest; the pools' NaN rows lie elsewhere
    assert _moving_paths([one(0, 1), one(1, 1)]) == {"pool", "draft"}
    assert _moving_paths([{"q": torch.ones(3)}, {"q": torch.zeros(3)}]) == {"q"}
    assert _moving_paths([{"q": torch.ones(3)}, {"q": torch.zeros(4)}]) == set()
