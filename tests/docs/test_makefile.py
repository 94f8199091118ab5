"""`make` on a machine that lacks something: it says what, by apt's name, before it begins anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent.parent
INPUTS = ("Makefile", "pyproject.toml", "constraints.txt", "kernels/verify_attn/pyproject.toml")
TOOLS = ("sh", "make", "cat", "cut", "sha256sum")


@pytest.fixture
def bare(tmp_path):
    """`make setup` in a copy of what it reads, where only the named programs are on PATH."""
    for name in INPUTS:
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / name, tmp_path / "copy" / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    for tool in TOOLS:
        (programs / tool).symlink_to(shutil.which(tool))

    def make(*present, python=""):
        for name in present:
            (programs / name).symlink_to("/bin/true")
        if python:
            (programs / "python3").write_text(
                f'#!/bin/sh\ncase "$2" in {python}) exit 1;; esac\nexec {sys.executable} "$@"\n'
            )
            (programs / "python3").chmod(0o755)
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("MAKE") and key not in ("CXX", "MFLAGS")
        }
        done = subprocess.run(
            [programs / "make", "setup"],
            cwd=tmp_path / "copy",
            env={**environment, "PATH": str(programs)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "copy" / ".venv").exists()
        return done.stderr

    return make


def test_all_that_is_missing_is_named_at_once(bare):
    assert "apt-get install git g++ python3 python3-venv\n" in bare()


def test_only_what_is_missing_is_named(bare):
    assert "apt-get install python3 python3-venv\n" in bare("git", "clang++")


def test_a_python_without_venv_gets_its_own_packages_name(bare):
    assert f"apt-get install g++ python{sys.version_info.major}.{sys.version_info.minor}-venv\n" in bare(
        "git", python="*ensurepip*"
    )


def test_an_old_python_is_refused(bare):
    assert "python3 is older than Python 3.11; name a newer one" in bare("git", "g++", python="*version_info?*")


def test_a_run_says_first_what_it_needs_what_is_here_and_how_long_it_takes():
    """Before the setup, which takes minutes; of another playbook it knows nothing."""
    argv = ["make", "-s", "-C", str(HERE), "before-run"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"}
    first, second, *_ = subprocess.run(
        argv, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert re.search(r"Needs 12 GB of memory \(\d+ available\), 4 GB of disk \(\d+ free\)", first)
    assert re.search(rf"about 12 minutes on 2 quiet cores.*here: {len(os.sched_getaffinity(0))} cores, load \d", second)
    other = subprocess.run([*argv, "PLAYBOOK=mine.yaml"], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout == ""
    order = subprocess.run(
        [*argv[:-1], "-n", "run"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert order.index("Needs 12 GB") < order.index("setting up")
