"""Bad input: one clear paragraph, the right exit code, nothing lost, the ledger as it was."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys

import pytest


@pytest.fixture
def ledger_unchanged(repository):
    repository.run()
    before = repository.git("rev-parse", "checkpoints"), repository.git("for-each-ref")
    yield
    assert (repository.git("rev-parse", "checkpoints"), repository.git("for-each-ref")) == before


pytestmark = pytest.mark.usefixtures("ledger_unchanged")


def _edit(repository, old, new):
    path = repository.path / "playbook.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _one_paragraph(text, *words):
    assert text.count("\n\n") == 0 and len(text) < 1500
    for word in words:
        assert word in text, text


def test_every_mistake_of_a_playbook_with_line_and_nearest_name(repository, phase):
    _edit(repository, "review: required", "reviw: required\n    device: gpu")
    _edit(repository, "rule: parity", "rule: party")
    done = phase("run", code=2)
    _one_paragraph(
        done.stderr,
        "3 mistakes",
        "playbook.yaml:7",
        "did you mean 'review'",
        "playbook.yaml:8",
        "playbook.yaml:11",
        "did you mean 'parity'",
    )


def test_yaml_that_cannot_be_parsed(repository, phase):
    _edit(repository, "    gate:", "   gate:")
    _one_paragraph(phase("run", code=2).stderr, "playbook.yaml:8", "not valid YAML")


def test_a_playbook_that_is_not_there(phase):
    _one_paragraph(phase("run", "-p", "no.yaml", code=2).stderr, "no.yaml", "No such file")


def test_no_playbook_at_all(phase, tmp_path):
    _one_paragraph(phase("status", cwd=tmp_path, code=2).stderr, "no playbook", "phase init")


def test_an_unknown_phase(phase):
    _one_paragraph(phase("run", "build-party", code=2).stderr, "'build-party'", "did you mean 'build-parity'")
    _one_paragraph(phase("run", "full-rollout", code=2).stderr, "no section for phase 'full-rollout'")


def test_an_unknown_command(phase):
    _one_paragraph(phase("chekpoint", code=2).stderr, "did you mean 'checkpoint'")


def test_errors_speak_json_too(phase):
    import json

    answer = json.loads(phase("run", "build-party", "--json", code=2).stdout)
    assert answer["exit"] == 2 and "build-party" in answer["error"]


def test_a_broken_kernel_file(repository, phase):
    path = repository.path / "kernel.yaml"
    path.write_text(path.read_text().replace("tolerances", "tolerance").replace("role: baseline", "role: base"))
    _one_paragraph(phase("run", code=2).stderr, "kernel.yaml:", "did you mean 'tolerances'", "did you mean 'baseline'")


def _architectures(repository, *names):
    _edit(repository, "review: required", f"review: required\n    architectures: [{', '.join(names)}]")


def test_a_missing_compiler(repository, phase, tmp_path):
    _architectures(repository, "x86-64-v3")
    _one_paragraph(
        phase("run", "build-parity", code=1, env={"CXX": "/nowhere/g++"}).stderr, "/nowhere/g++", "apt-get install g++"
    )
    empty = tmp_path / "bin"
    empty.mkdir()
    for name in ("git",):
        (empty / name).symlink_to(shutil.which(name))
    _one_paragraph(
        phase("run", "build-parity", code=1, env={"CXX": "", "PATH": str(empty)}).stderr, "there is no C++ compiler"
    )


def _program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_wrong_nvcc(repository, phase, tmp_path):
    _architectures(repository, "sm_90")
    wrong = _program(tmp_path / "nvcc", "echo gcc 12.2")
    _one_paragraph(
        phase("run", "build-parity", code=1, env={"NVCC": wrong}).stderr, wrong, "is not NVIDIA's nvcc", "gcc 12.2"
    )
    _one_paragraph(
        phase("run", "build-parity", code=1, env={"NVCC": "/nowhere/nvcc"}).stderr, "/nowhere/nvcc", "does not exist"
    )


def test_an_architecture_nvcc_does_not_know(repository, phase, tmp_path):
    _architectures(repository, "sm_80", "sm_120")
    old = 'case $1 in --version) echo "nvcc: NVIDIA"; echo "release 11.8, V11.8.89";; --list-gpu-arch) printf "compute_80\\ncompute_90\\n";; esac'
    done = phase("run", "build-parity", code=1, env={"NVCC": _program(tmp_path / "nvcc", old)})
    _one_paragraph(done.stderr, "nvcc 11.8", "does not know sm_120", "sm_80, sm_90", "newer")


def test_an_architecture_nobody_knows(repository, phase):
    _architectures(repository, "x86-64-v33")
    refused = phase("run", "build-parity", code=2).stderr  # a mistake of the playbook, said before anything is started
    assert (
        "playbook.yaml:8: phases.build-parity.architectures[0]: there is no architecture 'x86-64-v33' (did you mean 'x86-64-v3'?)"
        in refused
    )


def test_an_optional_architecture_is_skipped_with_its_reason(repository, phase):
    _edit(repository, "review: required", "review: required\n    optional_architectures: [sm_90]")
    findings = phase.json("doctor", env={"NVCC": "/nowhere/nvcc"})["findings"]
    (arch,) = [row for row in findings if row["name"] == "builds sm_90"]
    assert arch["health"] == "warning" and "/nowhere/nvcc" in arch["found"] and arch["cure"]


def test_too_little_disk(repository, phase):
    _edit(repository, "review: required", "review: required\n    free_disk_mib: 999999999")
    _one_paragraph(phase("run", "build-parity", code=1).stderr, "MiB are free", "free_disk_mib", "Free some space")


def test_nobody_knows_who_you_are(repository, phase, tmp_path):
    repository.git("config", "--unset", "user.name")
    repository.git("config", "--unset", "user.email")
    environment = {
        "HOME": str(tmp_path),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "user.useConfigOnly",
        "GIT_CONFIG_VALUE_0": "true",
    }
    _one_paragraph(phase("run", "build-parity", code=1, env=environment).stderr, "git config user.name")


def test_outside_of_git(repository, phase, tmp_path):
    shutil.copytree(repository.path, tmp_path / "copy", ignore=shutil.ignore_patterns(".git", ".phase"))
    _one_paragraph(
        phase(
            "run", "build-parity", code=1, cwd=tmp_path / "copy", env={"GIT_CEILING_DIRECTORIES": str(tmp_path)}
        ).stderr,
        "not inside a git work tree",
        "git init",
    )


def test_another_run_holds_the_lock(repository, phase):
    from phases.base.clock import SystemClock
    from phases.run.lock import Lock

    with Lock(repository.path / ".phase", "light", SystemClock()).held("phase run build-parity"):
        _one_paragraph(phase("run", "build-parity", code=6).stderr, f"process {os.getpid()}", "s ago", "phase unlock")
        assert phase.json("status")["running"]["pid"] == os.getpid()


def _in_mount_namespace(script, directory):
    """Run `phase run` after a mount that only this process sees. Skips where that is not allowed."""
    if (
        os.getuid()
        or not shutil.which("unshare")
        or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs root and mount namespaces")
    command = f'{script} && exec "$0" -m phases.cli.main run build-parity'
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", command, sys.executable],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_read_only_repository(repository):
    done = _in_mount_namespace('mount --bind . . && mount -o remount,ro,bind . && cd "$PWD"', repository.path)
    assert done.returncode == 1, done.stderr
    _one_paragraph(done.stderr, "not allowed to write", "Read-only", "in a clone that is")


def test_a_full_disk(repository):
    done = _in_mount_namespace(
        "mount -t tmpfs -o size=4k none .phase && head -c 4096 /dev/zero > .phase/filler", repository.path
    )
    assert done.returncode == 1, done.stderr
    _one_paragraph(done.stderr, "no space left", "Free some space")
