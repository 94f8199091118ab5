"""Ceilings of this machine: all kinds, plausible, with samples; also without a compiler."""

import pytest

from phases.harness import ceilings


@pytest.mark.slow
def test_cpu_ceilings(monkeypatch):
    found = {ceiling.kind: ceiling for ceiling in ceilings.measure("cpu")}
    assert set(found) == {"read", "copy", "gather", "flops_float32", "flops_bfloat16", "flops_float16"}
    for ceiling in found.values():
        assert len(ceiling.samples) >= 5 and ceiling.value == max(ceiling.samples)
    assert 1e8 < found["gather"].value < 1e13 and 1e9 < found["flops_float32"].value < 1e15

    monkeypatch.setenv("PATH", "/nonexistent")
    said = []
    bare = {ceiling.kind: ceiling for ceiling in ceilings.measure("cpu", threads=1, progress=said.append)}
    assert set(bare) == set(found) and any("no C compiler found" in line for line in said)
