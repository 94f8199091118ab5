"""The checkpoints this repository ships are whole, and say what their README says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from phases.ledger.verify import verify_directory

ROOT = Path(__file__).parents[2] / "checkpoints"
SHIPPED = sorted(path.parent for path in ROOT.rglob("manifest.json"))


def test_there_are_some_and_the_readme_lists_each() -> None:
    text = (ROOT / "README.md").read_text()
    assert SHIPPED and all(f"`{path.relative_to(ROOT)}`" in text for path in SHIPPED)


@pytest.mark.parametrize("directory", SHIPPED, ids=lambda path: path.name)
def test_nothing_was_altered(directory: Path) -> None:
    assert verify_directory(directory) == []
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
