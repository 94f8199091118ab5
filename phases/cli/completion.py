"""`phase completion`: the script that makes a shell complete `phase`, and what is completed while typing."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from phases.cli.common import example, find_playbook, json_option, print_json

SHELLS = ("bash", "zsh", "fish")
SECONDS = 2.0  # a completion that takes longer is worse than none
_CHECKPOINT = re.compile(r"(\d{4,})-[a-z0-9-]+-(PASS|INCONCLUSIVE|FAIL|ERROR|ABORTED)$")
_PHASE = re.compile(
    r"[a-z0-9-]+"
)  # what goes into a command line must not be code to a shell: the playbook may be anybody's
_PLAIN = re.compile(r"[\w./+@-]+")
_HOW = {
    "bash": "~/.local/share/bash-completion/completions/phase",
    "zsh": "~/.zfunc/_phase (with `fpath+=~/.zfunc` before compinit in ~/.zshrc)",
    "fish": "~/.config/fish/completions/phase.fish",
}


@click.command(
    epilog=example(
        "phase completion bash > ~/.local/share/bash-completion/completions/phase",
        "phase completion zsh > ~/.zfunc/_phase",
        'eval "$(phase completion bash)"   # this shell only',
    )
)
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Print the completion script of a shell: commands, options, phases of the playbook, checkpoints of the ledger, playbooks.

    Write it to the file your shell loads completions from; bash wants 4.4 or newer.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells offered here"
    script = _source(kind(click.get_current_context().find_root().command, {}, "phase", "_PHASE_COMPLETE"))
    if as_json:
        print_json({"shell": shell, "script": script, "file": _HOW[shell]})
    else:
        click.echo(script)


def _source(made: Any) -> str:
    """The script from click's template; `source()` of bash would first start a bash to look at its version."""
    return str(made.source_template % made.source_vars())


def complete_phase(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the playbook's phases, read as plain YAML: a playbook with a mistake completes too."""
    import yaml

    with contextlib.suppress(Exception):  # nothing to offer; the command itself says what is wrong
        path = ctx.params.get("playbook_path") or find_playbook()
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        phases = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=loader)["phases"]  # noqa: S506 - one of the safe loaders
        given = ctx.params.get(param.name or "") or ()
        names = [name for name in phases if isinstance(name, str) and _PHASE.fullmatch(name)]
        return [CompletionItem(name) for name in names if name.startswith(incomplete) and name not in given]
    return []


def complete_checkpoint(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Checkpoints by number or name, newest first, from the tags of this repository; and the phases where those name one too."""
    found = [match for tag in _tags() if (match := _CHECKPOINT.search(tag.rpartition("/")[2]))]
    names = [CompletionItem(match[0]) for match in reversed(found)]
    numbers = [CompletionItem(str(int(match[1])), help=match[0]) for match in reversed(found)]
    known = [item for item in (*numbers, *names) if item.value.startswith(incomplete)]
    return known if incomplete else numbers


def complete_playbook(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Playbooks where they usually lie; any other file once something else is typed. What needs quotes is left to the shell's own completion."""
    usual = [
        path
        for path in (Path("playbook.yaml"), *sorted(Path("playbooks").glob("*.yaml")))
        if _PLAIN.fullmatch(path.as_posix())
    ]
    found = [CompletionItem(str(path)) for path in usual if path.is_file() and str(path).startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def _tags() -> list[str]:
    from phases.base.errors import LedgerError
    from phases.ledger.git import Git

    try:
        return Git(Path()).run("for-each-ref", "--format=%(refname)", "refs/tags", timeout=SECONDS).decode().split()
    except (LedgerError, UnicodeError):
        return []
