"""The reference pages are what the reader and the command line say today."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phases.playbook import loader
from tests.docs.commands import HERE

FOLDER = HERE / "docs" / "reference"


def _generated(page: str) -> str:
    """In a process of its own: click remembers on a command what an earlier test asked of it."""
    code = f"import runpy; print(runpy.run_path({str(FOLDER / 'generate.py')!r})['PAGES'][{page!r}](), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", ["playbook.md", "cli.md"])
def test_the_page_is_current(page):
    assert (FOLDER / page).read_text(encoding="utf-8") == _generated(page), "run `make reference`"


def test_every_section_of_the_schema_stands_on_the_page():
    text = (FOLDER / "playbook.md").read_text(encoding="utf-8")
    for name in loader.schema()["properties"]:
        assert f"`{name}`" in text or f"`{name}." in text
    assert "`hosts[].address`" in text and "`judge.metrics[].margin`" in text
