"""The second try, in a pytest of its own: seen in the log, with a fixture made anew and a time of its own, and no way to pass what fails twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import itertools, time
import pytest

MADE, ENDED, calls = itertools.count(1), [], {}

def count(name):
    calls[name] = calls.get(name, 0) + 1
    return calls[name]

@pytest.fixture(scope="module")
def server():
    yield (number := next(MADE))
    ENDED.append(number)

@pytest.fixture(scope="module")
def fleet(server):
    yield server
    assert server not in ENDED  # whoever uses it ends first

def test_uses_the_first(fleet):
    assert fleet == 1

def test_fails_once(fleet):
    assert count("once") == fleet == 2
    assert ENDED == [1]

def test_the_next_finds_the_new_one(fleet):
    assert fleet == 2 and ENDED == [1]

@pytest.mark.timeout(3)
def test_hangs_once():
    if count("hangs") == 1:
        time.sleep(60)

@pytest.mark.timeout(3)
def test_hangs_always():
    time.sleep(60)

def test_fails_always(fleet):
    count("always")
    assert False

@pytest.fixture(scope="module")
def late():
    if count("late") == 1:
        raise OSError("not up yet")
    return 1

def test_a_fixture_that_fails_once(late):
    assert late == 1

def test_counts(fleet):
    assert calls == {"once": 2, "hangs": 2, "always": 2, "late": 2} and fleet == 3 and ENDED == [1, 2]
"""
SETTINGS = "[pytest]\naddopts = -raR --rerun-show-tracebacks --strict-markers\ntimeout = 60\n"
REPO = Path(__file__).parents[1]


def test_once_and_never_silently(tmp_path: Path) -> None:
    pytest.importorskip("pytest_rerunfailures")
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "conftest.py").write_text("from tests.second_try import *\n")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
        "PYTHONPATH": str(REPO),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = set(done.stdout.splitlines())
    ended = {
        word: {line.split("::")[1].split(" ")[0] for line in lines if line.startswith(f"{word} ")}
        for word in ("RERUN", "FAILED", "ERROR")
    }
    assert ended == {
        "RERUN": {
            "test_a_fixture_that_fails_once",
            "test_fails_always",
            "test_fails_once",
            "test_hangs_always",
            "test_hangs_once",
        },
        "FAILED": {"test_fails_always", "test_hangs_always"},
        "ERROR": set(),
    }, done.stdout
    assert "assert 1 == 2" in done.stdout[done.stdout.index("rerun test summary") :]  # what the first try failed of
    assert done.returncode == 1 and "2 failed, 6 passed, 5 rerun" in done.stdout, done.stdout
