"""Models of other shapes: made once, whole or not at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from phases.base.errors import ServingError
from phases.engines.embedded import models
from phases.engines.embedded.models import ModelShape, ensure_model
from phases.playbook.located import Mistakes, load_text
from phases.playbook.typed import read

TINY = ModelShape(heads=16, layers=2, hidden=32)
HERE = SimpleNamespace(python=Path(sys.executable))


@pytest.fixture
def generator(tmp_path, monkeypatch):
    """Stand-in for the generator, which needs the serving environment: writes its arguments, or fails."""

    def make(code: str) -> None:
        script = tmp_path / "make_model.py"
        script.write_text(code)
        monkeypatch.setattr(models, "GENERATOR", script)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    return make


def test_a_model_is_made_once_for_its_sizes(generator):
    generator("import sys, json, pathlib\npathlib.Path(sys.argv[1], 'target').write_text(json.dumps(sys.argv[2:]))")
    said: list[str] = []
    made = ensure_model(HERE, TINY, said.append)
    assert json.loads((made / "target").read_text()) == ["--heads", "16", "--layers", "2", "--hidden", "32"]
    assert ensure_model(HERE, TINY, said.append) == made and len(said) == 1
    assert ensure_model(HERE, ModelShape(heads=64, layers=2, hidden=32), said.append) != made


def test_a_failed_making_says_why_and_leaves_nothing(generator, tmp_path):
    generator("import sys, pathlib\npathlib.Path(sys.argv[1], 'target').touch()\nsys.exit('no memory left')")
    with pytest.raises(ServingError, match="no memory left"):
        ensure_model(HERE, TINY, lambda line: None)
    assert list((tmp_path / "cache" / "phasegate" / "models").iterdir()) == []


def test_sizes_that_make_no_model_are_a_mistake_of_the_playbook():
    mistakes = Mistakes()
    read(ModelShape, load_text("heads: 8\nhidden: 100\n", "playbook.yaml", mistakes), mistakes)
    assert "playbook.yaml:2" in str(list(mistakes)[0]) and "multiple of 32" in str(list(mistakes)[0])
