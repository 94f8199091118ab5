"""The dispatch table and the host side of the CUDA variants: no GPU needed."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from verify_attn import cuda, dispatch, toolchain, tune
from verify_attn.errors import InputError, KernelBuildError
from verify_attn.sources import LIBRARIES, csrc

ROW = dispatch.Row("Some GPU", "bfloat16", heads=8, q=9, streams=16, prefix=16384, variant="tensor_core", splits=4, microseconds=12.5)


@pytest.fixture
def own_table(tmp_path, monkeypatch):
    """Write rows as the machine's own table and make dispatch read it."""
    def use(*rows: dispatch.Row):
        path = tmp_path / "own.json"
        dispatch.write(path, rows)
        monkeypatch.setenv(dispatch.TABLE, str(path))
        dispatch.rows.cache_clear()
        return path

    yield use
    monkeypatch.delenv(dispatch.TABLE, raising=False)
    dispatch.rows.cache_clear()


def problem(heads=8, q=9, streams=16, prefix=16384, dtype=torch.bfloat16):
    return SimpleNamespace(q=SimpleNamespace(dtype=dtype), heads=heads, max_q=q, streams=streams, max_prefix=prefix)


def test_a_table_survives_writing_and_reading(own_table):
    rows = (ROW, replace(ROW, streams=1, splits=0, microseconds=None))
    assert dispatch.read(own_table(*rows)) == rows


def test_nearest_takes_the_closest_shape_of_that_gpu_and_dtype(own_table):
    small, large = replace(ROW, streams=1, prefix=1024, variant="per_head"), replace(ROW, streams=64, prefix=65536)
    own_table(small, large, replace(ROW, gpu="Another GPU", streams=2, prefix=1024), replace(ROW, dtype="float32"))
    assert dispatch.nearest("Some GPU", problem(streams=1, prefix=1100)) == small
    assert dispatch.nearest("Some GPU", problem(streams=64, prefix=70000)) == large
    assert dispatch.nearest("Some GPU", problem(dtype=torch.float16)) is None
    assert dispatch.nearest("Unknown GPU", problem()) is None


@pytest.mark.parametrize("changed", [{"streams": 17}, {"prefix": 20000}, {"q": 10}, {"heads": 9}])
def test_splits_are_taken_from_a_shape_only_where_it_was_measured(own_table, changed):
    """A neighbour's may leave most of the chip idle: 16 splits a stream fit one stream, not two."""
    own_table(ROW)
    assert dispatch.nearest("Some GPU", problem()) == ROW
    assert dispatch.nearest("Some GPU", problem(**changed)) == replace(ROW, splits=0)


def test_nearest_counts_rows_not_heads(own_table):
    few, many = replace(ROW, q=9), replace(ROW, heads=64, q=9, variant="hopper")
    own_table(few, many)
    assert dispatch.nearest("Some GPU", problem(heads=8, q=65)) == replace(many, splits=0)


def test_the_machines_own_rows_replace_the_shipped_ones_of_that_gpu(own_table):
    shipped = dispatch.read(dispatch.Path(dispatch.__file__).with_name("dispatch.json"))
    own_table(ROW)
    assert dispatch.rows()[0] == ROW
    assert set(shipped) <= set(dispatch.rows())
    if shipped:
        mine = replace(ROW, gpu=shipped[0].gpu)
        own_table(mine)
        assert [row for row in dispatch.rows() if row.gpu == mine.gpu] == [mine]


@pytest.mark.parametrize("text, said", [
    ("not json", "not a dispatch table"),
    ("[]", "not a dispatch table"),
    ('{"schema": "verify_attn/dispatch/v0", "rows": []}', "tune again"),
    ('{"schema": "verify_attn/dispatch/v1", "rows": [{"gpu": "x", "wheels": 4}]}', "not a dispatch table"),
])
def test_a_bad_table_is_named_with_what_to_do(tmp_path, text, said):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(InputError, match=said) as error:
        dispatch.read(path)
    assert str(path) in str(error.value)


def test_the_shipped_table_names_only_variants_that_exist():
    table = json.loads(dispatch.Path(dispatch.__file__).with_name("dispatch.json").read_text())
    assert {row["variant"] for row in table["rows"]} <= set(cuda.variants())


@pytest.mark.parametrize("arch, capability, runs", [
    ("sm_80", (8, 0), True), ("sm_80", (8, 9), True), ("sm_80", (9, 0), False), ("sm_90", (9, 0), True),
    ("sm_90a", (9, 0), True), ("sm_90a", (9, 1), False), ("sm_120", (12, 0), True), ("sm_120", (12, 1), True),
    ("sm_120", (10, 0), False), ("sm_100a", (10, 0), True), ("sm_86", (8, 0), False),
])
def test_which_machine_code_runs_where(arch, capability, runs):
    assert cuda.runs_on(arch, capability) is runs


@pytest.mark.parametrize("library", [lib for lib in LIBRARIES if lib.compiler == "nvcc"], ids=lambda lib: lib.name)
def test_every_included_file_is_part_of_the_cache_key(library):
    """A header that is not listed could change without the object being built again."""
    seen, waiting = set(), [csrc() / source for source in library.sources]
    while waiting:
        file = waiting.pop().resolve()
        if file not in seen:
            seen.add(file)
            waiting += [file.parent / name for name in re.findall(r'#include "([^"]+)"', file.read_text())]
    listed = {(csrc() / name).resolve() for name in (*library.sources, *library.headers)}
    assert seen <= listed, f"missing in sources.py: {sorted(str(f) for f in seen - listed)}"


def test_tuning_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="no CUDA device"):
        tune.tune()
    assert tune.main(["--out", "/nowhere/table.json"]) == 1


def test_the_tuning_grid_leaves_out_what_would_take_gigabytes():
    grid = tune.shapes()
    assert tune.Shape(8, 9, 16, 65536) in grid and tune.Shape(8, 9, 64, 65536) not in grid


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_tensor_core_compiles_within_99_kb_and_without_spills(arch, tmp_path):
    """What the design of tensor_core rests on, asked of the compiler itself (static_assert holds the 99 KB)."""
    try:
        compiler = toolchain.nvcc()
    except KernelBuildError as missing:
        pytest.skip(str(missing))
    lines = _resource_report(compiler.path, arch, tmp_path)
    spills = [int(line.split("bytes spill stores")[0].rsplit(",", 1)[-1]) for line in lines if "spill stores" in line]
    assert spills and max(spills) <= 64, lines  # a few bytes outside the loop are no matter


def _resource_report(nvcc: str, arch: str, folder) -> list[str]:
    source = csrc() / "cuda" / "tensor_core.cu"
    number = arch.removeprefix("sm_")
    done = subprocess.run([nvcc, "-std=c++17", "-O3", "-Xptxas", "-v", f"-gencode=arch=compute_{number},code={arch}", "-c", str(source),
                           "-o", str(folder / "object.o")], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()
