"""Help: every command explains itself with an example; starting is light."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from phases.cli.main import cli


def _commands(group, prefix=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*prefix, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, (*prefix, name))


@pytest.mark.parametrize("path", [path for path, _ in _commands(cli)], ids=" ".join)
def test_every_command_has_a_help_with_an_example(path):
    shown = CliRunner().invoke(cli, [*path, "--help"], prog_name="phase")
    assert shown.exit_code == 0
    assert "\n  Examples:\n" in shown.output and f"phase {' '.join(path)}" in shown.output.split("Examples:")[1]


@pytest.mark.parametrize(
    ("path", "command"),
    [(path, command) for path, command in _commands(cli) if not isinstance(command, click.Group)],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_every_command_speaks_json(path, command):
    assert "--json" in [option for parameter in command.params for option in parameter.opts], path


def test_help_names_the_exit_codes():
    shown = CliRunner().invoke(cli, ["--help"], prog_name="phase").output
    assert "3  waiting for review" in shown and "8  rollback incomplete" in shown


@pytest.mark.parametrize("group", [[], ["gate"]], ids=" ".join)
def test_a_group_alone_shows_its_help_once(group):
    alone, asked = (
        subprocess.run(
            [sys.executable, "-m", "phases.cli.main", *group, *more], capture_output=True, text=True, check=False
        )
        for more in ([], ["--help"])
    )
    assert (alone.returncode, alone.stdout, alone.stderr) == (2, "", asked.stdout)


HEAVY = ("torch", "numpy", "scipy", "matplotlib", "rich", "fabric", "paramiko", "requests", "yaml")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    code = f"import sys\nfrom phases.cli.main import cli\ncli.main({arguments!r}, standalone_mode=False)\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = eval(shown.stdout.splitlines()[-1])
    assert set(heavy) <= ({"yaml"} if arguments[0] == "run" else set())


@pytest.mark.parametrize("arguments", [["status"], ["gate", "review"], ["checkpoint", "list"]])
def test_looking_at_the_ledger_does_not_import_torch(arguments, repository, monkeypatch):
    repository.run()
    monkeypatch.chdir(repository.path)
    code = f"import sys\nfrom phases.cli.main import cli\ncli.main({arguments!r}, standalone_mode=False)\nprint('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "False"
