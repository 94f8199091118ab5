"""A whole run: what it leaves, how it resumes, and that a kill at any record changes nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import traceback

import pytest

from phases.base.errors import Exit, JournalError, LedgerError, LockedError, PhaseError, UsageError
from phases.ledger.approvals import reject
from phases.ledger.verify import verify_ledger
from phases.run.closing import ledger_of


def test_a_run_leaves_a_verified_checkpoint_and_an_untouched_tree(repository):
    before = repository.git("status", "--porcelain"), repository.git("rev-parse", "HEAD")
    outcome = repository.run()
    assert (outcome.code, outcome.verdict.value) == (Exit.WAITING_FOR_REVIEW, "PASS")
    ledger = ledger_of(repository.playbook)
    (checkpoint,) = ledger.checkpoints()
    assert checkpoint.digest == outcome.checkpoint["digest"] and not verify_ledger(ledger)
    assert {"results.json", "gate.json", "table.txt", "manifest.json"} <= set(ledger.files(checkpoint))
    assert checkpoint.manifest["facts"]["device"] == "none"
    assert (repository.git("status", "--porcelain"), repository.git("rev-parse", "HEAD")) == before


def test_a_failing_gate_is_recorded_and_exits_4(repository):
    repository.write_playbook(variant="rows")
    outcome = repository.run()
    assert outcome.code in (Exit.GATE_FAILED, Exit.INCONCLUSIVE)
    (checkpoint,) = ledger_of(repository.playbook).checkpoints()
    assert checkpoint.verdict is outcome.verdict


def test_without_review_a_pass_exits_0(repository):
    repository.write_playbook(review="none")
    assert repository.run().code is Exit.PASSED


def test_attempts_are_numbered(repository):
    assert [repository.run().run_id for _ in range(3)] == [f"light-build-parity-{n:04d}" for n in (1, 2, 3)]
    assert len(ledger_of(repository.playbook).checkpoints()) == 3


def test_resuming_a_finished_run_changes_nothing(repository):
    first = repository.run()
    assert repository.run(resume=True) == first
    assert len(ledger_of(repository.playbook).checkpoints()) == 1


def test_nothing_to_resume_is_said(repository):
    with pytest.raises(UsageError, match="no run of build-parity"):
        repository.run(resume=True)


@pytest.mark.parametrize("file", ["src/mine/contract.py", "playbook.yaml"])
def test_a_run_is_not_resumed_on_other_content(repository, file):
    _killed(repository, 4, "after")
    with (repository.path / file).open("a") as handle:
        handle.write("\n# changed\n")
    with pytest.raises(JournalError, match="changed since it started"):
        repository.run(resume=True)
    assert ledger_of(repository.playbook).checkpoints() == []


def test_an_altered_journal_is_not_resumed(repository):
    _killed(repository, 6, "after")
    journal = next((repository.path / ".phase" / "runs").glob("*/journal.jsonl"))
    journal.write_text(journal.read_text().replace("lucky", "unlucky"))
    with pytest.raises(JournalError, match="altered"):
        repository.run(resume=True)


@pytest.mark.parametrize("content", ["[]", "{}", '{"schema": "phasegate/run/v1", "x": 1}', "garbage"])
def test_a_run_directory_that_is_none_is_said(repository, content):
    repository.run()
    next((repository.path / ".phase" / "runs").glob("*/run.json")).write_text(content)
    with pytest.raises(JournalError, match="Move that directory away"):
        repository.run(resume=True)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "garbage",
        json.dumps(
            {
                **dict.fromkeys(("token", "pid", "process_start", "boot", "user", "purpose", "since"), "x"),
                "host": socket.gethostname(),
            }
        ),
    ],
)
def test_a_lock_that_cannot_be_read_blocks(repository, content):
    repository.run()
    (repository.path / ".phase" / "locks" / "light.json").write_text(content)
    with pytest.raises(LockedError, match="unreadable lock"):
        repository.run()


def test_a_second_run_at_once_is_locked_out_and_changes_nothing(repository):
    seen = []

    def second(moment, record):
        if record.event == "step-started" and moment == "after" and not seen:
            with pytest.raises(LockedError) as caught:
                repository.run()
            seen.append(caught.value)

    repository.run(on_record=second)
    assert seen[0].exit_code is Exit.LOCKED and str(os.getpid()) in str(seen[0])
    assert len(ledger_of(repository.playbook).checkpoints()) == 1


def test_what_a_kill_inside_a_write_leaves_is_not_recorded(repository):
    def inside_a_write(moment, record):
        if moment == "after" and record.event == "step-started" and record.step == "record the checkpoint":
            (root,) = (repository.path / ".phase" / "runs").glob("*/work/checkpoint")
            (root / ".gate.json.4711.tmp").write_bytes(b"half")

    repository.run(on_record=inside_a_write)
    (checkpoint,) = ledger_of(repository.playbook).checkpoints()
    assert not [name for name in ledger_of(repository.playbook).files(checkpoint) if "tmp" in name]


def test_a_file_named_in_other_bytes_than_utf8(repository):
    (repository.path / "src" / os.fsdecode(b"b\xffd.txt")).write_text("x")
    assert repository.run().verdict.value == "PASS"


def test_a_mistake_in_a_script_leaves_a_resumable_run_and_no_checkpoint(repository):
    with pytest.raises(KeyError):
        repository.run(script="tests.run.light_phase:failing_phase")
    assert ledger_of(repository.playbook).checkpoints() == []
    repository.run()  # the lock is free


def test_state_that_cannot_be_written_is_one_clear_error(repository):
    (repository.path / ".phase").write_text("in the way")
    with pytest.raises(PhaseError, match="cannot keep the state of runs"):
        repository.run()


# ---- kill -9 at every record ---------------------------------------------------------------------------------------------

RECORDS = 12  # run-started, two for each of five steps, run-finished; test_the_records_are_all_there keeps this true


def test_the_records_are_all_there(repository):
    seen = []
    repository.run(on_record=lambda moment, record: seen.append((moment, record.event)))
    assert len(seen) == 2 * RECORDS


def _killed(repository, number, moment):
    """Run in a process of its own that gets SIGKILL at a record: before it is written, after, or with half of it written."""
    child = os.fork()
    if child == 0:
        try:
            repository.run(on_record=lambda at, record: _die(repository, at, record.number, number, moment))
        except BaseException:
            traceback.print_exc()
        os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _die(repository, at, record, number, moment):
    if record != number or (at == "after") != (moment == "after"):
        return
    if moment == "torn":
        journal = next((repository.path / ".phase" / "runs").glob("*/journal.jsonl"))
        with journal.open("ab") as handle:
            handle.write(b'{"at": 1.0, "data": {"step')
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["before", "torn", "after"])
@pytest.mark.parametrize("number", range(RECORDS))
def test_killed_at_any_record_it_resumes_to_the_same_checkpoint(repository, number, moment):
    _killed(repository, number, moment)
    ledger = ledger_of(repository.playbook)
    at_kill = ledger.checkpoints()
    measured = _measured(repository)
    notices = []
    outcome = repository.run(resume=True, notice=notices.append)
    assert outcome.code is Exit.WAITING_FOR_REVIEW
    assert any("took over the lock" in line for line in notices)
    (checkpoint,) = ledger.checkpoints()
    assert checkpoint.digest == outcome.checkpoint["digest"] and not verify_ledger(ledger)
    assert [c.digest for c in at_kill] in ([], [checkpoint.digest])
    if measured:  # what a finished step had measured is what the checkpoint holds
        assert json.loads(ledger.files(checkpoint)["results.json"])["parity"] == measured
    assert repository.run(resume=True) == outcome


def _measured(repository):
    """The parity records a finished step kept before the kill, or None."""
    (run,) = (repository.path / ".phase" / "runs").glob("light-*")
    text = (run / "journal.jsonl").read_text() if (run / "journal.jsonl").exists() else ""
    finished = any('"step-finished"' in line and '"prove"' in line for line in text.splitlines())
    return json.loads((run / "work" / "prove.json").read_text())["parity"] if finished else None


# ---- full disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 500, 900, 1300, 1700, 2500, 3000])
def test_a_full_disk_stops_the_run_and_loses_nothing(repository, limit):
    """No file may grow beyond `limit` bytes: run.json, journal, results or git's objects fail, whichever comes first."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            repository.run()
            code = 0
        except PhaseError as fault:
            code = 1 if fault.exit_code is Exit.OPERATIONAL and str(fault) else 98
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ledger = ledger_of(repository.playbook)
    assert code == 1 and ledger.checkpoints() == []
    outcome = repository.run(resume=bool(list((repository.path / ".phase" / "runs").glob("*/run.json"))))
    (checkpoint,) = ledger.checkpoints()
    assert checkpoint.digest == outcome.checkpoint["digest"] and not verify_ledger(ledger)


def test_no_run_starts_on_a_ledger_that_was_set_back(repository):
    outcome = repository.run()
    (checkpoint,) = ledger_of(repository.playbook).checkpoints()
    reject(ledger_of(repository.playbook), checkpoint, reason="p99 looks odd", seen=checkpoint.digest, at=2.0)
    repository.git("update-ref", "refs/heads/checkpoints", outcome.checkpoint["commit"])
    with pytest.raises(LedgerError, match="checkpoint/0001-reject-.*does not hold it"):
        repository.run()
    assert len(list((repository.path / ".phase" / "runs").glob("*/run.json"))) == 1
