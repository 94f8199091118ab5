"""`phase demo`: the whole of it as a person gives it, and its knobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from phases.base.errors import UsageError
from phases.demo import repository
from phases.engines.embedded.stand_in import HERE, ROUTER_NEEDS, _pinned
from phases.ledger.git import Git
from phases.ledger.source import describe


def phase(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "phases.cli.main", *arguments]
    return subprocess.run(argv, cwd=directory, capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path with a space, and a git that knows nobody."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "EMAIL"):
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path / "a b"
    directory.mkdir()
    return directory


def test_it_begins_whatever_git_is_set_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that cannot sign, a hook that refuses and global excludes are the user's, not the demo's."""
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "hooks" / "pre-commit").chmod(0o755)
    (tmp_path / "excludes").write_text("*.yaml\n")
    (tmp_path / "gitconfig").write_text(
        "[commit]\n gpgSign = true\n[tag]\n gpgSign = true\n[gpg]\n program = false\n"
        f"[core]\n hooksPath = {tmp_path}/hooks\n excludesFile = {tmp_path}/excludes\n autocrlf = true\n safecrlf = true\n"
        f"[init]\n templateDir = {tmp_path}\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    repository.make(tmp_path / "d")
    git = Git(tmp_path / "d")
    assert not describe(git)["dirty"] and "slow.yaml" in git.text("ls-tree", "--name-only", "HEAD")
    assert not git.flag("commit.gpgSign") and not git.flag("tag.gpgSign")


@pytest.mark.slow
@pytest.mark.fleet
def test_a_good_canary_passes_and_a_slow_one_goes_back_by_itself(place: Path) -> None:
    done = phase(place, "demo", "d")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(exit 0)" in done.stdout and "rolled back (exit 7)" in done.stdout
    assert list((place / "d").glob("*.html")), "no report page"
    assert "Stopped w1, w2, w3, w4, router." in done.stdout, "the fleet outlived a demo that was not to keep it"


def test_it_writes_over_nothing(place: Path) -> None:
    (place / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="something else"):
        repository.make(place)
    assert [path.name for path in place.iterdir()] == ["mine.txt"]


def test_its_playbooks_hold_each_kind_of_candidate_and_pass_the_check(place: Path) -> None:
    repository.make(place / "d")
    for name in repository.CANDIDATES:
        done = phase(place / "d", "playbook", "check", "-p", f"{name}.yaml")
        assert done.returncode == 0, done.stderr
        written = yaml.safe_load((place / "d" / f"{name}.yaml").read_text())
        assert written["production"]["candidate"]["environment"] == repository.CANDIDATES[name][1]


def test_the_router_is_pinned_by_hash() -> None:
    for name in ROUTER_NEEDS:
        first, *hashes = _pinned((HERE / "requirements.txt").read_text(), name).splitlines()
        assert first.startswith(f"{name}==") and hashes and all("--hash=sha256:" in line for line in hashes)
