"""`dirty` tells the truth: what git was told to overlook, and what it cannot see, counts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from phases.base.errors import LedgerError
from phases.ledger.git import Git, repository_root
from phases.ledger.source import changed_paths, describe
from tests.ledger import hostile
from tests.ledger.conftest import git, identify


def source(repo: Path) -> dict:
    return describe(Git(repo))


def skip_worktree(repo: Path) -> str:
    git(repo, "update-index", "--skip-worktree", "kernel.py")
    (repo / "kernel.py").write_text("x = 2\n")
    return " M kernel.py"


def skip_worktree_and_gone(repo: Path) -> str:
    git(repo, "update-index", "--skip-worktree", "kernel.py")
    (repo / "kernel.py").unlink()
    return " D kernel.py"


def assume_unchanged(repo: Path) -> str:
    git(repo, "update-index", "--assume-unchanged", "kernel.py")
    (repo / "kernel.py").write_text("x = 2\n")
    return " M kernel.py"


def same_size_same_time(repo: Path) -> str:
    git(repo, "config", "core.trustctime", "false")
    git(repo, "config", "core.checkStat", "minimal")
    path = repo / "kernel.py"
    os.utime(path, (1_600_000_000, 1_600_000_000))
    git(repo, "update-index", "--refresh")
    path.write_text("x = 2\n")
    os.utime(path, (1_600_000_000, 1_600_000_000))
    return " M kernel.py"


def monitor_that_lies(repo: Path) -> str:
    hostile.script(repo / ".git" / "monitor", "printf 'token\\0'")
    git(repo, "config", "core.fsmonitor", str(repo / ".git" / "monitor"))
    git(repo, "update-index", "--fsmonitor")
    git(repo, "status")
    (repo / "kernel.py").write_text("x = 2\n")
    return " M kernel.py"


def mode_unseen(repo: Path) -> str:
    git(repo, "config", "core.fileMode", "false")
    (repo / "kernel.py").chmod(0o755)
    return " M kernel.py"


def clean_filter_that_lies(repo: Path) -> str:
    git(repo, "config", "filter.same.clean", "printf 'x = 1\\n'")
    (repo / ".git" / "info" / "attributes").write_text("kernel.py filter=same\n")
    (repo / "kernel.py").write_text("x = 2\n")
    return " M kernel.py"


def line_ends_edited(repo: Path) -> str:
    git(repo, "config", "core.autocrlf", "input")
    (repo / "kernel.py").write_bytes(b"x = 1\r\n")
    return " M kernel.py"


def untracked_unshown(repo: Path) -> str:
    git(repo, "config", "status.showUntrackedFiles", "no")
    (repo / "new.py").write_text("x = 2\n")
    return "?? new.py"


def added_though_ignored(repo: Path) -> str:
    (repo / ".git" / "info" / "exclude").write_text("new.py\n")
    (repo / "new.py").write_text("x = 2\n")
    git(repo, "add", "--force", "new.py")
    return "A  new.py"


def replaced_commit(repo: Path) -> str:
    """`git replace` makes HEAD read as a commit that holds what lies in the work tree."""
    head = git(repo, "rev-parse", "HEAD")
    (repo / "kernel.py").write_text("x = 2\n")
    git(repo, "commit", "-qam", "Other")
    other = git(repo, "rev-parse", "HEAD")
    git(repo, "update-ref", "refs/heads/main", head)
    git(repo, "replace", head, other)
    return " M kernel.py"


def link_in_place(repo: Path) -> str:
    (repo / ".git" / "elsewhere.py").write_text("x = 1\n")
    (repo / "kernel.py").unlink()
    (repo / "kernel.py").symlink_to(repo / ".git" / "elsewhere.py")
    return " T kernel.py"


def pipe_in_place(repo: Path) -> str:
    (repo / "kernel.py").unlink()
    os.mkfifo(repo / "kernel.py")
    return " T kernel.py"


def repository_inside(repo: Path) -> str:
    git(repo, "init", "-q", "inside")
    (repo / "inside" / "hidden.py").write_text("x = 2\n")
    return "?? inside/"


def broken_repository_inside(repo: Path) -> str:
    (repo / "inside" / ".git").mkdir(parents=True)
    (repo / "inside" / "hidden.py").write_text("x = 2\n")
    return "?? inside/hidden.py"


@pytest.mark.parametrize(
    "change",
    [
        skip_worktree,
        skip_worktree_and_gone,
        assume_unchanged,
        same_size_same_time,
        monitor_that_lies,
        mode_unseen,
        clean_filter_that_lies,
        line_ends_edited,
        untracked_unshown,
        added_though_ignored,
        replaced_commit,
        link_in_place,
        pipe_in_place,
        repository_inside,
        broken_repository_inside,
    ],
    ids=lambda change: change.__name__,
)
def test_a_changed_source_never_looks_clean(repo: Path, change: Callable[[Path], str]) -> None:
    assert not source(repo)["dirty"]
    said = change(repo)
    facts = source(repo)
    assert facts["dirty"] and facts["changed"] == [said] and len(facts["difference"]) == 64
    assert changed_paths(Git(repo)) == said[3:]


@pytest.fixture
def with_submodule(repo: Path, tmp_path: Path) -> Path:
    library = tmp_path / "library"
    git(tmp_path, "init", "-q", "-b", "main", str(library))
    identify(library)
    (library / "lib.py").write_text("y = 1\n")
    git(library, "add", ".")
    git(library, "commit", "-qm", "Begin")
    git(repo, "submodule", "--quiet", "add", str(library), "vendor")
    for key in ("submodule.vendor.ignore", "diff.ignoreSubmodules"):
        git(repo, "config", key, "all")
    git(repo, "config", "-f", ".gitmodules", "submodule.vendor.ignore", "all")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "With a submodule")
    identify(repo / "vendor")
    return repo


@pytest.mark.parametrize("change", ["content", "untracked", "commit", "gone"])
def test_a_changed_submodule_counts_whatever_is_ignored(with_submodule: Path, change: str) -> None:
    assert not source(with_submodule)["dirty"]
    inner = with_submodule / "vendor"
    if change == "gone":
        git(with_submodule, "submodule", "--quiet", "deinit", "-f", "vendor")
        assert not source(with_submodule)["dirty"]  # as in a clone that did not fetch it: nothing else was run
        (inner / "lib.py").write_text("y = 1\n")
    else:
        (inner / ("new.py" if change == "untracked" else "lib.py")).write_text("y = 2\n")
    if change == "commit":
        git(inner, "commit", "-qam", "Other")
    assert source(with_submodule)["changed"] == [" M vendor"]


def test_two_contents_are_two_differences(repo: Path) -> None:
    """Of untracked files too, and of those in a repository inside this one."""
    git(repo, "init", "-q", "inside")
    seen = set()
    for number in range(3):
        (repo / "new.py").write_text("x = 2\n" if number < 2 else "x = 3\n")
        (repo / "inside" / "hidden.py").write_text(f"x = {number}\n")
        seen.add(source(repo)["difference"])
    (repo / "new.py").chmod(0o755)
    seen.add(source(repo)["difference"])
    assert len(seen) == 4
    assert source(repo)["changed"] == ["?? inside/", "?? new.py"]


def test_what_only_this_clone_hides_counts_but_for_what_tools_leave(repo: Path) -> None:
    (repo / ".gitignore").write_text("build/\n")
    git(repo, "add", ".gitignore")
    git(repo, "commit", "-qm", "Ignore what is built")
    (repo / ".git" / "info" / "exclude").write_text("*\n")
    for path in ("build/x.o", ".idea/x.xml", "lib/.DS_Store", "env/lib/x.py", "lib/__pycache__/x.pyc", "kernel.py~"):
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).write_text("")
    (repo / "env" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    assert source(repo)["changed"] == []
    (repo / "sitecustomize.py").write_text("x = 2\n")
    assert source(repo)["changed"] == ["?? sitecustomize.py"]


def test_what_a_checkout_made_otherwise_is_named_with_its_digest(repo: Path) -> None:
    (repo / ".gitattributes").write_text("*.bat text eol=crlf\n")
    (repo / "run.bat").write_text("start\n")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "With line ends")
    (repo / "run.bat").unlink()
    git(repo, "checkout", "--", "run.bat")
    assert (repo / "run.bat").read_bytes() == b"start\r\n"
    facts = source(repo)
    assert facts["converted"] == {"run.bat": hashlib.sha256(b"start\r\n").hexdigest()} and not facts["dirty"]
    (repo / "run.bat").write_bytes(b"stop\r\n")
    assert source(repo)["changed"] == [" M run.bat"]


def test_a_pointer_of_lfs_is_as_good_as_what_it_names(repo: Path) -> None:
    """Without git-lfs, which would have to be believed: the pointer names the digest."""
    weights = b"\x00" * 1000
    pointer = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{hashlib.sha256(weights).hexdigest()}\nsize 1000\n"
    )
    (repo / "weights.bin").write_text(pointer)
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "With weights")
    (repo / "weights.bin").write_bytes(weights)
    assert not source(repo)["dirty"] and not source(repo)["converted"]
    (repo / "weights.bin").write_bytes(b"\x01" * 1000)
    assert source(repo)["changed"] == [" M weights.bin"]


def test_a_sparse_checkout_is_clean_and_says_what_it_leaves_out(repo: Path) -> None:
    for name in ("a/one.py", "b/two.py", "b/three.py"):
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text("x = 1\n")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "Two directories")
    git(repo, "sparse-checkout", "set", "--cone", "a")
    assert not (repo / "b").exists()
    facts = source(repo)
    assert not facts["dirty"] and facts["left_out"] == 2
    (repo / "b").mkdir()
    (repo / "b" / "two.py").write_text("x = 2\n")
    assert source(repo)["changed"] == [" M b/two.py"]


def test_looking_writes_nothing(repo: Path) -> None:
    os.utime(repo / "kernel.py", (1_600_000_000, 1_600_000_000))  # an index that a `git status` would refresh
    before = {path: path.read_bytes() for path in (repo / ".git").rglob("*") if path.is_file()}
    assert not source(repo)["dirty"]
    assert {path: path.read_bytes() for path in (repo / ".git").rglob("*") if path.is_file()} == before


def test_a_repository_of_sha256_and_names_in_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "other"
    git(tmp_path, "init", "-q", "--object-format=sha256", str(path))
    identify(path)
    odd = os.fsdecode(b"od\xffd\n name.py")
    (path / odd).write_text("x = 1\n")
    git(path, "add", ".")
    git(path, "commit", "-qm", "Begin")
    assert not source(path)["dirty"]
    (path / odd).write_text("x = 2\n")
    assert source(path)["changed"] == [" M od\ufffdd\n name.py"]


def test_a_work_tree_elsewhere_is_refused(repo: Path, tmp_path: Path) -> None:
    """`core.worktree` would have another directory compared than the one that is run."""
    (tmp_path / "elsewhere").mkdir()
    git(repo, "config", "core.worktree", str(tmp_path / "elsewhere"))
    with pytest.raises(LedgerError, match="is not inside .*elsewhere") as told:
        repository_root(repo)
    assert "core.worktree" in told.value.hint


def test_why_git_does_not_read_a_repository_is_said(repo: Path) -> None:
    """A damaged one is not "no repository", whose cure would be `git init`."""
    with (repo / ".git" / "config").open("a") as config:
        config.write("[core\n")
    with pytest.raises(LedgerError, match="bad config") as told:
        repository_root(repo)
    assert "git init" not in told.value.hint


@pytest.mark.parametrize("where", ["GIT_SSH_COMMAND", "GIT_SSH", "core.sshCommand", ""])
def test_a_users_way_to_the_remote_is_kept(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Their key, agent or jump host may be in it; without one, ssh asks nobody for a password."""
    program = tmp_path / "my-ssh"
    hostile.script(program, f'echo "$0 $@" > {tmp_path}/called; exit 1')
    if where.startswith("GIT"):
        monkeypatch.setenv(where, str(program))
    elif where:
        git(repo, "config", where, str(program))
    else:
        (tmp_path / "bin").mkdir()
        program.rename(tmp_path / "bin" / "ssh")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(LedgerError):
        Git(repo).network("ls-remote", "ssh://host.example/x.git")
    called = (tmp_path / "called").read_text()
    assert ("BatchMode=yes" in called) is (where == "") and ("my-ssh" in called) is (where != "")
