"""plan, playbook, kernel survey, and runs without a phase named."""

from __future__ import annotations

import json
import subprocess
import sys

import jsonschema
import pytest

from phases.playbook.located import Mistakes, load_text


def test_plan_shows_steps_and_rules_and_writes_nothing(repository, phase):
    (planned,) = phase.json("plan")["phases"]
    assert [step["name"] for step in planned["steps"]][-2:] == ["judge the gate", "record the checkpoint"]
    text = phase("plan", "build-parity").stdout
    assert "Phase 1, build-parity" in text and "parity (playbook.yaml:" in text and "branch checkpoints" in text
    assert "): variants vectorised, min samples 1, absent " in text  # every parameter, not only the rule's name
    assert "In all: 1 phase, a person is asked after build-parity." in text
    assert not (repository.path / ".phase").exists() and not repository.git("status", "--porcelain")


def test_playbook_check_and_schema(repository, phase):
    assert phase.json("playbook", "check") == {
        "playbook": "light",
        "kernel": "mine",
        "phases": ["build-parity"],
        "mistakes": [],
        "notes": [],
    }
    schema = phase.json("playbook", "schema")
    jsonschema.validate(load_text((repository.path / "playbook.yaml").read_text(), "p", Mistakes()).plain(), schema)
    kernel = phase.json("playbook", "schema", "--kernel")
    jsonschema.validate(load_text((repository.path / "kernel.yaml").read_text(), "k", Mistakes()).plain(), kernel)


def test_playbook_check_lists_the_mistakes_of_both_files(repository, phase):
    (repository.path / "playbook.yaml").write_text(
        (repository.path / "playbook.yaml").read_text().replace("review: required", "architectures: [x86-64-v5]")
    )
    kernel = repository.path / "kernel.yaml"
    kernel.write_text(
        kernel.read_text()
        .replace("float32: 1.0e-5", "float23: 1.0e-5")
        .replace("entry: mine.contract", "entry: mine.contrat")
    )
    done = phase("playbook", "check", "--json", code=2)
    found = json.loads(done.stdout)
    assert found["exit"] == 2 and [(row["file"], type(row["line"])) for row in found["mistakes"]] == [
        ("kernel.yaml", int),
        ("kernel.yaml", int),
        ("playbook.yaml", int),
    ]
    texts = [row["text"] for row in found["mistakes"]]
    assert "no module contrat in" in texts[0] and "did you mean 'contract'" in texts[0]
    assert "no dtype 'float23' (did you mean 'float32'?)" in texts[1] and "no architecture 'x86-64-v5'" in texts[2]
    assert all(f"{row['file']}:{row['line']}: {row['text']}" in done.stderr for row in found["mistakes"])


def test_survey_of_this_environment_gives_reasons(phase):
    found = phase.json("kernel", "survey", "--python", sys.executable, "--gpu", "sm_90", "--page-size", "1")
    ours = next(row for row in found["kernels"] if row["name"] == "verify_attn")
    assert ours["installed"] and ours["tree"]["ok"] and found["sm"] == 90
    assert all(row[what]["why"] for row in found["kernels"] for what in ("tree", "page", "gpu"))
    assert "sm_9x" in phase("kernel", "survey", "--gpu", "sm_9x", code=2).stderr
    assert "/nowhere/python" in phase("kernel", "survey", "--python", "/nowhere/python", code=1).stderr


def test_a_run_of_all_phases_stops_at_the_review_and_then_has_nothing_to_do(repository, phase):
    repository.run()
    answer = phase.json("run", code=3)
    assert answer["exit"] == 3 and answer["runs"] == []
    digest = phase.json("checkpoint", "list")["checkpoints"][0]["digest"]
    phase("gate", "approve", "--digest", digest[:16], "--reason", "good")
    done = phase("run")
    assert "skipped" in done.stderr and "nothing to do" in done.stdout


def test_unlock_removes_exactly_the_lock_it_showed(repository, phase):
    from phases.base.clock import SystemClock
    from phases.run.lock import Lock

    lock = Lock(repository.path / ".phase", "light", SystemClock())
    lock.acquire("phase run build-parity")
    assert "give --yes" in phase("unlock", code=6).stderr and lock.owner()
    assert phase.json("unlock", "--yes")["locks"][0]["state"] == "removed"
    assert lock.owner() is None


def test_outputs_nobody_takes_end_without_a_traceback(phase):
    command = f"{sys.executable} -m phases.cli.main"
    for line in (
        "status --json >&-",
        "status >&-",
        "gate review <&- >&-",
        "status --json >/dev/full",
        "checkpoint show nope --json | true",
        "checkpoint show nope --json 2>&- >&-",
    ):
        done = subprocess.run(
            ["bash", "-c", f"{command} {line}"], cwd=phase.directory, capture_output=True, text=True, check=False
        )
        assert not any(word in done.stderr for word in ("Traceback", "traceback", "Exception ignored")), (
            line,
            done.stderr,
        )


def test_nohup_is_respected():
    code = "import os, signal; from phases.run.stop import install; install(); os.kill(os.getpid(), signal.SIGHUP); print('alive')"
    done = subprocess.run(["nohup", sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n"


def test_a_review_page_in_a_locale_of_ascii(repository, phase):
    repository.run()
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    phase("gate", "review", "--html", "review.html", env=ascii_only)
    assert "…" in (repository.path / "review.html").read_text(encoding="utf-8")


def test_a_lost_approval_is_not_taken_for_one_that_was_never_given(repository, phase):
    digest = repository.run().checkpoint["digest"]
    phase("gate", "approve", "--digest", digest[:16], "--reason", "good")
    assert "skipped" in phase("run").stderr
    whole = repository.git("rev-parse", "checkpoints")
    repository.git("update-ref", "refs/heads/checkpoints", "checkpoints~1")
    assert "checkpoint/0001-approve-" in phase("checkpoint", "verify", code=1).stdout
    assert "set back" in phase("run", code=1).stderr
    repository.git("update-ref", "refs/heads/checkpoints", whole)
    phase("run")


def test_one_damaged_checkpoint_does_not_stop_list_show_and_verify(repository, phase):
    name = repository.run().checkpoint["name"]
    repository.run()
    repository.git("switch", "-q", "checkpoints")
    (repository.path / "checkpoints" / name / "manifest.json").write_text("{")
    repository.git("commit", "-qam", "Damage it")
    repository.git("switch", "-q", "main")
    listed = phase("checkpoint", "list", code=1)
    rows = listed.stdout.splitlines()
    assert len(rows) == 2 and rows[1].startswith("2 ")
    (line,) = listed.stderr.splitlines()
    assert f"{name} is damaged: its manifest is not JSON" in line and "phase checkpoint verify 1" in line
    recorded = line.rpartition("what was recorded is `git ")[2].partition("`")[0]
    assert json.loads(repository.git(*recorded.split()))["number"] == 1
    as_json = phase.json("checkpoint", "list", code=1)
    assert [row["number"] for row in as_json["checkpoints"]] == [2] and [row in line for row in as_json["damaged"]] == [
        True
    ]
    assert f"ALTERED  {name}/manifest.json: is not JSON" in phase("checkpoint", "verify", code=1).stdout
    assert f"{name}/manifest.json: is not JSON" in phase("checkpoint", "verify", "1", code=1).stdout
    assert phase.json("checkpoint", "show", "2")["number"] == 2
    assert "is damaged" in phase("checkpoint", "show", "1", code=1).stderr


def test_no_word_of_others_gives_the_terminal_orders(phase):
    stderr = phase("status", "-p", "\x1b[2J\x1b]0;owned\x07.yaml", code=2).stderr
    assert "owned" in stderr and "\x1b" not in stderr and "\x07" not in stderr


def test_nor_does_what_a_running_step_says(capsys):
    from phases.cli.live_view import RunningStep
    from phases.cli.watchers import Lines

    Lines(sys.stdout).step_progress(None, "a host said \x1b[2J")
    running = RunningStep("label", "summary")
    running.say("a host said \x1b[2J")
    said = capsys.readouterr().out + "".join(running.lines)
    assert said.count("a host said") == 2 and "\x1b" not in said


@pytest.mark.parametrize("name", ["state.txt", "state", "state.prom.tmp", ".prom"])
def test_a_textfile_that_node_exporter_would_not_read_is_refused_before_anything_is_written(phase, tmp_path, name):
    assert (
        f"--textfile {tmp_path / name} does not end in .prom"
        in phase("status", "--no-fleet", "--textfile", tmp_path / name, code=2).stderr
    )
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("manifest.json", None),
        ("results.json", b"null"),
        ("results.json", b"[" * 100_000),
        ("gate.json", b'{"rules": [{"verdict": "PASS", "estimate": [1]}]}'),
        ("\udcff.txt", b"\xff"),
    ],
)
def test_a_damaged_checkpoint_is_named_by_whatever_shows_it(repository, phase, path, content):
    name = repository.run().checkpoint["name"]
    repository.git("switch", "-q", "checkpoints")
    file = repository.path / "checkpoints" / name / path
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "facts": None})
    ) if content is None else file.write_bytes(content)
    repository.git("add", ".")
    repository.git("commit", "-qm", "Damage it")
    repository.git("switch", "-q", "main")
    assert f"{name}/{'SHA256SUMS' if content else path}" in phase("checkpoint", "verify", "1", code=1).stdout
    said = phase("report", "1", "--to", "page.html", code=1).stderr
    assert "internal error" not in said and "checkpoint verify" in said and not (repository.path / "page.html").exists()


def test_plan_says_what_a_run_would_skip(repository, phase):
    repository.write_playbook(review="none")
    repository.git("commit", "-qam", "no review")
    repository.run()
    said = phase("plan").stdout.strip().splitlines()[-1]
    assert (
        said == "In all: 1 phase, nobody is asked. `phase run` skips build-parity (passed with 0001-build-parity-PASS)."
    )
