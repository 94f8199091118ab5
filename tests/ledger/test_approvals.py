"""Who may say yes, to what, and what counts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from phases.base.errors import GateError, UsageError
from phases.base.verdict import Verdict
from phases.ledger.approvals import Review, Terms, approve, override, reject, review_state
from phases.ledger.checkpoint import Approval
from phases.ledger.ledger import Ledger
from phases.ledger.verify import verify_ledger
from tests.ledger.conftest import git, identify, make_draft


def test_approval_names_person_reason_and_digest(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    assert review_state(checkpoint, ledger.approvals(checkpoint), required=True) is Review.WAITING
    identify(repo, "Bob", "bob@example.org")
    approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest[:12], at=2.0, terms=Terms(four_eyes=True))
    (decision,) = ledger.approvals(checkpoint)
    assert (decision.person, decision.reason, decision.digest) == ("Bob <bob@example.org>", "fine", checkpoint.digest)
    assert review_state(checkpoint, [decision], required=True) is Review.APPROVED
    assert not verify_ledger(ledger)


def test_the_latest_decision_counts(ledger: Ledger) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=False))
    reject(ledger, checkpoint, reason="p99 looks odd", seen=checkpoint.digest, at=3.0)
    assert review_state(checkpoint, ledger.approvals(checkpoint), required=True) is Review.REJECTED


def test_four_eyes_compares_mail_not_spelling(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    identify(repo, "A. Lovelace", "ADA@example.org")
    with pytest.raises(GateError, match="four eyes"):
        approve(ledger, checkpoint, reason="mine", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=True))
    assert ledger.approvals(checkpoint) == []


@pytest.mark.parametrize("seen", ["", "0123456789ab", "short"])
def test_another_digest_is_refused(ledger: Ledger, seen: str) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    with pytest.raises(GateError, match=f"is not that of 0001.*{checkpoint.digest[:16]}"):
        approve(ledger, checkpoint, reason="fine", seen=seen, at=2.0, terms=Terms(four_eyes=False))


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.ABORTED])
def test_only_pass_can_be_approved(ledger: Ledger, verdict: Verdict) -> None:
    checkpoint = ledger.record(make_draft(ledger, verdict=verdict))
    with pytest.raises(GateError, match="only PASS"):
        approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=False))
    reject(ledger, checkpoint, reason="no", seen=checkpoint.digest, at=2.0)


def test_a_checkpoint_with_an_altered_file_is_not_approved(
    ledger: Ledger, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is still the one that was seen: that is of the manifest."""
    checkpoint = ledger.record(make_draft(ledger))
    files = {**ledger.files(checkpoint), "results.json": b"{}"}
    monkeypatch.setattr(Ledger, "files", lambda self, of: files)
    with pytest.raises(GateError, match="was altered: .*results.json"):
        approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=False))
    assert ledger.approvals(checkpoint) == []


def test_a_reason_is_text_whatever_the_locale(ledger: Ledger) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    undecoded = "schön".encode().decode("ascii", "surrogateescape")  # what Python makes of it under LC_ALL=C
    assert (
        approve(
            ledger, checkpoint, reason=undecoded, seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=False)
        ).reason
        == "schön"
    )
    for bad in (b"bad \xff".decode("utf-8", "surrogateescape"), "red \x1b[31m"):
        with pytest.raises(UsageError, match="the reason"):
            approve(ledger, checkpoint, reason=bad, seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=False))
    assert len(ledger.approvals(checkpoint)) == 1


def test_a_decision_needs_a_reason(ledger: Ledger) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    with pytest.raises(UsageError, match="--reason"):
        approve(ledger, checkpoint, reason="  ", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=False))


def test_approving_moves_nothing_in_the_work_tree(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=False))
    assert git(repo, "status", "--porcelain") == ""


def test_an_override_goes_on_from_an_inconclusive_gate_and_is_no_approval(ledger: Ledger) -> None:
    checkpoint = ledger.record(make_draft(ledger, verdict=Verdict.INCONCLUSIVE))
    override(ledger, checkpoint, reason="quiet enough", seen=checkpoint.digest, at=2.0, terms=Terms())
    (decision,) = ledger.approvals(checkpoint)
    assert (decision.decision, decision.past) == ("override", "overridden")
    for required in (True, False):
        assert review_state(checkpoint, [decision], required=required) is Review.OVERRIDDEN
    (name,) = git(ledger.repo, "tag", "-l", "checkpoint/0001-override-*").split()
    assert not verify_ledger(ledger)
    git(ledger.repo, "update-ref", "refs/heads/checkpoints", "checkpoints~1")
    assert [problem.where for problem in verify_ledger(ledger)] == [f"tag {name}"]  # visible for ever


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL, Verdict.ERROR, Verdict.ABORTED])
def test_only_inconclusive_can_be_overridden(ledger: Ledger, verdict: Verdict) -> None:
    checkpoint = ledger.record(make_draft(ledger, verdict=verdict))
    with pytest.raises(GateError, match="only INCONCLUSIVE"):
        override(ledger, checkpoint, reason="go", seen=checkpoint.digest, at=2.0, terms=Terms())
    forged = Approval(1, checkpoint.digest, "override", "Eve <eve@example.org>", "go", "2026-01-01T00:00:00Z")
    state = review_state(checkpoint, [forged], required=True)  # written past this toolkit: it opens nothing
    assert state is Review.WAITING


def test_an_override_keeps_the_terms_of_an_approval(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger, verdict=Verdict.INCONCLUSIVE))
    with pytest.raises(GateError, match="four eyes"):
        override(ledger, checkpoint, reason="go", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=True))
    with pytest.raises(UsageError, match="--reason"):
        override(ledger, checkpoint, reason=" ", seen=checkpoint.digest, at=2.0, terms=Terms())
    reject(ledger, checkpoint, reason="no", seen=checkpoint.digest, at=2.0)
    with pytest.raises(GateError, match="a no is final"):
        override(ledger, checkpoint, reason="go", seen=checkpoint.digest, at=2.0, terms=Terms())
    (repo / "kernel.py").write_text("x = 2\n")
    dirty = ledger.record(make_draft(ledger, "run-2", verdict=Verdict.INCONCLUSIVE))
    with pytest.raises(GateError, match="uncommitted changes"):
        override(ledger, dirty, reason="go", seen=dirty.digest, at=2.0, terms=Terms())


def test_where_signatures_are_wanted_only_a_verified_one_of_the_person_named_counts(
    ledger: Ledger, repo: Path, tmp_path: Path
) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    signed = Terms(signed=True)
    keys = {}
    for name in ("bob", "eve"):
        keys[name] = tmp_path / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys[name])], check=True)
    allowed = tmp_path / "allowed"
    allowed.write_text("".join(f"{n}@example.org {k.with_suffix('.pub').read_text()}" for n, k in keys.items()))
    identify(repo, "Bob", "bob@example.org")
    for key, value in {"gpg.format": "ssh", "commit.gpgSign": "false", "tag.gpgSign": "false"}.items():
        git(repo, "config", key, value)

    def attempt() -> None:
        approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, terms=signed)

    git(repo, "config", "user.signingKey", str(keys["bob"]))
    with pytest.raises(GateError, match="does not verify this one as bob@example.org's"):
        attempt()  # nobody has said whose key it is
    git(repo, "config", "gpg.ssh.allowedSignersFile", str(allowed))
    git(repo, "config", "user.signingKey", str(keys["eve"]))
    with pytest.raises(GateError, match="does not verify"):
        attempt()  # in Bob's name, with Eve's key
    assert ledger.approvals(checkpoint) == [] and git(repo, "tag", "-l", "*approve*") == ""
    approve(ledger, checkpoint, reason="unsigned", seen=checkpoint.digest, at=2.0, terms=Terms())
    assert ledger.approvals(checkpoint) and ledger.approvals(checkpoint, signed=True) == []
    git(repo, "config", "user.signingKey", str(keys["bob"]))
    attempt()
    (counted,) = ledger.approvals(checkpoint, signed=True)
    assert counted.reason == "fine" and not verify_ledger(ledger)
    allowed.write_text("")  # the key is trusted no more
    assert ledger.approvals(checkpoint, signed=True) == []
    reject(ledger, checkpoint, reason="a no needs no key", seen=checkpoint.digest, at=3.0)
    assert [made.decision for made in ledger.approvals(checkpoint, signed=True)] == ["reject"]
