"""`phase init`."""

from __future__ import annotations

import keyword
import re
import shlex
from importlib import resources
from pathlib import Path

import click

from phases.base.errors import UsageError
from phases.cli.common import example, json_option, print_json

# template -> where it goes; NAME in both is the kernel's name
FILES = {
    "kernel.yaml": "kernel.yaml",
    "playbook.yaml": "playbook.yaml",
    "contract.py.txt": "src/NAME/contract.py",
    "README.md.txt": "README.md",
}
IGNORED = "__pycache__/\n# pages of `phase report`: from Phase 2 on a run refuses what is not committed\n[0-9][0-9][0-9][0-9]-*-*.html\n"


@click.command(epilog=example("phase init my_kernel", "cd my_kernel && git add . && git commit -m start && phase run"))
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", help="Name of the kernel and its Python package. Default: the directory's name.")
@json_option
def init(directory: Path, name: str | None, as_json: bool) -> None:
    """Scaffold a kernel of your own in DIRECTORY: kernel.yaml, a small working example, a playbook.

    The result runs through phase 1 as it is; replace the example piece by piece. Nothing that exists is overwritten.
    """
    name = name or re.sub(r"\W", "_", directory.resolve().name).lower()
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} cannot be the name of a Python package.",
            hint="Give --name with lower-case letters, digits and _.",
        )
    written = _scaffold(directory, name)
    made_repository = _ensure_repository(directory)
    if as_json:
        print_json({"directory": str(directory), "name": name, "files": written, "git_init": made_repository})
        return
    for path in written:
        click.echo(f"wrote {directory / path}")
    if made_repository:
        click.echo(f"made {directory} a git repository")
    click.echo(f"Next: cd {shlex.quote(str(directory))} && git add . && git commit -m start && phase run")


def _scaffold(directory: Path, name: str) -> list[str]:
    targets = {template: target.replace("NAME", name) for template, target in FILES.items()}
    targets["package"] = f"src/{name}/__init__.py"
    existing = sorted(target for target in targets.values() if (directory / target).exists())
    if existing:
        raise UsageError(
            f"{directory} already holds {', '.join(existing)}.", hint="Choose another directory; nothing was written."
        )
    templates = resources.files("phases.cli") / "scaffold"
    for template, target in targets.items():
        text = (
            f'"""{name}: a kernel carried by phasegate."""\n'
            if template == "package"
            else (templates / template).read_text()
        )
        path = directory / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("NAME", name))
    ignore = directory / ".gitignore"
    if not ignore.exists():
        ignore.write_text(IGNORED)
        targets["ignored"] = ignore.name
    return sorted(targets.values())


def _ensure_repository(directory: Path) -> bool:
    """Whether a repository had to be made."""
    from phases.ledger.git import Git

    if Git(directory).attempt("rev-parse", "--show-toplevel") is not None:
        return False
    Git(directory).run("init", "--quiet")
    return True
