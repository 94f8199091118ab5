"""The Prometheus textfile, read back by the real parsers: prometheus_client's, and promtool's where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from phases.base.clock import SystemClock
from phases.base.errors import PhaseError
from phases.base.verdict import Verdict
from phases.status import textfile
from phases.status.fleet_view import FleetLook, WorkerView
from tests.status.test_status import _add, _record


def _read(path):
    """{(name, labels without playbook): value}"""
    found = {}
    for family in text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            assert sample.labels.pop("playbook") == "light" and family.documentation
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


@pytest.fixture
def written(repository, phase, tmp_path):
    def write(*arguments):
        phase("status", "--textfile", tmp_path / "phasegate.prom", *arguments)
        return _read(tmp_path / "phasegate.prom")

    return write


def test_before_any_run(written):
    found = written()
    assert found["phasegate_phase_state", (("phase", "build-parity"), ("state", "not-run"))] == 1
    assert (
        found["phasegate_run_active", ()] == 0
        and abs(found["phasegate_status_timestamp_seconds", ()] - time.time()) < 600
    )
    assert not any(name.startswith(("phasegate_waiting", "phasegate_last_good", "phasegate_roll")) for name, _ in found)


def test_waiting_passed_and_rolled_back(repository, phase, written):
    repository.run()
    found = written()
    states = {
        dict(labels)["state"]: value for (name, labels), value in found.items() if name == "phasegate_phase_state"
    }
    assert states.pop("waiting-for-review") == 1 and set(states.values()) == {0}
    assert abs(found["phasegate_waiting_since_timestamp_seconds", (("phase", "build-parity"),)] - time.time()) < 600
    assert found["phasegate_last_exit_code", (("phase", "build-parity"),)] == 3
    digest = phase.json("checkpoint", "list")["checkpoints"][0]["digest"]
    phase("gate", "approve", "--digest", digest[:16], "--reason", "good")
    good = _record(repository, "full-rollout", Verdict.PASS, {"end": {"last_good": "ab" * 32}})
    back = _record(repository, "rollback", Verdict.FAIL, {"rollback": {"verified": False}})
    found = written()
    assert found["phasegate_phase_state", (("phase", "build-parity"), ("state", "approved"))] == 1
    assert ("phasegate_waiting_since_timestamp_seconds", (("phase", "build-parity"),)) not in found
    assert found["phasegate_last_good_info", (("checkpoint", good.name), ("release", "ab" * 32))] == 1
    assert found["phasegate_last_good_timestamp_seconds", ()] == good.recorded_at
    assert found["phasegate_rolled_back_timestamp_seconds", (("checkpoint", back.name),)] == back.recorded_at
    assert found["phasegate_rollback_verified", (("checkpoint", back.name),)] == 0


def _overview(repository):
    from phases.run.closing import ledger_of
    from phases.status.overview import gather

    return gather(repository.playbook, ledger_of(repository.playbook), SystemClock())


def test_workers(repository, tmp_path):
    look = FleetLook(
        (
            WorkerView("w1", "http://w1", "aa", "aa", "", True, True),
            WorkerView("w2", "http://w2", "bb", "aa", "", False, None),
            WorkerView("w3", "http://w3", serving=None, problem="no answer in time"),
        )
    )
    textfile.write(tmp_path / "x.prom", _overview(repository), look)
    found = _read(tmp_path / "x.prom")
    value = lambda name, worker: found.get((f"phasegate_worker_{name}", (("worker", worker),)))  # noqa: E731
    assert [value("reachable", w) for w in ("w1", "w2", "w3")] == [1, 1, 0] and [
        value("serving", w) for w in ("w1", "w2", "w3")
    ] == [1, 0, None]
    assert [value("in_service", w) for w in ("w1", "w2", "w3")] == [1, None, None] and [
        value("on_last_good", w) for w in ("w1", "w2", "w3")
    ] == [1, 0, None]


def test_every_metric_is_documented_and_every_documented_one_exists(repository, tmp_path):
    repository.run()
    _record(repository, "full-rollout", Verdict.PASS, {"end": {"last_good": "ab" * 32}})
    _record(repository, "rollback", Verdict.PASS, {"rollback": {"verified": True}})
    from phases.run.lock import Lock

    with Lock(repository.path / ".phase", "light", SystemClock()).held("phase run x"):
        textfile.write(
            tmp_path / "x.prom", _overview(repository), FleetLook((WorkerView("w", "u", "a", "a", "", True, True),))
        )
    documented = set(re.findall(r"^\| (phasegate_\w+)", textfile.__doc__, re.MULTILINE))
    assert documented == {name for name, _ in _read(tmp_path / "x.prom")}


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (apt: prometheus)")
def test_promtool_has_nothing_to_say(repository, tmp_path):
    repository.run()
    textfile.write(tmp_path / "x.prom", _overview(repository))
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=(tmp_path / "x.prom").read_text(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and not done.stdout + done.stderr


def test_it_is_replaced_in_one_step(repository, tmp_path, monkeypatch):
    path = tmp_path / "x.prom"
    textfile.write(path, _overview(repository))
    before = path.stat().st_ino
    textfile.write(path, _overview(repository))
    assert path.stat().st_ino != before and [p.name for p in tmp_path.glob("*.prom*")] == ["x.prom"]
    with pytest.raises(PhaseError, match="metrics cannot be written"):
        textfile.write(tmp_path / "nowhere" / "x.prom", _overview(repository))


def test_nothing_but_a_file_is_replaced(repository, tmp_path):
    os.mkfifo(tmp_path / "pipe.prom")  # as /dev/stdout is none; a superuser's rename would take a device's place
    with pytest.raises(PhaseError, match="no ordinary file"):
        textfile.write(tmp_path / "pipe.prom", _overview(repository))
    assert (tmp_path / "pipe.prom").is_fifo() and len(list(tmp_path.glob("*pipe*"))) == 1


def test_the_playbooks_setting_keeps_it_written(repository, phase):
    _add(repository, "metrics: {textfile: state.prom}")
    for arguments in (("add", "-A"), ("commit", "-qm", "metrics")):  # what is not in git cannot be approved
        subprocess.run(["git", "-C", str(repository.path), *arguments], check=True)
    repository.run()
    said = []
    textfile.keep_written(repository.playbook, SystemClock(), said.append)
    path = repository.path / "state.prom"
    assert _read(path)["phasegate_phase_state", (("phase", "build-parity"), ("state", "waiting-for-review"))] == 1
    digest = phase.json("checkpoint", "list")["checkpoints"][0]["digest"]
    phase("gate", "approve", "--digest", digest[:16], "--reason", "good")
    assert _read(path)["phasegate_phase_state", (("phase", "build-parity"), ("state", "approved"))] == 1 and not said
    path.unlink()
    path.mkdir()
    textfile.keep_written(repository.playbook, SystemClock(), said.append)
    assert len(said) == 1 and "metrics cannot be written" in said[0]
    playbook = repository.path / "playbook.yaml"
    playbook.write_text(playbook.read_text().replace("state.prom", "state.txt"))
    assert "end in .prom" in phase("status", code=2).stderr


def test_nothing_is_written_without_the_setting(repository):
    textfile.keep_written(repository.playbook, SystemClock(), pytest.fail)
    assert not list(Path(repository.path).glob("*.prom"))
