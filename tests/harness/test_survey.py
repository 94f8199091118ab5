"""The survey: what an environment holds, and what its binaries were built for."""

import dataclasses
import json
import shutil
import subprocess
import sys
import textwrap

import pytest

from phases.harness.fatbin import architectures, runs_on
from phases.harness.survey import SurveyError, survey
from phases.harness.survey_facts import FACTS, Fact
from phases.report import tables

NVCC = shutil.which("nvcc")
OURS = Fact(
    "toy",
    ("toy-dist",),
    "toy_pkg",
    ("marker.py",),
    ("*.so",),
    True,
    "bits",
    (1, 64),
    "pages of 1 or 64",
    "nowhere",
    sms=(),
)


def environment(folder, with_dist=True, broken=False):
    """A Python that sees a made-up package `toy_pkg`, as a script."""
    package = folder / "site" / "toy_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise ImportError('undefined symbol: c10')\n" if broken else "print('noise')\n"
    )
    (package / "marker.py").write_text("")
    if with_dist:
        info = folder / "site" / "toy_dist-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-dist\nVersion: 2.5\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python), package


def test_absent_kernels_are_absent_and_say_what_they_could():
    found = survey(sys.executable, sm=90, try_imports=False)
    by = {kernel.name: kernel for kernel in found.kernels}
    assert len(by) == len(FACTS) and not by["FlashMLA"].installed and not by["FlashMLA"].usable
    assert by["FlashMLA"].page.why == "page size 1: block size 64 only" and by["FlashMLA"].tree.ok is False
    assert by["cutlass-MLA"].gpu.why == "written for sm_100, sm_103, not sm_90"
    assert survey(sys.executable, page_size=64, sm=90, try_imports=False).kernels[5].page.ok


def test_version_import_and_page(tmp_path):
    python, _ = environment(tmp_path)
    found = survey(python, facts=[OURS], page_size=16, sm=90).kernels[0]
    assert (found.version, found.imports, found.page.ok, found.installed) == ("2.5", "ok", False, True)
    assert found.gpu.ok is None and "no compiled objects" in found.gpu.why


def test_a_broken_import_is_told_and_not_usable(tmp_path):
    python, _ = environment(tmp_path, broken=True)
    found = survey(python, facts=[OURS], sm=90)
    assert "undefined symbol: c10" in found.kernels[0].imports and not found.kernels[0].usable
    assert "undefined symbol: c10" in tables.survey(found)


def test_tables_fit_and_json_is_plain():
    found = survey(sys.executable, sm=90, try_imports=False)
    text = tables.survey(found)
    assert max(map(len, text.splitlines())) <= tables.WIDTH and "SGLang Triton verify" in text
    assert json.loads(json.dumps(found.to_json()))["schema"] == "phasegate/survey/v1"


def test_bad_interpreters():
    with pytest.raises(SurveyError, match="/no/such/python does not exist"):
        survey("/no/such/python")
    with pytest.raises(SurveyError, match="gave no answer .exit code 1."):
        survey("/bin/false")


@pytest.mark.parametrize(
    ("arch", "sm", "expected"),
    [
        ("sm_90", 90, True),
        ("sm_80", 89, True),
        ("sm_80", 90, False),
        ("sm_90a", 90, True),
        ("sm_120", 121, True),
        ("sm_120a", 121, False),
        ("compute_80", 120, True),
        ("compute_90a", 100, False),
        ("sm_100f", 103, True),
        ("sm_100f", 120, False),
        ("sm_90", 80, False),
    ],
)
def test_runs_on(arch, sm, expected):
    assert runs_on(arch, sm) is expected


def test_files_without_device_code(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_bytes(b"P\xedU\xba" * 50)  # the magic word, and nothing that follows from it
    assert (
        architectures(tmp_path / "empty") == []
        and architectures(tmp_path / "text") == []
        and architectures(sys.executable) == []
    )


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_architectures_of_a_real_binary(tmp_path, monkeypatch):
    python, package = environment(tmp_path)
    source = tmp_path / "k.cu"
    source.write_text(
        textwrap.dedent("""
        __global__ void add(float *x) { x[threadIdx.x] += 1; }
        extern "C" void launch(float *x) { add<<<1, 32>>>(x); }
    """)
    )
    codes = ["arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a", "arch=compute_120,code=[sm_120,compute_120]"]
    argv = [NVCC, "-shared", "-Xcompiler", "-fPIC", "-cudart", "static", "-o", str(package / "k.so"), str(source)]
    subprocess.run(argv + [part for code in codes for part in ("-gencode", code)], check=True, capture_output=True)
    assert architectures(package / "k.so") == ["sm_80", "sm_90a", "sm_120", "compute_120"]
    found = survey(python, facts=[OURS], sm=100).kernels[0]
    assert (
        found.gpu.ok is False
        and found.gpu.why == "its binaries are built for sm_80, sm_90a, sm_120, compute_120; none runs on sm_100"
    )
    assert survey(python, facts=[OURS], sm=121).kernels[0].usable
    (tmp_path / "cache" / "k-sm").mkdir(parents=True)
    (package / "k.so").rename(tmp_path / "cache" / "k-sm" / "k.so")
    monkeypatch.setenv("TOY_PKG_CACHE", str(tmp_path / "cache"))
    assert survey(python, facts=[dataclasses.replace(OURS, cached=True)], sm=90).kernels[0].built_for[1] == "sm_90a"
    assert survey(python, facts=[OURS], sm=90).kernels[0].built_for == ()
