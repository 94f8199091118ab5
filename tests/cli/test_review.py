"""Status, review, approval and the checkpoint commands on a recorded checkpoint."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from phases.cli import watchers
from phases.cli.main import cli
from phases.run import session
from tests.run.light_phase import light_phase


@pytest.fixture
def recorded(repository, phase):
    repository.run()
    return phase.json("checkpoint", "list")["checkpoints"][0]


def test_status_before_and_after(phase, repository):
    assert [row["state"] for row in phase.json("status")["phases"]] == ["not run"]
    repository.run()
    (row,) = phase.json("status")["phases"]
    assert row["state"] == "waiting for review" and row["checkpoint"]["name"] == "0001-build-parity-PASS"
    assert "waiting for review" in phase("status").stdout


def test_review_shows_each_rules_numbers(phase, recorded):
    shown = phase.json("gate", "review")
    rule = next(
        row for row in shown["gate"]["rules"] if row["rule"] != "phase"
    )  # by the playbook, after the phase's own
    assert rule["verdict"] == "PASS" and rule["threshold"] == 1.0 and 0 <= rule["estimate"] <= 1
    text = phase("gate", "review").stdout
    assert (
        recorded["digest"][:16] in text
        and f"{rule['estimate']:.4g}" in text
        and "estimate" in text
        and "threshold" in text
    )


def test_approval_is_bound_to_the_digest_and_shows_in_status(phase, recorded):
    refused = phase("gate", "approve", "--digest", "0" * 16, "--reason", "good", code=1)
    assert "digest" in refused.stderr and "gate review" in refused.stderr
    assert "--digest" in phase("gate", "approve", "--reason", "good", code=2).stderr
    assert "--reason" in phase("gate", "approve", "--digest", recorded["digest"][:16], code=2).stderr
    assert phase.json("status")["phases"][0]["state"] == "waiting for review"
    phase("gate", "approve", "--digest", recorded["digest"][:16], "--reason", "4x everywhere")
    (row,) = phase.json("status")["phases"]
    assert row["state"] == "approved"
    assert row["approvals"][0]["person"] == "Ada <ada@example.org>" and row["approvals"][0]["reason"] == "4x everywhere"
    assert row["approvals"][0]["digest"] == recorded["digest"]
    assert "4x everywhere" in phase("status").stdout


def test_rejection_closes_the_gate(phase, recorded):
    phase("gate", "reject", "1", "--digest", recorded["digest"][:16], "--reason", "slower at q65")
    assert phase.json("status")["phases"][0]["state"] == "rejected"


def test_a_no_is_final_for_that_checkpoint(phase, recorded):
    digest = ("--digest", recorded["digest"][:16])
    phase("gate", "reject", *digest, "--reason", "slower at q65")
    for person in ("Ada", "Bob"):
        env = {"GIT_COMMITTER_NAME": person, "GIT_COMMITTER_EMAIL": f"{person}@example.org"}
        refused = phase("gate", "approve", *digest, "--reason", "changed my mind", code=1, env=env).stderr
        assert "slower at q65" in refused and "final" in refused and "run build-parity again" in refused
    (row,) = phase.json("status")["phases"]
    assert row["state"] == "rejected" and [made["decision"] for made in row["approvals"]] == ["reject"]


def test_a_yes_may_still_be_taken_back(phase, recorded):
    digest = ("--digest", recorded["digest"][:16])
    phase("gate", "approve", *digest, "--reason", "good")
    phase("gate", "reject", *digest, "--reason", "not that good")
    assert phase.json("status")["phases"][0]["state"] == "rejected"
    assert "final" in phase("gate", "approve", *digest, "--reason", "good again", code=1).stderr


def test_four_eyes_refuses_the_authors_own_approval(phase, repository, recorded):
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("review: required", "review: required\n    four_eyes: true"))
    arguments = ("gate", "approve", "--digest", recorded["digest"][:16], "--reason", "good")
    assert "four eyes" in phase(*arguments, code=1).stderr
    phase(*arguments, env={"GIT_COMMITTER_NAME": "Bob", "GIT_COMMITTER_EMAIL": "bob@example.org"})
    assert phase.json("status")["phases"][0]["state"] == "approved"


def test_yes_approves_only_where_the_playbook_allows_it(phase, repository, recorded):
    assert "Waiting for review" in phase("run", "--yes", code=3).stdout
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("review: required", "review: required\n    allow_yes: true"))
    assert "Waiting for review" in phase("run", code=3).stdout
    approved = phase("run", "--yes").stderr
    assert (
        "0001-build-parity-PASS: approved by --yes for Ada <ada@example.org>; branch checkpoints records that nobody looked"
        in approved
    )
    assert re.search(r"^build-parity +approved .* nobody$", phase("status").stdout, re.MULTILINE)
    (row,) = phase.json("status")["phases"]
    assert row["state"] == "approved" and "without anybody looking" in row["approvals"][0]["reason"]
    assert "nothing to do" in phase("run", "--yes").stdout and len(phase.json("status")["phases"][0]["approvals"]) == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_that_yes_approves_waits_for_nobody(repository, monkeypatch, terminal):
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("review: required", "review: required\n    allow_yes: true"))
    repository.git("commit", "-qam", "allow --yes")  # --yes approves only what is in git
    monkeypatch.chdir(repository.path)
    monkeypatch.setattr(session, "load_object", lambda reference: light_phase)
    monkeypatch.setattr(watchers, "is_terminal", lambda: terminal)
    done = CliRunner().invoke(cli, ["run", "--yes"])
    assert (
        done.exit_code == 0
        and "passed; --yes approves it" in done.output
        and "waiting" not in done.output.lower()
        and "exit 3" not in done.output
    )
    assert done.output.rstrip().endswith("), approved by --yes")


def test_json_of_a_run_names_who_yes_approved_for(repository, monkeypatch):
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("review: required", "review: required\n    allow_yes: true"))
    repository.git("commit", "-qam", "allow --yes")  # --yes approves only what is in git
    monkeypatch.chdir(repository.path)
    monkeypatch.setattr(session, "load_object", lambda reference: light_phase)
    shown = json.loads(CliRunner().invoke(cli, ["run", "build-parity", "--json"]).stdout)
    assert (shown["exit"], shown["runs"][0]["exit"], shown["runs"][0]["approved_by_yes"]) == (3, 3, None)
    shown = json.loads(CliRunner().invoke(cli, ["run", "build-parity", "--yes", "--json"]).stdout)
    assert (shown["exit"], shown["runs"][0]["exit"]) == (0, 0) and shown["runs"][0]["approved_by_yes"][
        "person"
    ] == "Ada <ada@example.org>"


def test_yes_cannot_be_the_second_pair_of_eyes(phase, repository):
    path = repository.path / "playbook.yaml"
    path.write_text(
        path.read_text().replace("review: required", "review: required\n    allow_yes: true\n    four_eyes: true")
    )
    assert (
        "playbook.yaml:8: phases.build-parity: four_eyes wants somebody else's approval"
        in phase("playbook", "check", code=2).stderr
    )


def test_yes_is_refused_before_anything_runs_where_production_does_not_allow_it(phase, repository):
    path = repository.path / "playbook.yaml"
    path.write_text(
        path.read_text()
        + """
  tp8-canary:
    judge: {metrics: [{metric: ttft}]}
"""
    )
    refused = phase("run", "--yes", code=2)
    assert (
        "tp8-canary changes production and does not allow --yes" in refused.stderr
        and "playbook.yaml:14" in refused.stderr
    )
    assert phase.json("checkpoint", "list")["checkpoints"] == []


def test_a_changed_kernel_makes_the_approval_stale(phase, repository, recorded):
    phase("gate", "approve", "--digest", recorded["digest"][:16], "--reason", "good")
    with (repository.path / "src" / "mine" / "contract.py").open("a") as handle:
        handle.write("# changed\n")
    assert phase.json("status")["phases"][0]["state"] == "stale"


def test_a_changed_gate_makes_the_approval_stale(phase, repository, recorded):
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text() + "          min_samples: 2\n")
    assert phase.json("status")["phases"][0]["state"] == "stale"
    path.write_text(path.read_text().replace("          min_samples: 2\n", "# only a comment\n"))
    assert phase.json("status")["phases"][0]["state"] == "waiting for review"


def test_checkpoint_show_and_files(phase, recorded):
    assert phase.json("checkpoint", "show", "1")["digest"] == recorded["digest"]
    assert phase("checkpoint", "show", "latest", "--file", "table.txt").stdout == "a table\n"
    assert "a table" in phase("checkpoint", "show").stdout
    assert "did you mean 'table.txt'" in phase("checkpoint", "show", "1", "--file", "tabel.txt", code=2).stderr
    assert "0001-build-parity-PASS" in phase("checkpoint", "show", "7", code=1).stderr


def test_export_verifies_on_its_own_and_a_flipped_byte_is_found(phase, recorded, tmp_path):
    directory = phase.json("checkpoint", "export", "1", "--to", tmp_path / "out")["directory"]
    phase("checkpoint", "verify", directory)
    table = tmp_path / "out" / recorded["name"] / "table.txt"
    data = bytearray(table.read_bytes())
    data[0] ^= 1
    table.write_bytes(data)
    assert "table.txt" in phase("checkpoint", "verify", directory, code=1).stdout
    answer = json.loads(phase("checkpoint", "verify", directory, "--json", code=1).stdout)
    assert not answer["ok"] and any("table.txt" in row["where"] for row in answer["problems"])
    phase("checkpoint", "verify")


def test_an_empty_ledger_is_no_error_to_list(phase):
    assert phase.json("checkpoint", "list") == {"checkpoints": [], "damaged": []}
    assert "Run a phase first" in phase("gate", "review", code=1).stderr


def test_uncommitted_changes_are_not_approved_unless_the_run_said_so(phase, repository):
    (repository.path / "new.py").write_text("x = 1\n")
    phase("run", code=3)
    digest = phase.json("checkpoint", "list")["checkpoints"][-1]["digest"][:16]
    refused = phase("gate", "approve", "--digest", digest, "--reason", "good", code=1).stderr
    assert "uncommitted changes" in refused and "--allow-dirty" in refused
    assert "no --allow-dirty" in phase("gate", "review").stdout
    phase("gate", "reject", "--digest", digest, "--reason", "not in git")
    phase("run", "build-parity", "--allow-dirty", code=3)
    said = phase("gate", "review").stdout
    assert "with uncommitted changes (--allow-dirty)" in said
    digest = phase.json("checkpoint", "list")["checkpoints"][-1]["digest"][:16]
    phase("gate", "approve", "--digest", digest, "--reason", "an experiment")


def test_yes_approves_only_what_is_in_git(phase, repository):
    text = (repository.path / "playbook.yaml").read_text()
    (repository.path / "playbook.yaml").write_text(
        text.replace("review: required", "review: required\n    allow_yes: true")
    )
    refused = phase("run", "--yes", code=2).stderr
    assert "(playbook.yaml), and --yes approves only what is in git" in refused
    assert phase.json("checkpoint", "list")["checkpoints"] == []  # said before it took any time
    phase("run", "--yes", "--allow-dirty")
    assert "--allow-dirty" in phase("gate", "review").stdout


def test_a_run_that_is_resumed_cannot_be_told_afterwards_that_it_was_dirty(phase):
    assert "when a run starts" in phase("run", "--resume", "--allow-dirty", code=2).stderr
