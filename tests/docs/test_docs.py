"""The documentation is true as far as a machine can tell: commands exist, examples run, playbooks check, links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from phases.cli.main import cli
from phases.playbook import loader
from tests.docs.commands import HERE, PAGES, STAGES, Block, blocks, phase_lines
from tests.export.kernels import solution


def _name(page):
    return str(page.relative_to(HERE))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_and_option_exists(page):
    calls = phase_lines(page.read_text(encoding="utf-8"))
    for words in calls:
        _parse(words)
    if page.parent.name == "docs":
        assert calls


def _parse(words):
    """Resolve the command and parse its options as click would; values are not looked at."""
    command, context, rest = cli, click.Context(cli), list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        assert found is not None, f"phase {' '.join(words)}: there is no command {rest[0]!r}"
        command, context, rest = found, click.Context(found, parent=context, info_name=rest[0]), rest[1:]
    try:
        command.make_parser(context).parse_args(args=rest)
    except click.BadOptionUsage as fault:
        if not (words[-1] == fault.option_name and "requires an argument" in fault.message):  # only named, as in `--to`
            pytest.fail(f"phase {' '.join(words)}: {fault.message}")
    except click.UsageError as fault:
        pytest.fail(f"phase {' '.join(words)}: {fault.message}")


def test_the_parser_of_this_test_notices():
    with pytest.raises(AssertionError):
        _parse(["chekpoint", "list"])
    with pytest.raises(pytest.fail.Exception):
        _parse(["run", "--resum"])
    assert phase_lines("x\n\n    phase run --yes   # go\n`phase status` and `phase init DIR`") == [
        ["run", "--yes"],
        ["status"],
        ["init", "DIR"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_console_block_says_where_it_runs(page):
    for block in blocks(page):
        if block.language == "console":
            assert block.stage in STAGES, block.text
            assert block.commands, block.text


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_playbooks_in_the_pages_are_right(tmp_path):
    """A whole playbook as it stands; sections with what a playbook must have besides."""
    head = "schema: phasegate/playbook/v1\nname: page\nkernel: kernels/verify_attn/kernel.yaml\n"
    phases = "phases:\n  build-parity:\n    gate: {rules: [{rule: parity}]}\n"
    checked = []
    for block in [
        b for page in PAGES if page.parent in (HERE, HERE / "docs") for b in blocks(page) if b.language == "yaml"
    ]:
        file = tmp_path / f"{len(checked)}.yaml"
        text = (
            block.text
            if "schema: phasegate/playbook" in block.text
            else head + block.text + ("" if "phases:" in block.text else phases)
        )
        file.write_text(text.replace("kernels/", f"{HERE}/kernels/"), encoding="utf-8")
        loader.load(file)
        checked.append(block.page.name)
    assert {"playbook.md", "integration.md"} <= set(checked)


# -- running what the pages say --------------------------------------------------------------------------------------------


class Stage:
    """A shell whose place is kept from block to block."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        home = directory.parent / f"{directory.name}-home"
        home.mkdir()
        identity = {
            f"GIT_{who}_{what}": value
            for who in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", "Ada"), ("EMAIL", "ada@example.org"))
        }
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        self.environment = {
            **os.environ,
            **identity,
            "PATH": path,
            "OMP_NUM_THREADS": "2",
            "XDG_CONFIG_HOME": str(home),
        }

    def run(self, block: Block) -> str:
        """The block's commands one after the other, each with the exit code the page promises; what they printed."""
        script = ["set -u"]
        for command in block.commands:
            line = self._adapted(command.line)
            script.append(
                f"code=0; {line} || code=$?; [ $code = {command.code} ] || {{ echo \"exit $code, not {command.code}: $(cat <<'LINE'\n{line}\nLINE\n)\" >&2; exit 99; }}"
            )
        script.append('pwd > "$WHERE"')
        where = self.directory.parent / f"{self.directory.name}.where"
        done = subprocess.run(
            ["bash", "-c", "\n".join(script)],
            cwd=self.directory,
            env={**self.environment, "WHERE": str(where)},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{_name(block.page)}:\n{block.text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert "Traceback" not in done.stdout + done.stderr
        self.directory = Path(where.read_text().strip())
        return done.stdout

    def _adapted(self, line: str) -> str:
        """Digests are those of this run; how fast the example is depends on who else uses the machine, so no rule may turn on it."""
        if "--digest" in line:
            shown = subprocess.run(
                ["phase", "checkpoint", "list", "--json"],
                cwd=self.directory,
                env=self.environment,
                capture_output=True,
                text=True,
                check=True,
            )
            line = re.sub(
                r"--digest [0-9a-f]{16}", f"--digest {json.loads(shown.stdout)['checkpoints'][-1]['digest'][:16]}", line
            )
        return re.sub(
            r"^(phase init (\S+))",
            r"\1 && sed -i 's/seconds: 1 .*/seconds: 0.2\\n      cases: [4096x64]/; s/at_least: 1.5/at_least: 0.001/' \2/playbook.yaml",
            line,
        )


@pytest.fixture(scope="module")
def scaffold(tmp_path_factory):
    """The first run of docs/tour.md, done."""
    stage = Stage(tmp_path_factory.mktemp("tour"))
    said = [stage.run(block) for block in blocks(HERE / "docs/tour.md") if block.stage == "tour"]
    return stage, said


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_run_goes_as_the_tour_says(scaffold):
    _, said = scaffold
    assert len(said) >= 3 and "0001-build-parity-PASS" in said[0]
    assert "approved" in said[-1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.stage == "kernel" for b in blocks(p))], ids=_name)
def test_what_the_guides_say_of_a_kernel_runs(scaffold, page):
    stage, _ = scaffold
    theirs = json.dumps(solution(definition="fast_norm_float32"))
    (stage.directory / "solution.json").write_text(theirs)
    for command in (["git", "add", "-A"], ["git", "commit", "-qm", "work", "--allow-empty"]):
        subprocess.run(command, cwd=stage.directory, env=stage.environment, check=True)
    for block in blocks(page):
        if block.stage == "kernel":
            stage.run(block)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("clone") / "phasegate"
    subprocess.run(["git", "clone", "-q", "--shared", str(HERE), str(directory)], check=True)
    return Stage(directory)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.stage == "clone" for b in blocks(p))], ids=_name)
def test_what_the_guides_say_of_this_repository_runs(clone, page):
    for block in blocks(page):
        if block.stage == "clone":
            clone.run(block)
