"""Who may say yes, to what, and what counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from phases.base.errors import GateError, UsageError
from phases.base.verdict import Verdict
from phases.ledger.approvals import Review, approve, reject, review_state
from phases.ledger.ledger import Ledger
from phases.ledger.verify import verify_ledger
from tests.ledger.conftest import git, identify, make_draft


def test_approval_names_person_reason_and_digest(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    assert review_state(checkpoint, ledger.approvals(checkpoint), required=True) is Review.WAITING
    identify(repo, "Bob", "bob@example.org")
    approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest[:12], at=2.0, four_eyes=True)
    (decision,) = ledger.approvals(checkpoint)
    assert (decision.person, decision.reason, decision.digest) == ("Bob <bob@example.org>", "fine", checkpoint.digest)
    assert review_state(checkpoint, [decision], required=True) is Review.APPROVED
    assert not verify_ledger(ledger)


def test_the_latest_decision_counts(ledger: Ledger) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, four_eyes=False)
    reject(ledger, checkpoint, reason="p99 looks odd", seen=checkpoint.digest, at=3.0)
    assert review_state(checkpoint, ledger.approvals(checkpoint), required=True) is Review.REJECTED


def test_four_eyes_compares_mail_not_spelling(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    identify(repo, "A. Lovelace", "ADA@example.org")
    with pytest.raises(GateError, match="four eyes"):
        approve(ledger, checkpoint, reason="mine", seen=checkpoint.digest, at=2.0, four_eyes=True)
    assert ledger.approvals(checkpoint) == []


@pytest.mark.parametrize("seen", ["", "0123456789ab", "short"])
def test_another_digest_is_refused(ledger: Ledger, seen: str) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    with pytest.raises(GateError, match=f"is not that of 0001.*{checkpoint.digest[:16]}"):
        approve(ledger, checkpoint, reason="fine", seen=seen, at=2.0, four_eyes=False)


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.ABORTED])
def test_only_pass_can_be_approved(ledger: Ledger, verdict: Verdict) -> None:
    checkpoint = ledger.record(make_draft(ledger, verdict=verdict))
    with pytest.raises(GateError, match="only PASS"):
        approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, four_eyes=False)
    reject(ledger, checkpoint, reason="no", seen=checkpoint.digest, at=2.0)


def test_a_checkpoint_with_an_altered_file_is_not_approved(
    ledger: Ledger, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is still the one that was seen: that is of the manifest."""
    checkpoint = ledger.record(make_draft(ledger))
    files = {**ledger.files(checkpoint), "results.json": b"{}"}
    monkeypatch.setattr(Ledger, "files", lambda self, of: files)
    with pytest.raises(GateError, match="was altered: .*results.json"):
        approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, four_eyes=False)
    assert ledger.approvals(checkpoint) == []


def test_a_reason_is_text_whatever_the_locale(ledger: Ledger) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    undecoded = "schön".encode().decode("ascii", "surrogateescape")  # what Python makes of it under LC_ALL=C
    assert (
        approve(ledger, checkpoint, reason=undecoded, seen=checkpoint.digest, at=2.0, four_eyes=False).reason == "schön"
    )
    for bad in (b"bad \xff".decode("utf-8", "surrogateescape"), "red \x1b[31m"):
        with pytest.raises(UsageError, match="the reason"):
            approve(ledger, checkpoint, reason=bad, seen=checkpoint.digest, at=2.0, four_eyes=False)
    assert len(ledger.approvals(checkpoint)) == 1


def test_a_decision_needs_a_reason(ledger: Ledger) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    with pytest.raises(UsageError, match="--reason"):
        approve(ledger, checkpoint, reason="  ", seen=checkpoint.digest, at=2.0, four_eyes=False)


def test_approving_moves_nothing_in_the_work_tree(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, four_eyes=False)
    assert git(repo, "status", "--porcelain") == ""
