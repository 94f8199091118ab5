"""Names judged without a compiler, torch or anybody's code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phases.base.errors import PlaybookError
from phases.playbook import loader
from phases.playbook.known import DTYPES, is_architecture, missing_module

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name", ["sm_80", "sm_90", "sm_90a", "sm_100f", "sm_120a", "sm_130", "x86-64-v3", "aarch64", "python"]
)
def test_architectures_there_are(name: str) -> None:
    assert is_architecture(name)


@pytest.mark.parametrize(
    "name", ["sm_91", "sm_80a", "sm90", "sm_", "SM_90", "x86-64-v5", "x86_64", "avx2", "", "sm_90b"]
)
def test_architectures_there_are_not(name: str) -> None:
    assert not is_architecture(name)


def test_every_dtype_is_one_of_torch() -> None:
    code = "import sys, torch; sys.exit(', '.join(n for n in sys.argv[1:] if not isinstance(getattr(torch, n, None), torch.dtype)) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", code, *(d for d in DTYPES if d != "float4_e2m1fn_x2")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_module_is_found_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    (package / "inner").mkdir(parents=True)
    for file in ("__init__.py", "contract.py", "inner/deep.py"):
        (package / file).write_text("raise SystemExit('imported')\n")
    (tmp_path / "built.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    for name in ("mine", "mine.contract", "mine.inner.deep", "built", "json.decoder"):
        assert missing_module(name, tmp_path) == "", name
    assert "no module contrct in" in missing_module("mine.contrct", tmp_path) and "'contract'" in missing_module(
        "mine.contrct", tmp_path
    )
    assert "is a module, not a package" in missing_module("mine.contract.x", tmp_path)
    assert "none is installed" in missing_module("nowhere.contract", tmp_path)


def test_files_and_architectures_that_phases_name(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(f"""
schema: phasegate/playbook/v1
name: local
kernel: {ROOT}/kernels/verify_attn/kernel.yaml
phases:
  build-parity:
    architectures: [x86-64-v3]
    optional_architectures: [sm_9]
    gate: {{rules: [{{rule: build, archs: [x86-64-v33]}}]}}
""")
    with pytest.raises(PlaybookError) as caught:
        loader.load(tmp_path / "p.yaml")
    assert [(line, text.split(": ")[1]) for _, line, text in caught.value.mistakes] == [
        (8, "there is no architecture 'sm_9' (did you mean 'sm_90'?)"),
        (9, "there is no architecture 'x86-64-v33' (did you mean 'x86-64-v3'?)"),
    ]


@pytest.mark.parametrize("playbook", sorted((ROOT / "playbooks").glob("*.yaml")), ids=lambda path: path.name)
def test_our_own_playbooks_have_no_mistake(playbook: Path) -> None:
    loader.load(playbook)
