"""What an operator does to a fleet, from a machine that is not Linux: a canary cut off in the middle, looked at, watched and rolled back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phases.tp8_canary import steps as canary
from tests.engines.ssh.sshfleet import SSHD
from tests.production.light_fleet import LightFleet

LAPTOP = Path(__file__).with_name("laptop.py")
TOP = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.skipif(not SSHD, reason="sshd is not installed (package openssh-server)"),
]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LightFleet]:
    made = LightFleet(
        tmp_path / "fleet", ssh=3, count=3
    )  # behind sshd, all: a local host is this machine, not the laptop
    try:
        yield made.up()
    finally:
        made.close()


def test_status_watch_and_rollback_need_nothing_that_only_linux_has(fleet: LightFleet) -> None:
    def laptop(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, LAPTOP, *arguments],
            cwd=fleet.repo,
            env={**os.environ, "PYTHONPATH": str(TOP), "PHASE_PLAYBOOK": str(fleet.repo / "playbook.yaml")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stdout + done.stderr
        return done.stdout

    cut = fleet.phase("run", "tp8-canary", "--yes", kill=("step-finished", canary.CANARY, "after"))
    assert any(state.current == fleet.digests["candidate"] for state in fleet.states()), cut.stdout
    assert "w1" in laptop("status")
    told = json.loads(laptop("rollback", "--yes", "--json", "--reason", "p99 doubled"))
    assert told["rollback"]["verified"] and not fleet.not_converged(fleet.digests["incumbent"])
    laptop("watch", "--once", code=5)  # well, and no canary has recorded what it could be held against
    laptop("doctor")
