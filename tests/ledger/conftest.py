"""Real git repositories to record in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from phases.base.verdict import Verdict
from phases.gate.outcome import GateOutcome, RuleOutcome
from phases.ledger import source
from phases.ledger.checkpoint import Draft, canonical_json
from phases.ledger.ledger import Ledger
from tests.ledger import hostile

DraftMaker = Callable[..., Draft]


def git(path: Path, *argv: str) -> str:
    """What the test itself does with git: without the configuration and variables that the toolkit is tried under."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", str(path), "-c", "protocol.file.allow=always", "-c", "core.hooksPath=/dev/null", *argv],
        check=True,
        capture_output=True,
        text=True,
        env={**plain, "GIT_CONFIG_NOSYSTEM": "1"},
    )
    return done.stdout.strip()


def identify(path: Path, name: str = "Ada", mail: str = "ada@example.org") -> None:
    git(path, "config", "user.name", name)
    git(path, "config", "user.email", mail)


@pytest.fixture(autouse=True, params=["plain", "hostile"])
def own_git_configuration(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's git configuration; each is run under none and under the most hostile one."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "gitconfig").write_text('[protocol "file"]\n\tallow = always\n')
    if request.param == "hostile":
        hostile.configure(tmp_path / "hostile", monkeypatch)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    path = tmp_path / "repo"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    identify(path)
    (path / "kernel.py").write_text("x = 1\n")
    git(path, "add", "kernel.py")
    git(path, "commit", "-qm", "Begin")
    if os.environ.get("GIT_DIR"):
        hostile.hooks(path / ".git" / "hooks")  # as init.templateDir leaves them
    return path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    path = tmp_path / "bare.git"
    git(tmp_path, "init", "-q", "--bare", "-b", "main", str(path))
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
