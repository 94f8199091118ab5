"""Planning a production phase of the embedded fleet writes nothing: its ports are chosen by what starts it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from phases.base.clock import SystemClock
from phases.base.errors import UsageError
from phases.cli.main import cli
from phases.engines.embedded.fleet import EmbeddedFleetSettings, WorkerKind, fleet_of, was_started
from phases.fleet.live import fleet_settings
from phases.playbook import loader
from phases.run.session import adhoc_run, plan_run
from tests.run.conftest import Repository

SEEN: list[list[int]] = []
PRODUCTION = """
embedded_fleet: {workers: [{count: 2}]}
production: {incumbent: {backend: verify_attn_torch}, candidate: {backend: verify_attn}}
"""
CANARY = """
  tp8-canary:
    review: required
    judge: {metrics: [{metric: e2e, quantile: 0.5, margin: 0.5}]}
  full-rollout:
    review: none
    waves: [{percent: 100}]
    judge: {metrics: [{metric: e2e, quantile: 0.5, margin: 0.5}]}
"""


@pytest.fixture
def playbook(tmp_path, monkeypatch):
    """A light repository whose playbook has an embedded fleet, beside a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = Repository(tmp_path / "mine").path / "playbook.yaml"
    path.write_text(path.read_text().replace("name: light\n", f"name: light\n{PRODUCTION}") + CANARY)
    return path


def _listing(top: Path) -> dict[str, str]:
    """Every path below, and what a file holds; of git's own files only that they are there, since looking may refresh its index."""
    return {
        str(path.relative_to(top)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file() and ".git" not in path.parts
        else ""
        for path in sorted(top.rglob("*"))
    }


@pytest.mark.parametrize(
    "arguments", [("plan",), ("plan", "--json"), ("plan", "tp8-canary"), ("playbook", "check")], ids=" ".join
)
def test_planning_leaves_the_tree_as_it_was(playbook, tmp_path, arguments):
    before = _listing(tmp_path)
    done = CliRunner().invoke(cli, [*arguments, "-p", str(playbook)])
    assert done.exit_code == 0, done.output
    assert _listing(tmp_path) == before and not (tmp_path / "cache").exists()


def test_what_starts_the_fleet_chooses_its_ports_and_a_plan_then_shows_them(playbook):
    loaded = loader.load(playbook)
    section = next(section for section in loaded.phases if section.name == "tp8-canary")
    planned = plan_run(loaded, section, SystemClock())
    assert {host.port for host in fleet_settings(planned).hosts} == {0}
    chosen = fleet_settings(adhoc_run(loaded, "rollback", SystemClock()))
    assert len({host.port for host in chosen.hosts} - {0}) == 2
    assert fleet_settings(planned) == chosen


def remember(run):
    """A phase script that only looks at its workers, as the real ones do before any step runs."""
    SEEN.append([host.port for host in fleet_settings(run).hosts])
    raise UsageError("seen")


def test_the_steps_of_a_run_know_the_ports_from_the_start(playbook):
    repository = Repository.__new__(Repository)
    repository.path = playbook.parent
    SEEN.clear()
    with pytest.raises(UsageError, match="seen"):
        repository.run(script="tests.engines.embedded.test_plan_is_pure:remember")
    assert len(set(SEEN[0]) - {0}) == 2


def test_chosen_ports_are_kept_and_a_further_worker_gets_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, two = (EmbeddedFleetSettings((WorkerKind(count),)) for count in (1, 2))
    assert not was_started(tmp_path, "x")
    first = fleet_of(one, tmp_path, "x", choose_ports=True)
    assert was_started(tmp_path, "x") and fleet_of(one, tmp_path, "x") == first
    assert [host.port for host in fleet_of(two, tmp_path, "x").hosts] == [first.hosts[0].port, 0]
    second = fleet_of(two, tmp_path, "x", choose_ports=True)
    assert second.hosts[0] == first.hosts[0] and second.hosts[1].port not in (0, first.hosts[0].port)
