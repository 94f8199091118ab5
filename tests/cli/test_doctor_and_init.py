"""`phase doctor` and `phase init`, and what a terminal gets to see."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys

import pytest

from phases.base.clock import SystemClock
from phases.base.errors import BuildError
from phases.base.findings import Health
from phases.cli.watchers import Lines, Live
from phases.run.checks import check_load
from tests.cli.conftest import Phase
from tests.run.conftest import git


def test_a_healthy_machine_has_no_problem_and_every_warning_a_cure(phase):
    answer = phase.json("doctor")
    assert answer["problems"] == 0
    names = {row["name"] for row in answer["findings"]}
    assert {"python", "git", "identity", "torch", "disk", "C++ compiler", "nvcc", "state", "ledger", "remote"} <= names
    assert all(row["cure"] for row in answer["findings"] if row["health"] != "ok")


def test_each_problem_has_its_cure_and_the_exit_code_tells(repository, phase, tmp_path):
    path = repository.path / "playbook.yaml"
    path.write_text(
        path.read_text()
        .replace("review: required", "review: required\n    architectures: [x86-64-v3, sm_90]")
        .replace("name: light", "name: light\nledger: {remote: nowhere, branch: main}")
    )
    environment = {"CXX": "/nowhere/g++", "NVCC": "/nowhere/nvcc"}
    shown = phase("doctor", code=1, env=environment).stdout
    for words in ("/nowhere/g++", "/nowhere/nvcc", "builds sm_90", "nowhere:", "git remote -v", "checked out"):
        assert words in shown.replace("\n", " ") or words in shown, words

    findings = json.loads(phase("doctor", "--json", code=1, env=environment).stdout)["findings"]
    problems = {row["name"]: row for row in findings if row["health"] == "problem"}
    assert {"C++ compiler", "nvcc", "builds x86-64-v3", "builds sm_90", "remote", "ledger"} <= set(problems)
    assert all(row["cure"] for row in problems.values())


def test_a_remote_that_answers(repository, phase, tmp_path):
    git(tmp_path, "init", "-q", "--bare", "origin.git")
    repository.git("remote", "add", "origin", str(tmp_path / "origin.git"))
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("name: light", "name: light\nledger: {remote: origin}"))
    assert [row["health"] for row in phase.json("doctor")["findings"] if row["name"] == "remote"] == ["ok"]
    outcome = repository.run()
    heads = git(tmp_path / "origin.git", "for-each-ref", "--format=%(refname)").split()
    assert heads == ["refs/heads/checkpoints", f"refs/tags/checkpoint/{outcome.checkpoint['name']}"]


def test_init_overwrites_nothing(tmp_path):
    call = Phase(tmp_path)
    assert call.json("init", "mine")["git_init"] is True
    mine = tmp_path / "mine" / "src" / "mine" / "contract.py"
    mine.write_text("precious")
    assert "already holds" in call("init", "mine", code=2).stderr
    assert mine.read_text() == "precious"


def test_a_page_of_a_report_leaves_the_tree_clean_and_an_own_gitignore_stays(tmp_path):
    call = Phase(tmp_path)
    call("init", "mine")
    (tmp_path / "mine" / "0001-build-parity-PASS.html").write_text("page")
    assert "0001" not in git(tmp_path / "mine", "status", "--porcelain", "--untracked-files=all")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".gitignore").write_text("precious\n")
    assert (
        ".gitignore" not in call.json("init", "other")["files"]
        and (tmp_path / "other" / ".gitignore").read_text() == "precious\n"
    )


@pytest.mark.parametrize("name", ["9lives", "class", "a-b", "../x", "Ünï"])
def test_init_refuses_names_python_cannot_import(tmp_path, name):
    assert "cannot be the name" in Phase(tmp_path)("init", "d", "--name", name, code=2).stderr
    assert not (tmp_path / "d").exists()


def test_init_inside_a_repository_makes_no_other(tmp_path):
    git(tmp_path, "init", "-q")
    assert Phase(tmp_path).json("init", "kernels/mine")["git_init"] is False
    assert not (tmp_path / "kernels" / "mine" / ".git").exists()


def _in_terminal(directory, environment, *arguments):
    """What a terminal of 100 columns receives."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "phases.cli.main", *arguments],
        cwd=directory,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **environment},
        close_fds=True,
    )
    os.close(follower)
    received = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:
            break
        if not chunk:
            break
        received += chunk
    process.wait(200)
    os.close(leader)
    return received.decode()


def test_colour_in_a_terminal_and_none_when_it_is_not_wanted(repository):
    repository.run()
    assert "\x1b[33m" in _in_terminal(repository.path, {}, "status")
    plain = _in_terminal(repository.path, {"NO_COLOR": "1"}, "status")
    assert "waiting for review" in plain and "\x1b[3" not in plain


def test_lines_tell_the_whole_run(repository):
    out = io.StringIO()
    repository.run(watcher=Lines(out))
    text = out.getvalue()
    for words in (
        "light-build-parity-0001",
        "[2/5] prove: prove",
        "error 0.",
        "[5/5] record the checkpoint",
        "waiting for review (exit 3)",
    ):
        assert words in text
    assert "\x1b" not in text


def test_live_survives_every_event(repository, capsys):
    repository.run(watcher=Live())
    with pytest.raises(KeyError):
        repository.run(watcher=Live(), script="tests.run.light_phase:failing_phase")
    shown = capsys.readouterr().out
    assert "✓ [2/5] prove" in shown and "✗ [2/4] fail" in shown and "waiting for review" in shown


def test_live_shows_brackets_as_they_are(capsys):
    from phases.run.steps import Step

    live = Live()
    step = Step("build [sm_90]", "compile [x]", lambda context: {})
    live.run_started("r", [step])
    live.step_started(step, 1)
    live.step_progress(step, "[red]not markup[/blue]")
    live.step_failed(step, BuildError("x"))
    assert "build [sm_90]" in capsys.readouterr().out


def test_a_reader_that_goes_away_does_not_stop_the_run(repository):
    leaver, kept = os.pipe()
    os.close(leaver)
    with os.fdopen(kept, "w") as out:
        assert repository.run(watcher=Lines(out)).checkpoint["number"] == 1
        try:
            out.close()
        except BrokenPipeError:
            pass


def test_the_device_the_playbook_names_comes_first_and_a_load_is_told(repository, phase):
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("review: required", "review: required\n    device: cuda"))
    rows = json.loads(phase("doctor", "--json", code=1, env={"CUDA_VISIBLE_DEVICES": ""}).stdout)["findings"]
    assert (
        rows[0]["name"] == "device" and rows[0]["health"] == "problem" and "the playbook says cuda" in rows[0]["found"]
    )
    assert "device: cpu" in rows[0]["cure"] and rows[1]["name"] == "load"
    refused = phase("run", code=1, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (
        "the playbook says `device: cuda`" in refused.stderr and "2/" not in refused.stdout
    )  # the first step ended it


class Burning(SystemClock):
    """Sleeps while something that is not ours keeps every core busy."""

    def sleep(self, seconds):
        code = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
        started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count())]
        super().sleep(seconds)
        BURNT.extend(started)  # waited for after the look: until then their time is nobody of ours


BURNT: list = []


def test_a_load_that_spoils_timings_is_a_warning():
    (found,) = check_load(Burning())
    for process in BURNT:
        process.wait()
    assert found.health is Health.WARNING and "timings will be spoilt: others use" in found.found and found.cure
