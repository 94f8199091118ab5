"""The ledger and a real bare remote: pushed whole, raced, out of reach, out of step."""

from __future__ import annotations

from pathlib import Path

import pytest

from phases.base.errors import LedgerError
from phases.base.verdict import Verdict
from phases.ledger.approvals import Terms, approve
from phases.ledger.ledger import Ledger
from phases.ledger.lost import require_whole
from phases.ledger.verify import verify_ledger
from tests.ledger.conftest import git, identify, make_draft


@pytest.fixture
def two(repo: Path, bare: Path, tmp_path: Path, warnings: list[str]) -> tuple[Ledger, Ledger]:
    """Two clones of one remote."""
    git(repo, "remote", "add", "origin", str(bare))
    git(repo, "push", "-q", "origin", "main")
    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", str(bare), str(other))
    identify(other, "Bob", "bob@example.org")
    return Ledger(repo, remote="origin", warn=warnings.append), Ledger(other, remote="origin", warn=warnings.append)


def test_branch_and_tag_arrive_together(two: tuple[Ledger, Ledger], bare: Path, warnings: list[str]) -> None:
    recorded = two[0].record(make_draft(two[0]))
    assert git(bare, "rev-parse", "checkpoints") == recorded.commit
    assert git(bare, "rev-parse", f"checkpoint/{recorded.name}^{{commit}}") == recorded.commit
    assert warnings == []


def test_a_second_clone_builds_on_the_first(two: tuple[Ledger, Ledger]) -> None:
    first = two[0].record(make_draft(two[0]))
    second = two[1].record(make_draft(two[1], "run-2"))
    assert second.number == 2 and second.manifest["previous"] == first.digest
    third = two[0].record(make_draft(two[0], "run-3"))
    assert third.number == 3
    assert not verify_ledger(two[0])


def test_a_run_recorded_from_another_clone_is_the_same_checkpoint(two: tuple[Ledger, Ledger]) -> None:
    first = two[0].record(make_draft(two[0]))
    assert two[1].record(make_draft(two[1])).commit == first.commit


@pytest.mark.parametrize("setting", ["fetch.prune=true", "remote.origin.prune=true", "i18n.logOutputEncoding=UTF-16"])
def test_a_users_git_settings_lose_nothing(two: tuple[Ledger, Ledger], repo: Path, bare: Path, setting: str) -> None:
    git(repo, "config", *setting.split("="))
    two[0].record(make_draft(two[0]))
    away = bare.rename(bare.with_name("away.git"))
    two[0].record(make_draft(two[0], "run-2"))  # not pushed yet: the remote has no such tag
    away.rename(bare)
    two[0].record(make_draft(two[0], "run-3"))
    assert not verify_ledger(two[0]) and len(git(bare, "tag").splitlines()) == 3


def test_a_remote_that_moves_before_the_push_is_not_overwritten(
    two: tuple[Ledger, Ledger], bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phases.ledger.remote import Remote

    head, calls = Remote.head, []

    def head_after_the_other(self: Remote) -> str | None:
        calls.append(self)
        if len(calls) == 2:  # the first look is the one built on, the second is the one pushed over
            two[1].record(make_draft(two[1], "run-other", Verdict.FAIL))  # another name: no tag stands in the way
        return head(self)

    two[0].record(make_draft(two[0], "run-first"))
    calls.clear()
    monkeypatch.setattr(Remote, "head", head_after_the_other)
    mine = two[0].record(make_draft(two[0], "run-mine"))
    monkeypatch.undo()
    assert mine.number == 3 and two[1].sync() == git(bare, "rev-parse", "checkpoints") == mine.commit
    assert [c.manifest["run"] for c in two[1].checkpoints()] == ["run-first", "run-other", "run-mine"]


def test_a_race_lost_at_the_push_is_built_again(two: tuple[Ledger, Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    from phases.ledger.remote import Remote

    push, raced = Remote.push, []

    def push_after_the_other(self: Remote, *args: object) -> None:
        if not raced:
            raced.append(True)
            two[1].record(make_draft(two[1], "run-other"))
        push(self, *args)

    monkeypatch.setattr(Remote, "push", push_after_the_other)
    mine = two[0].record(make_draft(two[0], "run-mine"))
    assert mine.number == 2
    assert [c.manifest["run"] for c in two[0].checkpoints()] == ["run-other", "run-mine"]
    assert not verify_ledger(two[0])


def test_an_unreachable_remote_is_warned_of_and_caught_up_later(
    two: tuple[Ledger, Ledger], bare: Path, warnings: list[str]
) -> None:
    ledger = two[0]
    away = bare.with_name("away.git")
    bare.rename(away)
    first = ledger.record(make_draft(ledger))
    assert first.number == 1 and "Recording here only" in warnings[0]
    away.rename(bare)
    second = ledger.record(make_draft(ledger, "run-2"))
    assert git(bare, "rev-parse", "checkpoints") == second.commit
    assert git(bare, "tag", "-l").split() == [f"checkpoint/{first.name}", f"checkpoint/{second.name}"]


def test_pushed_on_the_repeated_recording(two: tuple[Ledger, Ledger], bare: Path) -> None:
    away = bare.with_name("away.git")
    bare.rename(away)
    first = two[0].record(make_draft(two[0]))
    away.rename(bare)
    assert two[0].record(make_draft(two[0])) == first
    assert git(bare, "rev-parse", "checkpoints") == first.commit


def test_both_sides_grown_apart_is_refused_with_a_way_out(two: tuple[Ledger, Ledger], bare: Path) -> None:
    away = bare.with_name("away.git")
    bare.rename(away)
    two[0].record(make_draft(two[0], "run-offline"))
    away.rename(bare)
    two[1].record(make_draft(two[1], "run-online"))
    before = git(two[0].repo, "rev-parse", "checkpoints")
    with pytest.raises(LedgerError, match="have both grown.*git branch checkpoints-mine checkpoints"):
        two[0].record(make_draft(two[0], "run-3"))
    assert git(two[0].repo, "rev-parse", "checkpoints") == before


def test_a_refusing_remote_keeps_the_checkpoint_here(
    two: tuple[Ledger, Ledger], bare: Path, warnings: list[str]
) -> None:
    hook = bare / "hooks" / "pre-receive"
    hook.write_text("#!/bin/sh\necho protected branch >&2\nexit 1\n")
    hook.chmod(0o755)
    recorded = two[0].record(make_draft(two[0]))
    assert two[0].checkpoints() == [recorded]
    assert any("refused" in line for line in warnings)
    assert "checkpoints" not in git(bare, "for-each-ref", "refs/heads")


def test_approvals_travel(two: tuple[Ledger, Ledger]) -> None:
    from phases.ledger.approvals import Terms, approve

    first = two[0].record(make_draft(two[0]))
    two[1].sync()
    approve(
        two[1], two[1].find("1"), reason="numbers look right", seen=first.digest, at=1.0, terms=Terms(four_eyes=True)
    )
    two[0].sync()
    assert [a.person for a in two[0].approvals(first)] == ["Bob <bob@example.org>"]


def test_a_decision_that_was_lost_here_comes_back_from_the_remote(
    two: tuple[Ledger, Ledger], repo: Path, bare: Path, warnings: list[str]
) -> None:
    checkpoint = two[0].record(make_draft(two[0]))
    approve(two[1], checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=True))
    (name,) = git(bare, "tag", "-l", "checkpoint/0001-approve-*").split()
    two[0].sync()
    git(repo, "update-ref", "refs/heads/checkpoints", "checkpoints~1")
    assert [p.where for p in verify_ledger(two[0])] == [f"tag {name}"]
    require_whole(two[0])
    assert [d.reason for d in two[0].approvals(checkpoint)] == ["fine"] and not verify_ledger(two[0]) and warnings == []
