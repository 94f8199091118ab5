"""Every playbook that comes with the toolkit: no mistakes, and a plan, which connects to nobody."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from phases.cli.main import cli
from phases.playbook.loader import load

PLAYBOOKS = sorted((Path(__file__).parents[2] / "playbooks").glob("*.yaml"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*arguments: object) -> None:
        raise AssertionError("a plan connects to nobody")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("path", PLAYBOOKS, ids=lambda path: path.stem)
def test_it_loads_and_plans(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checked = CliRunner().invoke(cli, ["playbook", "check", "-p", str(path)])
    assert checked.exit_code == 0 and "no mistakes" in checked.output, checked.output
    for section in load(path).phases:
        planned = CliRunner().invoke(cli, ["plan", section.name, "-p", str(path)])
        assert planned.exit_code == 0 and f"Phase {section.kind.number}, {section.name}" in planned.output, (
            planned.output
        )
        assert json.loads(CliRunner().invoke(cli, ["plan", section.name, "-p", str(path), "--json"]).output)


@pytest.mark.parametrize("path", PLAYBOOKS, ids=lambda path: path.stem)
def test_it_is_called_after_its_file(path):
    """Locks, runs and fleets carry the name: two playbooks of one name would share them."""
    assert load(path).name == path.stem


def test_all_are_found():
    assert {"local", "local-regression", "local-switchback", "local-tp8", "rtx-pro-6000-tp8", "h200"} <= {
        path.stem for path in PLAYBOOKS
    }
