"""`phase status`: who is waited for, what runs, what is live; never hanging, never changing anything."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from phases.base.clock import SystemClock
from phases.base.results import Results
from phases.base.verdict import Verdict
from phases.gate.outcome import GateOutcome, RuleOutcome
from phases.ledger.checkpoint import GATE, RESULTS, Draft, canonical_json
from phases.run.closing import ledger_of
from phases.run.lock import Lock
from phases.status.overview import gather


def _add(repository, text):
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("name: light", f"name: light\n{text}", 1))


def _record(repository, phase, verdict, facts):
    """A checkpoint of a production phase, as its run would have recorded it."""
    playbook = repository.playbook
    gate = GateOutcome(phase, (RuleOutcome("x", verdict, "as told", n=1),))
    files = {
        RESULTS: canonical_json(Results(phase, "mine", facts=facts).to_json()),
        GATE: canonical_json(gate.to_json()),
    }
    draft = Draft(
        phase,
        verdict,
        "mine",
        f"run-{phase}-{time.time()}",
        files,
        {"commit": None, "dirty": False},
        time.time() - 7200,
        {},
        f"light sha256:{playbook.digest}",
    )
    return ledger_of(playbook).record(draft)


def test_who_is_waited_for_and_since_when(repository, phase):
    repository.run()
    (row,) = phase.json("status")["waiting"]
    assert (
        row["phase"] == "build-parity"
        and row["checkpoint"] == "0001-build-parity-PASS"
        and row["reviewer"] == "a reviewer"
        and abs(row["since"] - time.time()) < 600
    )
    assert (
        "Waiting: build-parity for a reviewer since " in phase("status").stdout
        and "`phase gate review build-parity`" in phase("status").stdout
    )
    _add(repository, "")
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("review: required", "review: required\n    four_eyes: true"))
    assert "a reviewer other than Ada" in phase("status").stdout


def test_a_run_elsewhere_is_seen_with_its_step_and_its_look(repository, phase):
    repository.run()
    state = {
        "run": "light-build-parity-0001",
        "steps": 9,
        "step": "bake",
        "number": 5,
        "since": time.time() - 130,
        "said": "w1 is well",
        "at": time.time(),
        "look": {
            "elapsed": 130,
            "bake": 300,
            "deadline": 1800,
            "arms": {"canary": ["w1"], "control": ["w2"]},
            "requests": {"canary": 5, "control": 5},
            "tests": [
                {
                    "name": "itl p95",
                    "unit": "ratio",
                    "estimate": 1.02,
                    "low": 0.9,
                    "high": 1.2,
                    "threshold": 1.05,
                    "n": 5,
                    "verdict": "open",
                }
            ],
        },
    }
    live = repository.path / ".phase" / "runs" / "light-build-parity-0001" / "live.json"
    live.write_text(json.dumps(state))
    assert "bake" not in phase("status").stdout  # whoever wrote that is gone
    with Lock(repository.path / ".phase", "light", SystemClock()).held("phase run tp8-canary"):
        shown = phase("status").stdout
        for words in (
            "Running: phase run tp8-canary by",
            "step 5 of 9, bake, for 2 min: w1 is well",
            "canary w1 against control w2",
            "50% of 10 requests",
            "1.02 [0.9, 1.2]",
            "limit 1.05",
        ):
            assert words in shown, words
        assert phase.json("status")["live"]["step"] == "bake"


def test_last_good_and_rollback_from_the_ledger(repository, phase):
    assert phase.json("status")["last_good"] is None and phase.json("status")["rolled_back"] is None
    _record(repository, "full-rollout", Verdict.PASS, {"end": {"last_good": "ab" * 32}})
    _record(
        repository,
        "tp8-canary",
        Verdict.FAIL,
        {"end": {"exit_code": 7, "rollback": {"verified": True, "reason": "itl p95 slower"}}},
    )
    _record(
        repository,
        "tp8-canary",
        Verdict.FAIL,
        {"end": {}, "rollback": {"verified": True, "reason": "the canary has been judged"}},
    )  # put back as planned
    shown = phase.json("status")
    assert shown["last_good"]["release"] == "ab" * 32 and shown["last_good"]["checkpoint"] == "0001-full-rollout-PASS"
    assert shown["rolled_back"]["checkpoint"] == "0002-tp8-canary-FAIL" and shown["rolled_back"]["verified"] is True
    text = phase("status").stdout
    assert (
        "Last good: abababababab, since 0001-full-rollout-PASS" in text
        and "2 h ago" in text
        and "ago, verified: itl p95 slower" in text
    )
    _record(
        repository,
        "rollback",
        Verdict.FAIL,
        {"rollback": {"verified": False, "reason": "asked for", "left": {"w3": "does not answer"}}},
    )
    shown = phase("status").stdout
    assert (
        "INCOMPLETE: a person is needed" in shown
        and "Not restored by 0004-rollback-FAIL, 2 h ago: w3: does not answer. `phase rollback` does what is left."
        in shown
    )


def test_a_hot_fallback_taken_back_does_not_hide_what_a_rollback_before_it_left(repository, phase):
    left = {"verified": False, "restores": True, "reason": "p99", "left": {"w3": "does not answer"}}
    _record(repository, "full-rollout", Verdict.PASS, {"end": {"last_good": "ab" * 32}})
    _record(
        repository, "rollback", Verdict.FAIL, {"rollback": {**left, "state": "safe"}}
    )  # safe by the hot fallback, and then a restart failed
    _record(
        repository,
        "rollback",
        Verdict.PASS,
        {"rollback": {"verified": False, "restores": False, "state": "safe", "reason": "again", "left": {"w1": "x"}}},
    )
    _record(
        repository,
        "rollback",
        Verdict.PASS,
        {"rollback": {"verified": True, "state": "undone", "reason": "false alarm"}},
    )
    shown = phase("status", "--textfile", "state.prom").stdout
    assert (
        "hot fallback taken back: false alarm" in shown
        and "Not restored by 0002-rollback-FAIL, 2 h ago: w3: does not answer." in shown
        and "w1" not in shown
    )
    assert phase.json("status")["unrestored"]["left"] == {"w3": "does not answer"}
    [verified] = [
        line
        for line in (repository.path / "state.prom").read_text().splitlines()
        if line.startswith("phasegate_rollback_verified{")
    ]
    assert "0004-rollback-PASS" in verified and float(verified.split()[-1]) == 0
    _record(
        repository,
        "rollback",
        Verdict.PASS,
        {"rollback": {"verified": True, "state": "restored", "reason": "the rest"}},
    )
    assert "Not restored" not in phase("status").stdout and phase.json("status")["unrestored"] is None


def test_a_full_rollout_that_passed_ends_what_a_rollback_before_it_left(repository, phase):
    _record(
        repository,
        "rollback",
        Verdict.FAIL,
        {"rollback": {"verified": False, "reason": "p99", "state": "incomplete", "left": {"w3": "does not answer"}}},
    )
    _record(repository, "full-rollout", Verdict.PASS, {"end": {"last_good": "ab" * 32}})
    _record(
        repository,
        "rollback",
        Verdict.PASS,
        {"rollback": {"verified": True, "state": "undone", "reason": "false alarm"}},
    )
    assert "Not restored" not in phase("status").stdout


@pytest.fixture
def hanging():
    """A host that takes connections and then says nothing, as a machine that is out of memory does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


FLEET = """fleet:
  hosts:
    - {{name: w1, address: 127.0.0.1, root: /srv/w1, port: {port}, ssh: {{port: {port}, agent: false}}}}
    - {{name: w2, address: 127.0.0.1, root: /srv/w2, port: {free}, ssh: {{port: {free}, agent: false}}}}
  router: {{kind: sglang, url: "http://127.0.0.1:{port}"}}
"""


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_fleet_that_hangs_or_is_gone_is_said_and_not_waited_for(repository, phase, hanging):
    repository.run()
    _add(repository, FLEET.format(port=hanging, free=_free_port()))
    done = phase("status", "--timeout", "6", "--json")
    fleet = json.loads(done.stdout)["fleet"]
    assert fleet["seconds"] < 60  # a bound on hanging, not a measurement
    problems = {worker["name"]: worker["problem"] for worker in fleet["workers"]}
    assert problems["w1"] == "no answer in time" and problems["w2"] and problems["w2"] != problems["w1"]
    assert "router cannot be asked" in fleet["note"]
    shown = phase("status", "--timeout", "1").stdout
    assert "waiting for review" in shown and "no answer in time" in shown
    assert phase.json("status", "--no-fleet")["fleet"] is None
    assert {w["name"] for w in phase.json("fleet", "status", "--timeout", "1")["workers"]} == {"w1", "w2"}


def test_an_embedded_fleet_that_never_was_is_not_made_by_looking(repository, phase, tmp_path):
    _add(repository, "embedded_fleet: {}\nproduction: {incumbent: {backend: x}}\n")
    shown = phase("status", env={"XDG_CACHE_HOME": str(tmp_path / "cache")}).stdout
    assert "is not running" in shown and not (tmp_path / "cache").exists()


def test_a_playbook_without_fleet_says_nothing_of_one(phase):
    assert "fleet" not in phase("status").stdout
    assert phase("fleet", "status").stdout == "This playbook has no fleet.\n"


def _watching(repository, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "phases.cli.main", "status", "--watch", "--interval", "0.2", *arguments],
        cwd=repository.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process


def test_watching_goes_on_until_it_is_interrupted(repository):
    repository.run()
    process = _watching(repository, "--json")
    rows = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert [row["phases"][0]["state"] for row in rows] == ["waiting for review"] * 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0 and not errors


def test_watching_in_plain_lines(repository):
    process = _watching(repository)
    lines = [process.stdout.readline() for _ in range(6)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=200)
    assert (
        sum(line.startswith("--- ") for line in lines) == 2 and "\x1b" not in "".join(lines) and process.returncode == 0
    )


def test_status_writes_nothing_where_no_run_ever_was(repository, phase):
    phase("status")
    assert not (repository.path / ".phase").exists()
    before = sorted(os.listdir(repository.path))
    gather(repository.playbook, ledger_of(repository.playbook), SystemClock())
    assert sorted(os.listdir(repository.path)) == before


def test_a_ledger_that_was_set_back_is_told_of(repository, phase):
    repository.run()
    digest = phase.json("checkpoint", "list")["checkpoints"][0]["digest"]
    phase("gate", "approve", "--digest", digest, "--reason", "good")
    assert phase.json("status")["lost"] == "" and "Lost" not in phase("status").stdout
    subprocess.run(
        ["git", "update-ref", "refs/heads/checkpoints", "refs/heads/checkpoints~1"], cwd=repository.path, check=True
    )
    told = phase.json("status")["lost"]
    assert "checkpoint/0001-approve-" in told and "git update-ref refs/heads/checkpoints" in told
    assert "Lost: checkpoint/0001-approve-" in phase("status").stdout


def test_a_damaged_ledger_hides_neither_fleet_nor_run(repository, phase, tmp_path):
    """At 3 a.m. what is live on which worker counts, and that the ledger cannot be read."""
    name = repository.run().checkpoint["name"]
    repository.git("switch", "-q", "checkpoints")
    (repository.path / "checkpoints" / name / "manifest.json").write_text("{")
    repository.git("commit", "-qam", "Damage it")
    repository.git("switch", "-q", "main")
    _add(repository, FLEET.format(port=_free_port(), free=_free_port()))  # nobody listens: refused at once
    shown, told = (
        phase("status", "--timeout", "60"),
        phase.json("status", "--timeout", "60", "--textfile", str(tmp_path / "a.prom")),
    )
    assert (
        "Damaged ledger" in shown.stdout
        and f"{name} is damaged" in shown.stdout.replace("\n", " ")
        and "w1" in shown.stdout
    )
    assert (
        name in told["damaged"]
        and told["phases"] == []
        and [row["name"] for row in told["fleet"]["workers"]] == ["w1", "w2"]
    )
    metrics = (tmp_path / "a.prom").read_text()
    assert 'phasegate_ledger_damaged{playbook="light"} 1.0' in metrics and "phasegate_phase_state" not in metrics
    assert "phasegate_worker_reachable" in metrics and phase.json("status", "--no-fleet", code=0)["fleet"] is None


def test_checkpoints_of_two_phases_are_not_compared(repository, phase):
    repository.run()
    _record(repository, "tp8-canary", Verdict.PASS, {})
    said = phase("checkpoint", "diff", "1", "2", code=2).stderr
    assert (
        "0001-build-parity-PASS and 0002-tp8-canary-PASS are of two phases" in said.replace("\n  ", " ")
        and "phase checkpoint list" in said
    )
    assert "no benchmark on either side" in phase("checkpoint", "diff", "2", "2").stdout


@pytest.mark.parametrize(
    "facts",
    [
        {"rollback": 5},
        {"rollback": {"left": ["w1"], "restores": True}},
        {"end": [8]},
        {"end": {"exit_code": 8, "rollback": "x"}},
    ],
)
def test_a_rollback_whose_record_is_no_such_thing_does_not_stop_a_status(repository, facts):
    for phase in ("rollback", "tp8-canary"):
        _record(repository, phase, Verdict.FAIL, facts)
    _record(repository, "full-rollout", Verdict.PASS, facts)
    seen = gather(repository.playbook, ledger_of(repository.playbook), SystemClock())
    assert seen.rolled_back and not seen.rolled_back.verified and seen.unrestored is None
