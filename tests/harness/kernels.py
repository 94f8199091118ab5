"""The kernels these tests prove and time."""

from pathlib import Path

from phases.harness import contract

FOLDER = Path(__file__).parent.parent / "fixtures" / "kernels"


def cheats():
    return contract.load(FOLDER / "cheats")


def five_line():
    return contract.load(FOLDER / "five_line")
