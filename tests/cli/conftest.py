"""The `phase` command as a user calls it: a process of its own, in a scaffolded repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.run.conftest import Repository


class Phase:
    """Calls `phase` in a directory and keeps exit code, stdout and stderr."""

    def __init__(self, directory):
        self.directory = directory

    def __call__(self, *arguments, code=0, env=None, cwd=None, preexec_fn=None, timeout=400):
        done = subprocess.run(
            [sys.executable, "-m", "phases.cli.main", *map(str, arguments)],
            cwd=cwd or self.directory,
            capture_output=True,
            text=True,
            env={**os.environ, **(env or {})},
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
            preexec_fn=preexec_fn,
        )
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr + done.stdout
        return done

    def json(self, *arguments, **more):
        return json.loads(self(*arguments, "--json", **more).stdout)


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "mine")


@pytest.fixture
def phase(repository):
    return Phase(repository.path)
