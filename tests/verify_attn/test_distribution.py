"""The wheel carries the sources and works where it is installed; nvcc's objects hold what they should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from verify_attn import KernelBuildError, build, contract, fatbin, sources, toolchain

from tests.verify_attn.helpers import has_nvcc

ROOT = Path(__file__).resolve().parents[2] / "kernels" / "verify_attn"
USE = """
import torch, verify_attn
from verify_attn import cpu
from verify_attn.sources import csrc
q = torch.randn(3, 2, 576)
out, lse = verify_attn.verify_attention(q, torch.randn(10, 576), qo_indptr=torch.tensor([0, 3]), kv_indptr=torch.tensor([0, 4]),
    kv_indices=torch.arange(4), prefix_lens=torch.tensor([4]), draft_slots=torch.arange(4, 7), scale=0.1)
print(verify_attn.__file__, csrc(), cpu.built().path, bool(torch.isfinite(out).all()), sep="|")
"""

NO_ROWS = """
import ctypes, sys, torch
from verify_attn import abi
library, name = ctypes.CDLL(sys.argv[1]), sys.argv[2]
refuse, workspace = getattr(library, f"verify_attn_{name}_refuse"), getattr(library, f"verify_attn_{name}_workspace")
refuse.restype, workspace.restype = ctypes.c_char_p, ctypes.c_int64
shape = dict(abi=abi.ABI, dtype=abi.DTYPES[torch.bfloat16], streams=1, max_prefix=1024, latent_dim=512, rope_dim=64, page_size=1, kv_row_stride=576, scale=1.0)
for rows in (dict(tokens=9, heads=8, max_q=9), dict(tokens=0, heads=8, max_q=0), dict(tokens=9, heads=0, max_q=9)):
    params = abi.Params(**shape, **rows)
    print(refuse(ctypes.byref(params)), workspace(ctypes.byref(params)) > 0)
"""


@pytest.mark.slow
def test_the_installed_wheel_builds_and_runs_its_kernel(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), str(source)], check=True, timeout=400)
    wheel = next(tmp_path.glob("*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    needed = {f"verify_attn/csrc/{name}" for lib in sources.LIBRARIES for name in (*lib.sources, *lib.headers)}
    assert needed <= names, f"missing from the wheel: {sorted(needed - names)}"
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True, timeout=400)
    shutil.rmtree(source)
    env = {**os.environ, "PYTHONPATH": str(site), "VERIFY_ATTN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", USE], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    module, csrc, built, finite = done.stdout.strip().split("|")
    assert Path(module).is_relative_to(site) and Path(csrc).is_relative_to(site) and finite == "True"
    assert Path(built).is_relative_to(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc(), reason="no nvcc")
def test_nvcc_objects_hold_the_architectures_asked_for(tmp_path, monkeypatch):
    still = tmp_path / "csrc"
    shutil.copytree(sources.csrc(), still)  # whoever edits the sources meanwhile
    monkeypatch.setattr(build, "csrc", lambda: still)
    built = build.build("naive", ("sm_80", "sm_90", "sm_120"), tmp_path / "cache")
    embedded = fatbin.embedded_archs(Path(built.path))
    assert {"sm_80", "sm_90", "sm_120"} <= embedded and "sm_75" not in embedded
    assert build.build("naive", ("sm_80", "sm_90", "sm_120"), tmp_path / "cache").cached


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc(), reason="no nvcc")
@pytest.mark.parametrize("name", ["hopper", "hopper_rows"])
def test_a_batch_without_rows_is_planned_without_a_crash(name):
    """Asked on the host, in a process of its own: a division by zero there would end the server."""
    built = build.build(name, ("sm_90a",))
    done = subprocess.run([sys.executable, "-c", NO_ROWS, str(built.path), name], env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()) == (0, ["None True"] * 3), done.stderr


def test_an_object_without_the_architecture_is_refused(tmp_path):
    (tmp_path / "libx.so").write_bytes(b"\x7fELF nothing here")
    with pytest.raises(KernelBuildError, match=r"libx.so was built but holds no machine code for sm_90 \(it holds none\)"):
        build._check_embedded(tmp_path / "libx.so", ("sm_90",))


def test_contract_builds_what_the_host_can_and_says_why_not(tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    said: list[str] = []
    records = contract.build(["x86-64-v3", "sm_90"], tmp_path, said.append)
    cpu = [r for r in records if r["variant"] == "cpu"]
    cuda = [r for r in records if r["variant"] != "cpu"]
    assert [r["ok"] for r in cpu] == [True] and (tmp_path / cpu[0]["artifact"]).is_file() and any("compiling cpu" in s for s in said)
    assert cuda and all(not r["ok"] and "NVCC" in r["reason"] and r["arch"] == "sm_90" for r in cuda)
    with pytest.raises(KernelBuildError, match="no kernel for sm_70; it has kernels for .*sm_90a"):
        contract.build(["sm_70"], tmp_path, said.append)
    with pytest.raises(KernelBuildError, match="no architecture given"):
        contract.build([], tmp_path, said.append)


def test_the_abi_mirror_has_the_headers_layout(tmp_path):
    from verify_attn.abi import ABI, Params

    fields = [name for name, *_ in Params._fields_]
    lines = "".join(f'printf("{name} %zu\\n", offsetof(verify_attn_params, {name}));' for name in fields)
    program = tmp_path / "layout.c"
    program.write_text("#include <stddef.h>\n#include <stdio.h>\n#include \"verify_attn.h\"\n"
                       f'int main(void) {{ {lines} printf("sizeof %zu %d\\n", sizeof(verify_attn_params), VERIFY_ATTN_ABI); return 0; }}')
    subprocess.run([toolchain.cxx().path, "-x", "c", f"-I{sources.csrc()}", str(program), "-o", str(tmp_path / "layout")], check=True)
    said = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout.split("\n")
    import ctypes

    assert said[:-2] == [f"{name} {getattr(Params, name).offset}" for name in fields]
    assert said[-2] == f"sizeof {ctypes.sizeof(Params)} {ABI}"


def test_wide_instructions_stay_out_of_shared_code(tmp_path):
    """An inline function compiled for AVX-512 could be the copy that an older processor ends up calling: none may be shared."""
    nm = shutil.which("nm")
    if not nm or toolchain.native_cpu_archs()[0] != "x86-64-v3":
        pytest.skip("needs nm and x86-64")
    lib = sources.library("cpu")
    command = next(c for c in build._commands(lib, ("x86-64-v4",), toolchain.cxx(), tmp_path) if "-march=x86-64-v4" in c)
    subprocess.run(command, check=True)
    symbols = subprocess.run([nm, "-C", command[command.index("-o") + 1]], capture_output=True, text=True, check=True).stdout.splitlines()
    assert any("kernels_v4" in line for line in symbols)
    assert not [line for line in symbols if line[17:18] in "WVu"]
