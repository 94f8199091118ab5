"""What would keep a production phase from being recorded at its end stops it before anything moves."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.rollout.light_fleet import LightFleet


def test_a_ledger_that_has_grown_apart_from_its_remote_stops_a_phase_before_it_looks_at_the_fleet(tmp_path: Path) -> None:
    fleet = LightFleet(tmp_path / "light", ssh=0, count=3).prepare()  # nothing of it is started
    text = (fleet.repo / "playbook.yaml").read_text()
    fleet.configure(text=text.replace("kernel: kernel.yaml", "kernel: kernel.yaml\nledger: {remote: origin}"))
    subprocess.run(["git", "init", "-q", "--bare", str(tmp_path / "remote.git")], check=True)
    _git(fleet.repo, "remote", "add", "origin", str(tmp_path / "remote.git"))
    _git(fleet.repo, "push", "-q", "origin", f"{_commit(fleet.repo, 'theirs')}:refs/heads/checkpoints")
    _git(fleet.repo, "update-ref", "refs/heads/checkpoints", _commit(fleet.repo, "ours"))
    done = fleet.phase("run", "tp8-canary", "--yes")
    assert done.returncode == 1 and "have both grown" in done.stdout, done.stdout
    assert "look at the fleet failed" in done.stdout and "does not answer" not in done.stdout, done.stdout


def _commit(repo: Path, message: str) -> str:
    """A commit without a parent and without files."""
    return _git(repo, "commit-tree", _git(repo, "mktree"), "-m", message)


def _git(repo: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(repo), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout.strip()
