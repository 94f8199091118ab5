"""What would keep a production phase from being recorded at its end stops it before anything moves; what comes between later changes not how it ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.production.light_fleet import LightFleet


def test_a_ledger_that_has_grown_apart_from_its_remote_stops_a_phase_before_it_looks_at_the_fleet(
    tmp_path: Path,
) -> None:
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


@pytest.mark.slow
@pytest.mark.fleet
def test_a_ledger_that_refuses_only_at_the_end_leaves_a_run_rolled_back_and_resume_records_it(tmp_path: Path) -> None:
    fleet = LightFleet(tmp_path / "light", ssh=0, count=3)
    try:
        fleet.up()
        fleet.configure(candidate={"WRONG": 0.5})
        _git(fleet.repo, "branch", "checkpoints", _commit(fleet.repo, "an empty ledger"))
        with fleet.start("run", "tp8-canary", "--yes") as run:
            assert run.stdout
            said = [next(line for line in run.stdout if "switch the canary" in line)]
            _git(
                fleet.repo, "symbolic-ref", "HEAD", "refs/heads/checkpoints"
            )  # long after the ledger was looked at, long before it is written to
            said += run.stdout
        out = "".join(said)
        assert run.returncode == 7 and "is checked out" in out, out
        assert (
            "Production was rolled back, as observed; the record of it is still to be written, which --resume does."
            in " ".join(out.split())
        ), out
        assert not fleet.not_converged(fleet.digests["incumbent"])
        _git(fleet.repo, "symbolic-ref", "HEAD", "refs/heads/main")
        done = fleet.phase("run", "tp8-canary", "--yes", "--resume")
        assert done.returncode == 7 and "recorded as checkpoint 0001-tp8-canary-FAIL" in done.stdout, done.stdout
    finally:
        fleet.close()


def _commit(repo: Path, message: str) -> str:
    """A commit without a parent and without files."""
    return _git(repo, "commit-tree", _git(repo, "mktree"), "-m", message)


def _git(repo: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(repo), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    ).stdout.strip()
