"""Shell completion, through the shells themselves where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def _environment(**more):
    bin_directory = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{bin_directory}:{os.environ['PATH']}", **more}


def _completed(directory, *words):
    """What a shell is offered for the last of the words."""
    env = _environment(COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1), _PHASE_COMPLETE="bash_complete")
    done = subprocess.run(
        [sys.executable, "-c", "from phases.cli.main import main; main()"],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_commands_subcommands_and_options(tmp_path):
    assert {"run", "status", "gate", "completion"} <= set(_completed(tmp_path, "phase", ""))
    assert _completed(tmp_path, "phase", "gate", "") == ["review", "approve", "reject", "override"]
    assert _completed(tmp_path, "phase", "status", "--te") == ["--textfile"]
    assert _completed(tmp_path, "phase", "no-such-command", "x") == []


def test_phases_checkpoints_and_playbooks(repository):
    assert _completed(repository.path, "phase", "run", "") == ["build-parity"]
    assert _completed(repository.path, "phase", "gate", "review", "") == []
    repository.run()
    assert _completed(repository.path, "phase", "gate", "review", "") == ["1"]
    assert _completed(repository.path, "phase", "checkpoint", "show", "000") == ["0001-build-parity-PASS"]
    assert _completed(repository.path, "phase", "status", "-p", "") == ["playbook.yaml"]
    playbook = repository.path / "playbook.yaml"
    playbook.write_text(playbook.read_text().replace("gate:", "gaet:"))  # a mistake the loader refuses
    assert _completed(repository.path, "phase", "plan", "b") == ["build-parity"]
    playbook.write_text("phases: [")
    assert _completed(repository.path, "phase", "plan", "b") == []


def test_a_strangers_playbook_puts_no_code_into_the_command_line(tmp_path):
    deep = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]" for i in range(12))
    (tmp_path / "playbook.yaml").write_text(
        f'{deep}\nphases: {{build-parity: {{}}, "$(touch x)": {{}}, "a b": {{}}, "`x`": {{}}, 5: {{}}, "x\\ny": {{}}}}\n'
    )
    assert _completed(tmp_path, "phase", "run", "") == ["build-parity"]
    (tmp_path / "playbook.yaml").write_text(f"{deep}\nphases: *a11\n")  # texts of gigabytes, were one made of it
    assert _completed(tmp_path, "phase", "run", "") == []
    (tmp_path / "playbooks").mkdir()
    for name in ("$(touch x).yaml", "a b.yaml", "fine.yaml"):
        (tmp_path / "playbooks" / name).touch()
    assert _completed(tmp_path, "phase", "status", "-p", "playbooks/") == ["playbooks/fine.yaml"]


def test_outside_of_a_repository_nothing_is_offered_and_nothing_fails(tmp_path):
    for words in (("phase", "run", ""), ("phase", "gate", "review", ""), ("phase", "checkpoint", "diff", "1", "")):
        assert _completed(tmp_path, *words) == []


@pytest.mark.parametrize("words", ["phase ", "phase gate "])
def test_completing_commands_imports_none_of_them(words, tmp_path):
    code = (
        "import os, sys\nos.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n"
        "from phases.cli.main import cli\ntry:\n    cli.main(prog_name='phase')\nexcept SystemExit: pass\n"
        "print([m for m in ('phases.cli.run', 'phases.cli.checkpoint', 'yaml', 'rich', 'torch') if m in sys.modules], file=sys.stderr)"
    )
    env = _environment(COMP_WORDS=words, COMP_CWORD=str(len(words.split())), _PHASE_COMPLETE="bash_complete")
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert shown.stderr.strip() == "[]"


def test_bash_completes_with_the_script(tmp_path):
    line = 'eval "$(phase completion bash)"; COMP_WORDS=(phase gate app); COMP_CWORD=2; _phase_completion phase; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "approve\n", done.stderr


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("bash", "complete -o nosort -F _phase_completion phase"),
        ("zsh", "#compdef phase"),
        ("fish", "complete --no-files --command phase"),
    ],
)
def test_each_shells_script(phase, shell, words, tmp_path):
    script = phase("completion", shell).stdout
    assert words in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)
    assert phase.json("completion", shell)["script"] in script


def test_a_shell_nobody_knows(phase):
    assert "'bash', 'zsh', 'fish'" in phase("completion", "csh", code=2).stderr
