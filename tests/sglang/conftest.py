"""Phase 2 with real SGLang servers: the provisioned environment, and a repository with a playbook for each case."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from phases.base.clock import SystemClock
from phases.base.results import Results
from phases.engines.embedded.provision import ServingEnvironment, ensure
from phases.ledger.ledger import Ledger
from phases.playbook.loader import load
from phases.run.runner import Silent
from phases.run.session import Outcome, run_phase

KERNEL = Path(__file__).parents[2] / "kernels" / "verify_attn"
RULES = (
    "candidate_ready, at_least: 1",
    "logprob_error, at_most: 0.0005",
    "wrong_tokens, at_most: 0.01",
    "token_equality, at_least: 1",
    "accept_length_ratio, at_least: 0.98",
    "log_errors, at_most: 0",
)
PROMPTS = [
    "once upon a time",
    '{"name": "lookup", "arguments": {"city": "Pa',
    "def add(left, right):\n    return",
    "Es war einmal",
    "the quick brown fox jumps over the lazy dog. " * 12,
    "从前有一个小模型",
]


@dataclass(frozen=True)
class Run:
    """What one Phase 2 run left."""

    outcome: Outcome
    repo: Path
    results: Results
    gate: dict
    failures: str

    @property
    def work(self) -> Path:
        return next((self.repo / ".phase" / "runs").iterdir()) / "work"

    def measured(self, metric: str):
        return next(row for row in self.results.measurements if row.metric == metric)

    def rule(self, metric: str) -> dict:
        asked = (rule for rule in self.gate["rules"] if rule["rule"] != "phase")  # by the playbook, not the phase's own
        return next(rule for rule in asked if rule["detail"].get("metric") == metric)


@pytest.fixture(scope="session")
def serving_environment() -> ServingEnvironment:
    return ensure(progress=lambda line: None)


@pytest.fixture
def phase_two(tmp_path: Path, serving_environment: ServingEnvironment) -> Callable[..., Run]:
    """Run Phase 2 once in a repository of its own; `sabotage` edits a copy of the kernel that the candidate gets."""

    def run(
        sabotage: Callable[[Path], None] | None = None,
        *,
        candidate: str = "",
        server: str = "",
        clock: SystemClock = SystemClock(),
    ) -> Run:
        repo = tmp_path / "repo"
        repo.mkdir()
        kernel = KERNEL
        if sabotage:
            kernel = tmp_path / "candidate"
            shutil.copytree(KERNEL, kernel, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "*.so"))
            sabotage(kernel)
        (repo / "prompts.json").write_text(
            json.dumps([{"name": f"p{i}", "kind": "any", "text": t} for i, t in enumerate(PROMPTS)])
        )
        (repo / "playbook.yaml").write_text(_playbook(kernel, repo, candidate, server))
        (repo / ".gitignore").write_text(".phase/\n")
        for argv in (
            ["init", "-q"],
            ["config", "user.name", "Test"],
            ["config", "user.email", "test@example.org"],
            ["add", "-A"],
            ["commit", "-q", "-m", "playbook"],
        ):
            subprocess.run(["git", "-C", str(repo), *argv], check=True)
        playbook = load(repo / "playbook.yaml")
        outcome = run_phase(playbook, playbook.phases[0], resume=False, clock=clock, watcher=Silent())
        ledger = Ledger(repo, "checkpoints")
        files = ledger.files(ledger.find(str(outcome.checkpoint["number"])))
        return Run(
            outcome,
            repo,
            Results.from_json(json.loads(files["results.json"])),
            json.loads(files["gate.json"]),
            files.get("failures.txt", b"").decode(),
        )

    return run


def replace(root: Path, name: str, old: str, new: str) -> None:
    """Edit one file of a copied kernel; the text must be there exactly once."""
    path = root / "verify_attn" / name
    text = path.read_text()
    assert text.count(old) == 1, f"{name} holds {text.count(old)} of {old!r}"
    path.write_text(text.replace(old, new))


def processes_of(run: Run) -> list[str]:
    """Command lines of live processes that mention this run's directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(run.repo) in environment and "VERIFY_ATTN_FACTS" in environment:
                found.append(entry.name)
    return found


def _playbook(kernel: Path, repo: Path, candidate: str, server: str) -> str:
    rules = "".join(f"        - {{rule: measurement, metric: {rule}, absent: fail}}\n" for rule in RULES)
    return f"""schema: phasegate/playbook/v1
name: case
kernel: {kernel}/kernel.yaml
phases:
  sglang-integration:
    review: none
    server: {{{server}}}
    incumbent: {{backend: verify_attn_torch, kernel: {KERNEL}/kernel.yaml}}
    candidate: {{{candidate}}}
    output: {{prompts: {repo}/prompts.json, tokens: 16, concurrency: [1, 6]}}
    latency: {{pairs: 4, tokens: 16, prompt_tokens: 600}}
    gate:
      rules:
{rules}"""
