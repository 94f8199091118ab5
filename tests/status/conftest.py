"""A repository with a light phase, and `phase` in it."""

from __future__ import annotations

from tests.cli.conftest import phase, repository

__all__ = ["phase", "repository"]  # pytest looks for fixtures here
