"""The reference pages are what the reader and the command line say today."""

from __future__ import annotations

import importlib.util

import pytest

from phases.playbook import loader
from tests.docs.commands import HERE

FOLDER = HERE / "docs" / "reference"


def _generator():
    spec = importlib.util.spec_from_file_location("reference_generator", FOLDER / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["playbook.md", "cli.md"])
def test_the_page_is_current(page):
    assert (FOLDER / page).read_text(encoding="utf-8") == _generator().PAGES[page](), "run `make reference`"


def test_every_section_of_the_schema_stands_on_the_page():
    text = (FOLDER / "playbook.md").read_text(encoding="utf-8")
    for name in loader.schema()["properties"]:
        assert f"`{name}`" in text or f"`{name}." in text
    assert "`hosts[].address`" in text and "`judge.metrics[].margin`" in text
