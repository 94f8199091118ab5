"""The compiler that is asked about is the compiler that builds, and the one the record names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from verify_attn import toolchain as kernels

from phases.base.errors import BuildError
from phases.harness import build, process, toolchain
from tests.harness.kernels import five_line

SAYS = {
    "nvcc": 'case "$1" in --list-gpu-arch) echo compute_90;; *) echo "nvcc: NVIDIA, release 13.0, V13.0.48";; esac',
    "c++": "echo made-up 1",
    "g++": "echo made-up 2",
}


def program(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{SAYS[name]}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("places", [("path",), ("path", "home"), ("home",), ("wanted", "path", "home"), ("wanted",)])
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_the_toolkit_and_the_kernel_find_the_same_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: tuple[str, ...], variable: str
) -> None:
    for name in ("CXX", "NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "path"
    program(path, "c++")
    program(path, "g++")
    for tool in ("sh", "echo"):
        if found := shutil.which(tool):
            (path / tool).symlink_to(found)
    made = {"path": path, "home": tmp_path / "cuda" / "bin", "wanted": tmp_path / "wanted"}
    nvccs = {place: program(made[place], "nvcc") for place in places}
    monkeypatch.setenv("PATH", str(path))
    if "home" in places:
        monkeypatch.setenv(variable, str(tmp_path / "cuda"))
    if "wanted" in places:
        monkeypatch.setenv("NVCC", str(nvccs["wanted"]))
        monkeypatch.setenv("CXX", str(path / "g++"))
    assert toolchain.find_nvcc().path == kernels.nvcc().path == str(nvccs[places[0]])
    assert toolchain.find_cxx().path == kernels.cxx().path
    found = toolchain.environment()
    assert found == {"CXX": toolchain.find_cxx().path, "NVCC": str(nvccs[places[0]])}


def test_a_build_gets_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []

    def died(*_: object, environment: dict[str, str], **__: object) -> process.Death:
        seen.append(dict(environment))
        return process.Death("was stopped", -1, -1)

    monkeypatch.setattr(process, "run", died)
    with pytest.raises(BuildError, match="was stopped"):
        build.build(five_line(), [], tmp_path)
    assert seen == [toolchain.environment()] and all(os.access(path, os.X_OK) for path in seen[0].values())
