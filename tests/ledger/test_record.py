"""Recording checkpoints in real repositories, in every state a repository can be in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phases.base.errors import LedgerError
from phases.base.verdict import Verdict
from phases.ledger import source
from phases.ledger.approvals import Terms, approve
from phases.ledger.ledger import Ledger
from phases.ledger.verify import verify_ledger
from tests.ledger.conftest import git, identify, make_draft


def test_a_checkpoint_has_the_previous_one_and_the_source_as_parents(ledger: Ledger, repo: Path) -> None:
    first = ledger.record(make_draft(ledger, "run-1"))
    second = ledger.record(make_draft(ledger, "run-2", Verdict.FAIL))
    head = git(repo, "rev-parse", "HEAD")
    assert git(repo, "rev-list", "--parents", "-1", second.commit).split() == [second.commit, first.commit, head]
    assert [c.name for c in ledger.checkpoints()] == ["0001-build-parity-PASS", "0002-build-parity-FAIL"]
    assert git(repo, "cat-file", "-t", f"checkpoint/{second.name}") == "tag"
    assert git(repo, "rev-parse", f"checkpoint/{second.name}^{{commit}}") == second.commit
    assert second.manifest["previous"] == first.digest


def test_work_tree_index_and_branch_stay_untouched(ledger: Ledger, repo: Path) -> None:
    (repo / "kernel.py").write_text("x = 2\n")
    (repo / "staged.py").write_text("y = 1\n")
    git(repo, "add", "staged.py")
    before = (git(repo, "status", "--porcelain"), git(repo, "rev-parse", "HEAD"), (repo / ".git/index").read_bytes())
    ledger.record(make_draft(ledger))
    assert (
        git(repo, "status", "--porcelain"),
        git(repo, "rev-parse", "HEAD"),
        (repo / ".git/index").read_bytes(),
    ) == before


def test_the_same_run_is_recorded_once_and_other_content_is_refused(ledger: Ledger) -> None:
    first = ledger.record(make_draft(ledger))
    assert ledger.record(make_draft(ledger)) == first
    with pytest.raises(
        LedgerError, match=r"run-1 is already recorded as 0001-build-parity-PASS with other content \(benchmark.txt\)"
    ):
        ledger.record(make_draft(ledger, table=b"other\n"))
    assert len(ledger.checkpoints()) == 1


def test_a_stranger_can_check_the_sums_with_coreutils(ledger: Ledger, tmp_path: Path) -> None:
    for path, data in ledger.files(ledger.record(make_draft(ledger))).items():
        (tmp_path / "out" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / path).write_bytes(data)
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=tmp_path / "out", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": OK") == 5


def test_dirty_tree_is_recorded_as_such(ledger: Ledger, repo: Path) -> None:
    (repo / "kernel.py").write_text("x = 2\n")
    facts = ledger.record(make_draft(ledger)).manifest["source"]
    assert facts["dirty"] and facts["changed"] == [" M kernel.py"] and len(facts["difference"]) == 64
    (repo / "kernel.py").write_text("x = 3\n")
    assert source.describe(ledger.git)["difference"] != facts["difference"]


def test_detached_head(ledger: Ledger, repo: Path) -> None:
    git(repo, "checkout", "-q", "--detach")
    recorded = ledger.record(make_draft(ledger))
    assert recorded.manifest["source"]["branch"] is None
    assert recorded.manifest["source"]["commit"] == git(repo, "rev-parse", "HEAD")
    assert not verify_ledger(ledger)


def test_repository_without_commits(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.mkdir()
    git(path, "init", "-q")
    identify(path)
    ledger = Ledger(path)
    recorded = ledger.record(make_draft(ledger))
    assert recorded.manifest["source"]["commit"] is None
    assert (
        len(git(path, "rev-list", "--parents", "-1", recorded.commit).split()) == 2
    )  # itself and the ledger's beginning
    assert not verify_ledger(ledger)


def test_shallow_clone_records_and_pushes(repo: Path, bare: Path, tmp_path: Path) -> None:
    for number in range(3):
        git(repo, "commit", "-q", "--allow-empty", "-m", f"Change {number}")
    git(repo, "push", "-q", str(bare), "main")
    clone = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{bare}", str(clone))
    identify(clone)
    warned: list[str] = []
    ledger = Ledger(clone, remote="origin", warn=warned.append)
    recorded = ledger.record(make_draft(ledger))
    assert recorded.manifest["source"]["shallow"] and warned == []
    assert git(bare, "rev-parse", "checkpoints") == recorded.commit
    assert not verify_ledger(ledger)


def test_branch_checked_out_elsewhere_is_refused_with_a_cure(ledger: Ledger, repo: Path, tmp_path: Path) -> None:
    first = ledger.record(make_draft(ledger))
    git(repo, "worktree", "add", "-q", str(tmp_path / "look"), "checkpoints")
    with pytest.raises(LedgerError, match=r"checked out at .*look.*switch --detach"):
        ledger.record(make_draft(ledger, "run-2"))
    assert git(repo, "rev-parse", "checkpoints") == first.commit
    git(tmp_path / "look", "switch", "-q", "--detach")
    assert ledger.record(make_draft(ledger, "run-2")).number == 2


def test_no_identity_is_said_before_anything_is_written(
    ledger: Ledger, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repo, "config", "--unset", "user.name")
    git(repo, "config", "--unset", "user.email")
    git(repo, "config", "user.useConfigOnly", "true")
    objects = git(repo, "count-objects")
    with pytest.raises(LedgerError, match="git config user.name"):
        ledger.record(make_draft(ledger))
    assert git(repo, "count-objects") == objects and ledger.tip() is None


def test_two_runs_at_once_both_get_a_number(ledger: Ledger, repo: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from phases.ledger.ledger import Ledger\n"
        "from tests.ledger.conftest import make_draft\n"
        "ledger = Ledger(Path(sys.argv[1])); print(ledger.record(make_draft(ledger, sys.argv[2])).name)"
    )
    root = Path(__file__).parents[2]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(repo), f"run-{i}"], cwd=root, stdout=subprocess.PIPE, text=True
        )
        for i in range(5)
    ]
    names = {run.communicate(timeout=400)[0].strip() for run in runs}
    assert all(run.returncode == 0 for run in runs)
    assert names == {f"{i:04d}-build-parity-PASS" for i in range(1, 6)}
    assert not verify_ledger(ledger)


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a/../b", ".git/config", "a//b", "line\nbreak"])
def test_paths_that_leave_the_checkpoint_are_refused(ledger: Ledger, path: str) -> None:
    draft = make_draft(ledger)
    draft.files[path] = b"x"
    with pytest.raises(LedgerError, match="cannot be the path"):
        ledger.record(draft)
    assert ledger.tip() is None


def test_full_disk_leaves_the_ledger_as_it_was(ledger: Ledger, repo: Path) -> None:
    first = ledger.record(make_draft(ledger))
    script = (
        "import resource, signal, sys; from pathlib import Path; from phases.ledger.ledger import Ledger\n"
        "from phases.base.errors import LedgerError; from tests.ledger.conftest import make_draft\n"
        "ledger = Ledger(Path(sys.argv[1])); draft = make_draft(ledger, 'run-2')\n"
        "import os; draft.files['big.bin'] = os.urandom(1 << 20)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "try:\n    ledger.record(draft)\nexcept LedgerError as fault:\n    print(fault)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(repo)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("ledger: `git hash-object -w --stdin` failed")
    assert git(repo, "rev-parse", "checkpoints") == first.commit
    assert not verify_ledger(ledger)


def test_read_only_repository(ledger: Ledger, repo: Path) -> None:
    first = ledger.record(make_draft(ledger))
    script = (
        "import sys; from pathlib import Path; from phases.ledger.ledger import Ledger\n"
        "from phases.base.errors import LedgerError; from tests.ledger.conftest import make_draft\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "try:\n    ledger.record(make_draft(ledger, 'run-2'))\nexcept LedgerError as fault:\n    print(fault)\n"
    )
    mounted = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", mounted, "sh", str(repo), sys.executable, script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert "mount it writable" in done.stdout or "may write the repository" in done.stdout, done.stdout + done.stderr
    assert git(repo, "rev-parse", "checkpoints") == first.commit and not verify_ledger(ledger)


def test_signed_when_git_is_set_to_sign(ledger: Ledger, repo: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (tmp_path / "allowed").write_text(f"ada@example.org {key.with_suffix('.pub').read_text()}")
    for name, value in {
        "gpg.format": "ssh",
        "user.signingKey": str(key),
        "commit.gpgSign": "true",
        "tag.gpgSign": "true",
        "gpg.ssh.allowedSignersFile": str(tmp_path / "allowed"),
    }.items():
        git(repo, "config", name, value)
    recorded = ledger.record(make_draft(ledger))
    git(repo, "verify-commit", recorded.commit)
    git(repo, "verify-tag", f"checkpoint/{recorded.name}")
    approve(ledger, recorded, reason="fine", seen=recorded.digest, at=2.0, terms=Terms(four_eyes=False))
    git(repo, "verify-tag", *git(repo, "tag", "-l", "checkpoint/0001-approve-*").split())
    assert not verify_ledger(ledger)
    assert ledger.record(make_draft(ledger)) == recorded


def test_what_is_written_does_not_depend_on_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_git_configuration: None
) -> None:
    """Byte for byte: commit and tag have the same ids under the settings of this test and under none."""
    ids = []
    for name in ("as-set", "plain"):
        path = tmp_path / name
        git(tmp_path, "init", "-q", str(path))
        identify(path)
        ledger = Ledger(path, sign="never")
        recorded = ledger.record(make_draft(ledger))
        ids.append((recorded.commit, git(path, "rev-parse", f"checkpoint/{recorded.name}")))
        assert not verify_ledger(ledger) and not list((path / ".git").glob("sharedindex*"))
        for key in [key for key in os.environ if key.startswith("GIT_")]:
            monkeypatch.delenv(key)
    assert ids[0] == ids[1]


def test_found_by_number_name_digest_and_latest(ledger: Ledger) -> None:
    first, second = ledger.record(make_draft(ledger)), ledger.record(make_draft(ledger, "run-2"))
    for name in ("1", "0001", first.name, f"checkpoint/{first.name}", first.digest[:8], first.commit[:8]):
        assert ledger.find(name) == first
    assert ledger.find("latest") == second
    with pytest.raises(LedgerError, match="names no checkpoint.*0002-build-parity-PASS"):
        ledger.find("7")


def test_the_manifest_is_json_a_person_can_read(ledger: Ledger) -> None:
    files = ledger.files(ledger.record(make_draft(ledger)))
    manifest = json.loads(files["manifest.json"])
    assert manifest["files"]["benchmark.txt"]["bytes"] == 9
    assert b'\n  "author": "Ada <ada@example.org>",\n' in files["manifest.json"]
