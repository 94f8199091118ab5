"""What else the machine does, from /proc/stat as the kernel writes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phases.base.results import Ceiling
from phases.harness.load import Load, Meter, spread


def stat(path: Path, user: int = 0, system: int = 0, idle: int = 0, waiting: int = 0, stolen: int = 0) -> Path:
    path.write_text(f"cpu  {user} 0 {system} {idle} {waiting} 0 0 {stolen} 0 0\ncpu0 1 2 3\n")
    return path


@pytest.mark.parametrize(
    ("later", "others", "stolen", "words"),
    [
        ({"idle": 10_000}, 0.0, 0.0, []),
        ({"user": 5_000, "idle": 5_000}, 0.5, 0.0, ["others use 50%"]),
        ({"system": 1_000, "waiting": 9_000}, 0.1, 0.0, []),  # waiting for a disk leaves the cores free
        ({"idle": 9_000, "stolen": 1_000}, 0.0, 0.1, ["hypervisor takes 10%"]),
        ({"user": 6_000, "stolen": 4_000}, 0.6, 0.4, ["others use 60%", "hypervisor takes 40%"]),
    ],
)
def test_what_others_took_and_what_was_stolen(
    tmp_path: Path, later: dict, others: float, stolen: float, words: list
) -> None:
    meter = Meter(stat(tmp_path / "stat", user=500, idle=7))
    stat(tmp_path / "stat", **{**later, "user": 500 + later.get("user", 0), "idle": 7 + later.get("idle", 0)})
    seen = meter.read()
    assert seen.others == pytest.approx(others, abs=0.02) and seen.stolen == pytest.approx(stolen, abs=0.02)
    assert len(seen.spoils()) == len(words) and all(
        word in told for word, told in zip(words, seen.spoils(), strict=True)
    )


def test_our_own_work_is_not_others(tmp_path: Path) -> None:
    meter = Meter(stat(tmp_path / "stat"))
    begun = os.times()
    while (burnt := sum(os.times()[:2]) - sum(begun[:2])) < 0.3:
        pass
    ticks = round(burnt * os.sysconf("SC_CLK_TCK"))
    stat(tmp_path / "stat", user=ticks, idle=ticks)
    assert meter.read().others == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize("text", [None, "", "cpu  0 0 0 0 0 0 0 0 0 0\n", "cpu  1 2 three\n"])
def test_where_the_system_does_not_tell_the_average_alone_counts(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    seen = Meter(tmp_path / "stat").read()
    assert seen.others is None and seen.stolen is None and "used by others" not in str(seen)
    assert Load(4, 1.0).spoils() == () and "load is 3.0 on 4 cores" in Load(4, 3.0).spoils()[0]


def test_spread_of_ceilings_is_that_of_the_worst_kind() -> None:
    steady = Ceiling("cpu", "read", 10.0, (10.0, 10.1, 9.9, 10.0, 10.0))
    shaken = Ceiling("cpu", "gather", 10.0, (10.0, 5.0, 9.0, 6.0, 8.0))
    assert spread((steady,)) < 0.03 < 0.3 < spread((steady, shaken))
    assert spread(()) is None and spread((Ceiling("cpu", "read", 1.0),)) is None
