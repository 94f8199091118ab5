"""The tables a stranger reads in a terminal."""

import re

import pytest

from phases.base.results import BenchmarkRecord, Case, Results
from phases.report import tables
from tests.report.sample_results import case, results


def test_report_fits_the_width_and_says_everything():
    text = tables.report(results())
    assert max(map(len, text.splitlines())) <= tables.WIDTH
    for expected in (
        "verify_attn: build-parity",
        "cpu: Test CPU",
        "per_head sm_999: nvcc: unknown arch",
        "WRONG cpu q9/16384/s1/h64/float32: out is off by 0.3",
        "naive refuses 1 (q65/65536/s1/h64/float32): too long",
        "gather of random rows",
        "40.0 GB/s",
        "0.40 TFLOP/s",
        "cuda_naive refuses 3 (q9/1024/s1/h64/float32, ...): its score row",
    ):
        assert expected in text, expected
    assert not re.search(r" +$", text, re.MULTILINE)


def test_benchmark_numbers():
    text = tables.benchmark(results().benchmark)
    row = next(line for line in text.splitlines() if line.startswith("q9/16384"))
    cells = row.split()
    assert cells[1:3] == ["1.00", "ms"]  # the floor
    record = results().benchmark[4]
    assert f"{results().benchmark[3].median / record.median:.1f}x" in cells
    assert "1.70 ms*" in row or "1.69 ms*" in row or "1.71 ms*" in row  # the star: warm-up did not settle
    assert "59%" in cells or "58%" in cells
    assert "expect noise: cpu q9/16384/s1/h64/float32" in text


def test_many_variants_make_several_blocks():
    records = [
        BenchmarkRecord(
            case(9, 1024),
            f"variant_number_{n}",
            "baseline" if n == 0 else "candidate",
            "cpu",
            samples=(1e-3 * (n + 1),) * 3,
        )
        for n in range(9)
    ]
    text = tables.benchmark(records)
    assert text.count("\nq9/1024/s1") > 2 and max(map(len, text.splitlines())) <= tables.WIDTH
    assert all(f"variant_number_{n}" in text for n in range(9))


def test_a_record_without_a_number_says_why():
    record = BenchmarkRecord(
        Case("x", "float32"), "liar", "candidate", "cpu", reason="outputs produced while timing are wrong"
    )
    text = tables.benchmark([record])
    assert "NONE" in text and "NO NUMBER: outputs produced while timing are wrong" in text


def test_anchors_stand_beside():
    key = case(9, 16384).key
    text = tables.benchmark(results().benchmark, {key: {"SGLang Triton": 2.546e-3}})
    assert "SGLang Triton" in text and any(
        "2.55 ms" in line for line in text.splitlines() if line.startswith("q9/16384")
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (1.234, "1.23 s"),
        (0.9999, "1000 ms"),
        (12.3e-6, "12.3 us"),
        (0.75e-6, "750 ns"),
        (120e-6, "120 us"),
    ],
)
def test_seconds(value, shown):
    assert tables.seconds(value) == shown


def test_nothing_measured_is_said_plainly():
    assert tables.report(Results("build-parity", "k")) == "k: build-parity\n"
