"""A repository with a light phase, and `phase` in it."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Phase
from tests.engine.conftest import Repository


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "mine")


@pytest.fixture
def phase(repository):
    return Phase(repository.path)
