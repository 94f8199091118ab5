"""The GitHub Actions example: rights, pins, and its scripts run as a runner would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.run.conftest import Repository, git

FILE = Path(__file__).parents[2] / "examples" / "github-actions" / "phase-review.yml"
WORKFLOW = yaml.safe_load(FILE.read_text())
JOBS = WORKFLOW["jobs"]
STEPS = [(job, step) for job, body in JOBS.items() for step in body["steps"]]

PLAYBOOK = """
schema: phasegate/playbook/v1
name: light
kernel: kernel.yaml
phases:
  build-parity:
    review: required
    benchmark: {cases: ["4096x64*"], seconds: 0.05, min_samples: 3, max_samples: 3}
    gate:
      rules:
        - {rule: parity, variants: [vectorised]}
"""


def test_only_the_job_that_runs_no_foreign_code_may_write():
    assert WORKFLOW["permissions"] == {} and list(WORKFLOW[True]) == ["pull_request"]  # YAML 1.1 reads `on` as true
    assert JOBS["review"]["permissions"] == {"contents": "read"} and JOBS["comment"]["permissions"] == {
        "pull-requests": "write"
    }
    checkout = next(step for _, step in STEPS if "actions/checkout@" in step.get("uses", ""))
    assert checkout["with"]["persist-credentials"] is False
    comment = "\n".join(step.get("run", "") + step.get("uses", "") for step in JOBS["comment"]["steps"])
    assert not re.search(r"checkout|pip|phase run|phase gate", comment)
    assert all(body["timeout-minutes"] <= 30 for body in JOBS.values())


def test_every_action_is_pinned_by_commit_and_says_its_release():
    used = re.findall(r"uses: (\S+?)@(\S+)(.*)", FILE.read_text())
    assert len(used) == 4
    for name, commit, comment in used:
        assert re.fullmatch(r"[0-9a-f]{40}", commit) and re.fullmatch(r"  # v\d+\.\d+\.\d+", comment), name


def test_nothing_of_a_pull_request_is_pasted_into_a_script():
    for job, step in STEPS:
        assert "${{" not in step.get("run", ""), (job, step.get("name"))


@pytest.mark.parametrize("script", [step["run"] for _, step in STEPS if "run" in step])
def test_the_scripts_are_shell(script):
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def _run(job, name, directory, **environment):
    """One step, as a runner starts it: bash -e, files for outputs and summary."""
    script = next(step["run"] for step in JOBS[job]["steps"] if step.get("name") == name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {
        **os.environ,
        "PATH": path,
        "PHASE_PLAYBOOK": "playbook.yaml",
        "GITHUB_OUTPUT": "output",
        "GITHUB_STEP_SUMMARY": "summary.md",
        **environment,
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_runner_posts_what_the_gate_said(tmp_path):
    repository = Repository(tmp_path / "mine")
    (repository.path / "playbook.yaml").write_text(PLAYBOOK)
    git(repository.path, "commit", "-qam", "a playbook for runners")
    done = _run("review", "phase 1", repository.path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (repository.path / "output").read_text() == "code=3\n" and (
        repository.path / "review" / "exit-code"
    ).read_text() == "3\n"
    assert (
        "## Phase 1, exit" in (repository.path / "summary.md").read_text()
        and "\nRules\n" in (repository.path / "summary.md").read_text()
    )
    assert (
        "<!doctype html>" in (repository.path / "review" / "review.html").read_text()
        and len(list((repository.path / "review").glob("0001-build-parity-*"))) == 1
    )
    assert [
        _run("review", "the gate decides", repository.path, CODE=code).returncode
        for code in ("0", "3", "4", "5", "1", "")
    ] == [0, 0, 1, 1, 1, 1]
    assert _run("comment", "compose", repository.path, RUN="https://example.org/run").returncode == 0
    comment = (repository.path / "comment.md").read_text()
    assert "exit 3" in comment and "0001-build-parity-" in comment and "https://example.org/run" in comment


def test_what_a_pull_request_writes_stays_text(tmp_path):
    (tmp_path / "review").mkdir()
    (tmp_path / "review" / "exit-code").write_text("0$(touch pwned)`x`\n")
    (tmp_path / "review" / "review.txt").write_bytes(
        b"`````\n``\0``\n@everyone `````` [x](javascript:1) \xff\xfe\n" + b"`" * 200000
    )
    done = _run("comment", "compose", tmp_path, RUN="https://example.org/run")
    assert done.returncode == 0, done.stderr
    comment = (tmp_path / "comment.md").read_text()
    assert (
        len(comment) < 65536
        and comment.count("````") == 2
        and "\0" not in comment
        and not (tmp_path / "pwned").exists()
    )
    assert comment.splitlines()[0] == "### Phase 1 of this pull request, exit 0"


def test_a_run_that_ends_before_its_gate_shows_no_older_review(tmp_path):
    repository = Repository(tmp_path / "mine")
    repository.run()
    (repository.path / "playbook.yaml").write_text("phases: [")
    assert _run("review", "phase 1", repository.path).returncode == 0
    assert (repository.path / "review" / "review.txt").read_text().startswith("Phase 1 ended before its gate (exit 2)")
