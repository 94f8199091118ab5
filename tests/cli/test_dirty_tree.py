"""What a later phase will refuse is said before an earlier one takes its minutes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from phases.base.errors import UsageError
from phases.cli.run import _warn_of_dirty_tree
from phases.playbook.loader import load
from phases.run.session import _require_clean

ROOT = Path(__file__).parents[2]


@pytest.fixture
def playbook(tmp_path: Path) -> Path:
    text = (
        (ROOT / "playbooks" / "local.yaml")
        .read_text()
        .replace("../kernels/verify_attn/kernel.yaml", str(ROOT / "kernels/verify_attn/kernel.yaml"))
    )
    (tmp_path / "playbook.yaml").write_text(text)
    for argv in (
        ["init", "-q"],
        ["config", "user.name", "Ada"],
        ["config", "user.email", "ada@example.org"],
        ["add", "-A"],
        ["commit", "-qm", "Begin"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *argv], check=True)
    return tmp_path / "playbook.yaml"


def test_said_once_when_dirty_and_a_later_phase_is_strict(playbook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load(playbook)
    _warn_of_dirty_tree(loaded, loaded.phases)
    assert capsys.readouterr().err == ""
    (playbook.parent / "new.py").write_text("x = 1\n")
    _warn_of_dirty_tree(loaded, loaded.phases)
    assert "(new.py): sglang-integration will refuse them" in capsys.readouterr().err
    _warn_of_dirty_tree(loaded, loaded.phases[:1])
    assert capsys.readouterr().err == ""


def test_the_refusal_names_what_is_not_committed(playbook: Path) -> None:
    for number in range(7):
        (playbook.parent / f"new{number}.py").write_text("x = 1\n")
    with pytest.raises(UsageError, match=r"\(new0.py, new1.py, .*new4.py and 2 more\)"):
        _require_clean(load(playbook).phase("sglang-integration"), playbook.parent)
