"""A repository with a playbook whose phase takes milliseconds."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest
from click.testing import CliRunner

from phases.base.clock import SystemClock
from phases.cli.main import cli
from phases.playbook import loader
from phases.run import session
from phases.run.runner import Silent

PLAYBOOK = """
schema: phasegate/playbook/v1
name: light
kernel: kernel.yaml
phases:
  build-parity:
    review: {review}
    gate:
      rules:
        - rule: parity
          variants: [{variant}]
"""


class Repository:
    """A scaffolded kernel in a git repository of its own, and runs of the light phase in it."""

    def __init__(self, path):
        self.path = path
        git(path.parent, "init", "-q", "-b", "main", str(path))
        git(path, "config", "user.name", "Ada")
        git(path, "config", "user.email", "ada@example.org")
        assert CliRunner().invoke(cli, ["init", str(path), "--name", "mine"]).exit_code == 0
        self.write_playbook()
        git(path, "add", ".")
        git(path, "commit", "-qm", "begin")

    def write_playbook(self, review="required", variant="vectorised"):
        (self.path / "playbook.yaml").write_text(PLAYBOOK.format(review=review, variant=variant))

    @property
    def playbook(self):
        return loader.load(self.path / "playbook.yaml")

    def section(self, script="tests.run.light_phase:light_phase"):
        section = self.playbook.phases[0]
        return dataclasses.replace(section, kind=dataclasses.replace(section.kind, script=script))

    def run(
        self,
        resume=False,
        on_record=None,
        script="tests.run.light_phase:light_phase",
        watcher=None,
        notice=lambda line: None,
    ):
        return session.run_phase(
            self.playbook,
            self.section(script),
            resume=resume,
            clock=SystemClock(),
            watcher=watcher or Silent(),
            notice=notice,
            on_record=on_record,
        )

    def git(self, *arguments):
        return git(self.path, *arguments)


def git(directory, *arguments):
    done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "mine")
