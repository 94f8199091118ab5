"""From `phase init` to an approved checkpoint, through a Ctrl-C and a kill -9, with real measurements."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cli.conftest import Phase
from tests.run.conftest import git

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# How fast depends on who else uses the machine: the rule is judged, but on a threshold nothing can miss.
UNTIMED = ("at_least: 1.5", "at_least: 0.001")
PLAYBOOK_EDIT = (
    "      seconds: 1          # time spent on each case and variant",
    "      seconds: 0.2\n      cases: ['4096x64']\n    anchors: rivals.json",
)
RIVALS = {"about": "made up for this test", "rows": [{"case": "4096x64/float32", "microseconds": {"rival": 123.0}}]}


@pytest.fixture
def phase(tmp_path):
    directory = tmp_path / "fast_norm"
    Phase(tmp_path)("init", directory)
    git(directory, "config", "user.name", "Ada")
    git(directory, "config", "user.email", "ada@example.org")
    playbook = directory / "playbook.yaml"
    text = playbook.read_text()
    for edit in (PLAYBOOK_EDIT, UNTIMED):
        assert edit[0] in text
        text = text.replace(*edit)
    playbook.write_text(text)
    (directory / "rivals.json").write_text(json.dumps(RIVALS))
    for arguments in (("add", "-A"), ("commit", "-qm", "rivals")):  # what is not in git cannot be approved
        subprocess.run(["git", "-C", str(directory), *arguments], check=True)
    return Phase(directory)


def _stop_at(phase, words, number, *arguments):
    """Run and send a signal to the toolkit once a line of its output holds `words`; (exit code, stderr)."""
    command = [sys.executable, "-m", "phases.cli.main", "run", "build-parity", *arguments]
    process = subprocess.Popen(
        command, cwd=phase.directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stdout:
        if words in line:
            os.kill(process.pid, number)
            break
    _, stderr = process.communicate(timeout=400)
    return process.returncode, stderr


def test_the_whole_road(phase):
    assert [step["name"] for step in phase.json("plan")["phases"][0]["steps"]][:2] == ["look around", "build"]

    code, stderr = _stop_at(
        phase, "right", signal.SIGINT
    )  # parity is proved, the ceilings are being measured, or nearly
    assert code == 1 and "--resume" in stderr and "Traceback" not in stderr
    assert phase.json("checkpoint", "list") == {"checkpoints": [], "damaged": []}
    status = phase.json("status")
    assert (
        status["unfinished"] == ["fast_norm-build-parity-0001"] and status["running"] is None
    )  # the lock is given back

    code, _ = _stop_at(phase, "ceiling read", signal.SIGKILL, "--resume")
    assert code == -signal.SIGKILL

    done = phase("run", "build-parity", "--resume", code=3, timeout=800)
    assert "took over the lock" in done.stderr and "already done" in done.stdout and "Waiting for review" in done.stdout

    shown = phase.json("gate", "review", "--html", "review.html")
    assert {rule["rule"]: rule["verdict"] for rule in shown["gate"]["rules"]} == {
        "phase": "PASS",
        "parity": "PASS",
        "speedup": "PASS",
    }
    assert "<!doctype html>" in (phase.directory / "review.html").read_text()
    for file in ("report.html", "fast_norm.txt"):  # other kernels' times that the playbook names stand beside ours
        assert "rival" in phase("checkpoint", "show", "--file", file).stdout
    results = json.loads(phase("checkpoint", "show", "--file", "results.json").stdout)
    assert len(results["benchmark"]) == 2 and all(len(row["samples"]) >= 3 for row in results["benchmark"])
    assert "4096x64" in phase("checkpoint", "show").stdout

    phase("gate", "approve", "--digest", shown["checkpoint"]["digest"][:16], "--reason", "faster, and right")
    assert phase.json("status")["phases"][0]["state"] == "approved"
    assert phase.json("run") == {"playbook": "fast_norm", "exit": 0, "runs": []}
    phase("checkpoint", "verify")
    diff = phase.json("checkpoint", "diff", "1", "1")["diff"]
    assert {row["what"] for row in diff["changes"]} == {"unclear"} and all(row["ratio"] == 1 for row in diff["changes"])


def test_a_kernel_that_makes_nans_fails_its_gate_and_says_so(phase):
    contract = phase.directory / "src" / "fast_norm" / "contract.py"
    text = contract.read_text()
    assert "out=y)" in text
    contract.write_text(text.replace("out=y)", "out=y)\n    y[0, 0] = float('nan')"))
    done = phase("run", "build-parity", code=4, timeout=800)
    assert "0001-build-parity-FAIL" in done.stdout and "phase gate review 1" in done.stdout
    rules = {rule["rule"]: rule for rule in phase.json("gate", "review")["gate"]["rules"]}
    assert rules["parity"]["verdict"] == "FAIL" and "vectorised" in rules["parity"]["reason"]
    assert rules["speedup"]["verdict"] != "PASS"  # no number without parity
    results = json.loads(phase("checkpoint", "show", "--file", "results.json").stdout)
    assert results["benchmark"] == []  # wrong parity ends the phase before anything is timed
    assert "nan" in phase("checkpoint", "show", "--file", "failures.txt").stdout.lower()
    refused = phase(
        "gate",
        "approve",
        "--digest",
        phase.json("checkpoint", "list")["checkpoints"][0]["digest"][:16],
        "--reason",
        "please",
        code=1,
    )
    assert "only PASS" in refused.stderr
    assert phase.json("status")["phases"][0]["state"] == "failed"
