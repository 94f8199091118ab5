"""Real git repositories to record in."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from phases.base.verdict import Verdict
from phases.gate.outcome import GateOutcome, RuleOutcome
from phases.ledger import source
from phases.ledger.checkpoint import Draft, canonical_json
from phases.ledger.ledger import Ledger

DraftMaker = Callable[..., Draft]


def git(path: Path, *argv: str) -> str:
    done = subprocess.run(["git", "-C", str(path), *argv], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def identify(path: Path, name: str = "Ada", mail: str = "ada@example.org") -> None:
    git(path, "config", "user.name", name)
    git(path, "config", "user.email", mail)


@pytest.fixture(autouse=True)
def own_git_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's git configuration."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "gitconfig").write_text('[protocol "file"]\n\tallow = always\n')


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    path = tmp_path / "repo"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    identify(path)
    (path / "kernel.py").write_text("x = 1\n")
    git(path, "add", "kernel.py")
    git(path, "commit", "-qm", "Begin")
    return path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    path = tmp_path / "bare.git"
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(path)], check=True)
    return path


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def ledger(repo: Path, warnings: list[str]) -> Ledger:
    return Ledger(repo, warn=warnings.append)


def make_draft(
    ledger: Ledger, run: str = "run-1", verdict: Verdict = Verdict.PASS, table: bytes = b"case  us\n"
) -> Draft:
    gate = GateOutcome("build-parity", (RuleOutcome("parity", verdict, "as the test says", estimate=0.5, n=3),))
    files = {
        "results.json": canonical_json({"schema": "phasegate/results/v1"}),
        "gate.json": canonical_json(gate.to_json()),
        "benchmark.txt": table,
        "plots/roofline.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    }
    return Draft("build-parity", verdict, "verify_attn", run, files, source.describe(ledger.git), 1_700_000_000.0)
