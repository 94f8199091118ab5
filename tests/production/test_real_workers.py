"""Phase 4 and a rollback by hand on real SGLang workers (two of one rank, on the CPU) behind a real sglang-router, under load.

Margins and alpha are as loose as they go: what is tested is what becomes of production, not how fast this machine is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phases.engines.embedded.provision import ensure

pytestmark = [pytest.mark.sglang, pytest.mark.fleet, pytest.mark.slow, pytest.mark.timeout(1500)]

KERNEL = Path(__file__).parents[2] / "kernels" / "verify_attn"
PLAYBOOK = f"""\
schema: phasegate/playbook/v1
name: pair
kernel: {KERNEL}/kernel.yaml
embedded_fleet:
  workers: [{{count: 2}}]
production:
  incumbent: {{backend: verify_attn_torch}}
  candidate: {{backend: verify_attn}}
  min_available: {{count: 1}}
  load: {{rate: 3, tokens: 4}}
watch:
  interval: 20
  judge: {{metrics: [{{metric: e2e, quantile: 0.5, margin: 3}}], window: 3, bake: 6, deadline: 30, min_samples: 5}}
phases:
  tp8-canary:
    review: none
    allow_yes: true
    canary: {{count: 1}}
    control: {{count: 1}}
    share_tolerance: 1
    judge: &judge
      metrics: [{{metric: e2e, quantile: 0.5, margin: 3}}]
      alpha: 0.2
      probes: 3
      window: 3
      bake: 6
      deadline: 240
      min_samples: 10
      error_tolerance: 0.5
  full-rollout:
    review: none
    allow_yes: true
    waves: [{{count: 1}}, {{percent: 100}}]
    soak: 20
    judge: *judge
    gate:
      rules:
        - {{rule: measurement, metric: failed_requests, at_most: 0, absent: fail}}
"""


@dataclass(frozen=True)
class Repository:
    """A repository with the playbook, and `phase` in it as a process of its own."""

    path: Path

    def phase(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "phases.cli.main", *arguments]
        return subprocess.run(argv, cwd=self.path, capture_output=True, text=True, timeout=800, check=False)

    def json(self, *arguments: str, code: int = 0) -> Any:
        done = self.phase(*arguments, "--json")
        assert done.returncode == code, (done.returncode, done.stdout[-3000:], done.stderr[-3000:])
        return json.loads(done.stdout)

    def workers(self) -> list[dict[str, Any]]:
        return list(self.json("fleet", "status")["workers"])

    def file(self, checkpoint: str, name: str) -> str:
        done = self.phase("checkpoint", "show", checkpoint, "--file", name)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    ensure(progress=lambda line: None)
    path = tmp_path_factory.mktemp("pair")
    (path / "playbook.yaml").write_text(PLAYBOOK)
    (path / ".gitignore").write_text(".phase/\n")
    for argv in (
        ["init", "-q"],
        ["config", "user.name", "Test"],
        ["config", "user.email", "test@example.org"],
        ["add", "-A"],
        ["commit", "-qm", "playbook"],
    ):
        subprocess.run(["git", "-C", str(path), *argv], check=True)
    found = Repository(path)
    try:
        yield found
    finally:
        found.phase("fleet", "down", "--purge")


def test_a_rollout_ends_on_the_candidate_and_a_rollback_on_the_release_before_without_a_failed_request(
    repository: Repository,
) -> None:
    repository.json("run", "tp8-canary", "--yes")  # whose control the soak and the watch are held against
    run = repository.json("run", "full-rollout", "--yes")["runs"][0]
    results = json.loads(repository.file(run["checkpoint"]["name"], "results.json"))
    measured = {row["metric"]: row for row in results["measurements"]}
    digests = {state["current"] for state in repository.workers()}
    assert run["verdict"] == "PASS" and digests == {results["facts"]["end"]["last_good"]}
    assert all(
        state["last_good"] == state["current"] and state["serving"] and state["in_service"] and not state["lease"]
        for state in repository.workers()
    )
    assert measured["failed_requests"]["estimate"] == 0 and measured["failed_requests"]["n"] > 50
    assert {share["during"] for share in results["facts"]["load"]} == {"wave 1", "wave 2", "soak"}

    watched = repository.json("watch", "--once")
    assert watched["verdict"] == "PASS", watched

    rolled = repository.json("rollback", "--yes", "--reason", "the test wants the release before")
    (before,) = {state["current"] for state in repository.workers()}
    assert before == results["facts"]["end"]["previous"] and before not in digests
    events = {event["event"]: event["at"] for event in rolled["rollback"]["timeline"]}
    assert (
        rolled["rollback"]["verified"]
        and events["detected"] <= events["traffic safe"] <= events["restored"] <= events["verified"]
    )
    assert "verified" in repository.file(rolled["checkpoint"]["name"], "rollback.txt")

    again = repository.json("rollback", "--yes", "--reason", "twice does not bring the candidate back")
    assert again["rollback"]["moved"] == [] and {state["current"] for state in repository.workers()} == {before}
