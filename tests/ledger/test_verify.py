"""A flipped byte anywhere is found, in the ledger and in an exported directory."""

from __future__ import annotations

import dataclasses
import json
import random
import zlib
from pathlib import Path

import pytest

from phases.base.errors import LedgerError
from phases.ledger.approvals import Terms, approve, reject
from phases.ledger.decisions import UNTAGGED
from phases.ledger.export import export
from phases.ledger.ledger import Ledger
from phases.ledger.lost import require_whole
from phases.ledger.objects import write_tree
from phases.ledger.verify import read_as_recorded, verify_directory, verify_ledger
from tests.ledger.conftest import git, make_draft


def loose(repo: Path, oid: str) -> Path:
    return repo / ".git" / "objects" / oid[:2] / oid[2:]


def ledger_objects(ledger: Ledger) -> list[str]:
    """Every object only the ledger holds: its commits, trees, blobs and tags."""
    listed = git(ledger.repo, "rev-list", "--objects", "--first-parent", "checkpoints", "^main")
    tags = git(ledger.repo, "for-each-ref", "--format=%(objectname)", "refs/tags/checkpoint/").split()
    return [line.split()[0] for line in listed.splitlines()] + tags


def replace(ledger: Ledger, repo: Path, path: str, content: bytes) -> None:
    """One more ledger commit, in which a file is another one."""
    tip = git(repo, "rev-parse", "checkpoints")
    tree = write_tree(ledger.git, tip, {path: content})
    git(repo, "update-ref", "refs/heads/checkpoints", ledger.commit(tree, [tip], "Record evil\n", 2.0))


def test_clean_ledger_has_no_problem(ledger: Ledger) -> None:
    ledger.record(make_draft(ledger))
    assert verify_ledger(ledger) == []


def test_a_flipped_byte_in_any_object_is_found(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=False))
    chooser = random.Random(7)
    oids = ledger_objects(ledger)
    assert len(oids) > 12
    for oid in oids:
        path = loose(repo, oid)
        path.chmod(0o644)
        stored = path.read_bytes()
        content = bytearray(zlib.decompress(stored))
        at = chooser.randrange(content.index(0) + 1, len(content))
        content[at] ^= 1 << chooser.randrange(8)
        path.write_bytes(
            zlib.compress(bytes(content))
        )  # well-formed storage, other content: git itself would not notice
        assert verify_ledger(ledger), f"{oid} was altered at byte {at} and not found"
        path.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))  # broken storage
        assert verify_ledger(ledger), f"{oid} was broken and not found"
        path.write_bytes(stored)
    assert verify_ledger(ledger) == []


def test_a_missing_object_is_found(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    loose(repo, git(repo, "rev-parse", f"{checkpoint.commit}:{checkpoint.directory}/benchmark.txt")).unlink()
    assert verify_ledger(ledger)


def test_history_rewritten_with_valid_objects_is_found(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    files = {**ledger.files(checkpoint), "benchmark.txt": b"case  us  much better\n"}
    tree = write_tree(ledger.git, checkpoint.commit, {f"{checkpoint.directory}/{p}": d for p, d in files.items()})
    forged = ledger.commit(tree, [checkpoint.commit], "Record nothing\n", 1.0)
    git(repo, "update-ref", "refs/heads/checkpoints", forged)
    assert any("was altered in ledger commit" in p.text for p in verify_ledger(ledger))


def test_a_moved_or_lost_tag_is_found(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    git(repo, "tag", "-f", "-a", "-m", "x", f"checkpoint/{checkpoint.name}", "main")
    assert [p.text for p in verify_ledger(ledger)] == ["does not point at the checkpoint's commit"]
    git(repo, "tag", "-d", f"checkpoint/{checkpoint.name}")
    assert [p.text for p in verify_ledger(ledger)] == ["is missing"]


def test_no_ledger_is_said(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="there is no ledger on branch 'checkpoints'"):
        verify_ledger(ledger)


def test_every_byte_of_an_exported_checkpoint_counts(ledger: Ledger, tmp_path: Path) -> None:
    directory = export(ledger, ledger.record(make_draft(ledger)), tmp_path / "out")
    assert verify_directory(directory) == []
    chooser = random.Random(11)
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        data = path.read_bytes()
        for at in chooser.sample(range(len(data)), min(len(data), 40)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << chooser.randrange(8)
            path.write_bytes(bytes(flipped))
            assert verify_directory(directory), f"{path.name} byte {at}"
        path.write_bytes(data)
    assert verify_directory(directory) == []


def test_extra_missing_and_renamed_files_are_found(ledger: Ledger, tmp_path: Path) -> None:
    directory = export(ledger, ledger.record(make_draft(ledger)), tmp_path / "out")
    (directory / "extra.txt").write_text("x")
    assert any("extra.txt" in p.where for p in verify_directory(directory))
    (directory / "extra.txt").unlink()
    (directory / "benchmark.txt").rename(directory / "bench.txt")
    assert {p.text for p in verify_directory(directory) if p.where.endswith("benchmark.txt")} == {"is missing"}
    (directory / "bench.txt").rename(directory / "benchmark.txt")
    renamed = directory.rename(directory.with_name("0001-build-parity-FAIL"))
    assert "is called otherwise" in verify_directory(renamed)[0].text


def test_a_tree_that_leads_out_of_its_directory_is_not_exported(ledger: Ledger, repo: Path, tmp_path: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    blob = ledger.git.text("hash-object", "-w", "--stdin", stdin=b"evil")
    out = ledger.git.text("mktree", stdin=f"100644 blob {blob}\tescaped\n".encode())
    listing = git(repo, "ls-tree", checkpoint.tree) + f"\n040000 tree {out}\t..\n"
    evil = dataclasses.replace(checkpoint, tree=ledger.git.text("mktree", stdin=listing.encode()))
    with pytest.raises(LedgerError, match="outside of its directory"):
        export(ledger, evil, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"garbage", b"[]", b'{"decision": "approve"}', b"\xff"])
def test_a_decision_or_manifest_that_is_none_is_said(ledger: Ledger, repo: Path, content: bytes) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    whole = git(repo, "rev-parse", "checkpoints")
    for path in ("approvals/0001/0001.json", f"{checkpoint.directory}/manifest.json"):
        git(repo, "update-ref", "refs/heads/checkpoints", whole)
        replace(ledger, repo, path, content)
        assert verify_ledger(ledger)
        with pytest.raises(LedgerError, match="checkpoint verify"):
            ledger.approvals(ledger.find("1"))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"garbage", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"schema": "phasegate/manifest/v9"}', "has the schema 'phasegate/manifest/v9'"),
        (
            b'{"schema": "phasegate/manifest/v1", "recorded_at": "2026-01-01T00:00:00Z", "files": {"x": 3}}',
            "has no 'number'",
        ),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_one_damaged_manifest_hides_no_other_checkpoint(ledger: Ledger, repo: Path, content: bytes, why: str) -> None:
    first = ledger.record(make_draft(ledger))
    second = ledger.record(make_draft(ledger, "run-2"))
    replace(ledger, repo, f"{first.directory}/manifest.json", content)
    sound, (damaged,) = ledger.survey()
    assert [c.name for c in sound] == [second.name] and damaged.name == first.name and why in damaged.problem
    assert ledger.find("2") == second == ledger.find("latest")
    for read in (ledger.checkpoints, lambda: ledger.find("1"), lambda: ledger.find(first.name)):
        with pytest.raises(LedgerError, match=f"{first.name} is damaged: its manifest {why}.*checkpoint verify 1"):
            read()
    git(repo, "tag", "-d", f"checkpoint/{second.name}")  # one more thing to find, in a sound one
    found = {p.where: p.text for p in verify_ledger(ledger)}
    assert (
        why in found[f"{first.name}/manifest.json"]
        and "was altered in ledger commit" in found[f"{first.directory}/manifest.json"]
    )
    assert found[f"tag checkpoint/{second.name}"] == "is missing"
    assert why in {p.where: p.text for p in verify_ledger(ledger, ledger.look_up("1"))}[f"{first.name}/manifest.json"]


@pytest.mark.parametrize("lost", ["gone", "cut", "empty"])
def test_a_manifest_that_git_cannot_read_hides_no_other_checkpoint(ledger: Ledger, repo: Path, lost: str) -> None:
    first, second, third = (ledger.record(make_draft(ledger, f"run-{number}")) for number in range(3))
    stored = loose(repo, git(repo, "rev-parse", f"checkpoints:{second.directory}/manifest.json"))
    half = stored.read_bytes()[: stored.stat().st_size // 2]
    stored.unlink()
    if lost != "gone":
        stored.write_bytes(half if lost == "cut" else b"")
    sound, (damaged,) = ledger.survey()
    assert (
        sound == [first, third] and damaged.name == second.name and "git has lost or damaged object" in damaged.problem
    )
    assert second.name in {problem.where for problem in verify_ledger(ledger, damaged)}


def test_a_ledger_whose_tree_is_lost_is_not_taken_for_an_empty_one(ledger: Ledger, repo: Path) -> None:
    ledger.record(make_draft(ledger))
    loose(repo, git(repo, "rev-parse", "checkpoints^{tree}")).unlink()
    with pytest.raises(LedgerError, match="ls-tree"):
        ledger.survey()


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("facts", None),
        ("facts", 5),
        ("source", []),
        ("source", {"commit": 5}),
        ("author", None),
        ("number", "1"),
        ("number", float("nan")),
        ("files", {"x": 3}),
        ("kernel", "\ud800"),
        ("recorded_at", "0001-01-01T00:00:00"),
        ("recorded_at", 5),
        ("previous", 5),
        ("facts", {"driver": [float("inf")]}),
    ],
)
def test_a_manifest_whose_members_are_of_another_kind_is_damaged(
    ledger: Ledger, repo: Path, member: str, value: object
) -> None:
    first = ledger.record(make_draft(ledger))
    replace(ledger, repo, f"{first.directory}/manifest.json", json.dumps({**first.manifest, member: value}).encode())
    (damaged,) = ledger.survey()[1]
    assert f"has no {member!r}" in damaged.problem
    assert any(member in problem.text for problem in verify_ledger(ledger, damaged))


@pytest.mark.parametrize("member", [{"digest": 5}, {"person": None}, {"reason": []}, {"checkpoint": "1"}])
def test_a_decision_whose_members_are_of_another_kind_is_said(
    ledger: Ledger, repo: Path, member: dict[str, object]
) -> None:
    first = ledger.record(make_draft(ledger))
    ledger.decide(first, "approve", "good", 3.0)
    path = "approvals/0001/0001.json"
    replace(ledger, repo, path, json.dumps({**json.loads(git(repo, "show", f"checkpoints:{path}")), **member}).encode())
    with pytest.raises(LedgerError, match=f"{path} is not a decision"):
        ledger.approvals(first)
    assert any(f"{path} is not a decision" in problem.text for problem in verify_ledger(ledger))


def test_what_cannot_be_made_sense_of_is_altered_or_a_mistake_of_ours(ledger: Ledger, repo: Path) -> None:
    first = ledger.record(make_draft(ledger))
    with pytest.raises(AttributeError), read_as_recorded(ledger, first):
        None.get("x")  # type: ignore[attr-defined]
    replace(ledger, repo, f"{first.directory}/results.json", b"null")
    with (
        pytest.raises(LedgerError, match=rf"{first.name} was altered: .*results.json.* checkpoint verify 1"),
        read_as_recorded(ledger, ledger.find("1")),
    ):
        json.loads(ledger.files(ledger.find("1"))["results.json"]).get("x")


def test_a_checkpoint_without_a_manifest_is_damaged(ledger: Ledger, repo: Path) -> None:
    first = ledger.record(make_draft(ledger))
    second = ledger.record(make_draft(ledger, "run-2"))
    git(repo, "switch", "-q", "checkpoints")
    git(repo, "rm", "-q", f"{first.directory}/manifest.json")
    git(repo, "commit", "-qm", "Record evil")
    git(repo, "switch", "-q", "main")
    sound, (damaged,) = ledger.survey()
    assert [c.name for c in sound] == [second.name] and (damaged.name, damaged.problem) == (first.name, "is missing")
    assert "is missing" in {p.text for p in verify_ledger(ledger) if p.where == f"{first.name}/manifest.json"}


def test_a_branch_that_was_set_back_is_found(ledger: Ledger, repo: Path) -> None:
    ledger.record(make_draft(ledger))
    second = ledger.record(make_draft(ledger, "run-2"))
    git(repo, "update-ref", "refs/heads/checkpoints", "checkpoints~1")
    assert [p.where for p in verify_ledger(ledger)] == [f"tag checkpoint/{second.name}"]
    git(repo, "branch", "kept-aside", second.commit)  # as the ledger advises where two have grown apart
    assert not verify_ledger(ledger)
    git(repo, "branch", "-D", "kept-aside")
    git(repo, "update-ref", "refs/heads/checkpoints", "main")
    assert len(verify_ledger(ledger)) == 2


def test_a_decision_that_the_branch_lost_is_found_and_nothing_is_recorded_over_it(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=False))
    reject(ledger, checkpoint, reason="p99 looks odd", seen=checkpoint.digest, at=3.0)
    whole = git(repo, "rev-parse", "checkpoints")
    git(repo, "update-ref", "refs/heads/checkpoints", "checkpoints~1")
    (problem,) = verify_ledger(ledger)
    assert problem.where.startswith("tag checkpoint/0001-reject-") and "does not hold any more" in problem.text
    for attempt in (
        lambda: require_whole(ledger),  # what `phase run` asks first
        lambda: approve(
            ledger, checkpoint, reason="again", seen=checkpoint.digest, at=4.0, terms=Terms(four_eyes=False)
        ),
        lambda: ledger.record(make_draft(ledger, "run-2")),
    ):
        with pytest.raises(
            LedgerError, match=f"checkpoint/0001-reject-.*git update-ref refs/heads/checkpoints {whole[:12]}"
        ):
            attempt()
    git(repo, "update-ref", "refs/heads/checkpoints", whole)
    require_whole(ledger)
    assert not verify_ledger(ledger)


def test_a_tag_of_a_decision_is_checked(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=False))
    (name,) = git(repo, "tag", "-l", "checkpoint/0001-approve-*").split()
    git(repo, "tag", "-f", "-a", "-m", f"Decision-Digest: {'0' * 64}", name, "checkpoints")
    assert [p.text for p in verify_ledger(ledger)] == ["names another decision"]
    git(repo, "tag", "-d", name)
    assert [p.text for p in verify_ledger(ledger)] == ["is missing"]


def test_a_decision_from_before_decisions_were_tagged_needs_no_tag(
    ledger: Ledger, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    monkeypatch.setattr("phases.ledger.decisions.SCHEMA", UNTAGGED)
    approve(ledger, checkpoint, reason="fine", seen=checkpoint.digest, at=2.0, terms=Terms(four_eyes=False))
    git(repo, "tag", "-d", *git(repo, "tag", "-l", "checkpoint/0001-approve-*").split())
    assert not verify_ledger(ledger)
    ledger.record(make_draft(ledger, "run-2"))
    git(repo, "update-ref", "refs/heads/checkpoints", checkpoint.commit)
    assert verify_ledger(ledger)  # a checkpoint followed: now its tag holds the decision too


def test_a_tag_prefix_without_a_slash_protects_as_well(repo: Path) -> None:
    ledger = Ledger(repo, tag_prefix="gate-")
    ledger.record(make_draft(ledger))
    second = ledger.record(make_draft(ledger, "run-2"))
    git(repo, "update-ref", "refs/heads/checkpoints", "checkpoints~1")
    assert [p.where for p in verify_ledger(ledger)] == [f"tag gate-{second.name}"]


def test_an_object_replaced_by_git_replace_is_read_as_recorded(ledger: Ledger, repo: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    files = ledger.files(checkpoint)
    other = ledger.git.text("hash-object", "-w", "--stdin", stdin=b"evil")
    git(repo, "replace", git(repo, "rev-parse", f"checkpoints:{checkpoint.directory}/benchmark.txt"), other)
    assert ledger.files(checkpoint) == files and not verify_ledger(ledger)


def test_a_callers_git_environment_does_not_lead_elsewhere(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_DIR", "GIT_COMMON_DIR", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY"):
        monkeypatch.setenv(name, "/nonexistent")
    ledger.record(make_draft(ledger))
    assert not verify_ledger(ledger)


def test_export_is_repeatable_and_never_overwrites(ledger: Ledger, tmp_path: Path) -> None:
    checkpoint = ledger.record(make_draft(ledger))
    directory = export(ledger, checkpoint, tmp_path / "out")
    assert export(ledger, checkpoint, tmp_path / "out") == directory
    (directory / "benchmark.txt").write_text("mine\n")
    with pytest.raises(LedgerError, match="holds something else"):
        export(ledger, checkpoint, tmp_path / "out")
    assert (directory / "benchmark.txt").read_text() == "mine\n"
