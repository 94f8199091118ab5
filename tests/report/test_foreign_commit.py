"""A manifest may come from anybody: what it calls its source commit is a name to git, never an option."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from phases.ledger.git import Git
from phases.report.view import _source_change


@pytest.fixture
def git(tmp_path):
    repository = tmp_path / "repository"
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    for text in ("one\n", "two\n"):
        (repository / "file").write_text(text)
        subprocess.run(["git", "add", "file"], cwd=repository, check=True)
        subprocess.run(["git", *identity, "commit", "-qm", text], cwd=repository, check=True)
    return Git(repository)


def _between(git, old, new):
    return _source_change(SimpleNamespace(git=git), {"source": {"commit": old}}, {"source": {"commit": new}})


def test_an_option_in_place_of_a_commit_writes_no_file(git, tmp_path):
    head, target = git.text("rev-parse", "HEAD"), tmp_path / "written"
    for pair in ((head, f"--output={target}"), (f"--output={target}", head)):
        assert "is not in this clone" in _between(git, *pair)
    assert not target.exists()


def test_two_commits_are_compared_and_one_that_is_elsewhere_is_named(git):
    head, before = git.text("rev-parse", "HEAD", "HEAD~1").split()
    assert "1 file changed" in _between(git, before, head)
    assert _between(git, head, head) == "same commit"
    assert _between(git, head, "f" * 40) == "commit ffffffffffff is not in this clone"
    assert _between(git, "e" * 40, head) == "commit eeeeeeeeeeee is not in this clone"
