"""`phase playbook check` and `schema`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from phases.base.errors import PlaybookError
from phases.cli.common import example, find_playbook, json_option, playbook_option, print_json
from phases.cli.lazy import LazyGroup

if TYPE_CHECKING:
    from phases.harness.contract import Kernel
    from phases.playbook.schema import Playbook


@click.group(
    cls=LazyGroup,
    table={
        "check": ("phases.cli.playbook:check", "Read a playbook and report every mistake at once."),
        "schema": ("phases.cli.playbook:schema", "Print the JSON Schema of playbooks, for editors."),
    },
    epilog=example("phase playbook check -p playbooks/local.yaml", "phase playbook schema > playbook.schema.json"),
)
def playbook() -> None:
    """Check a playbook; print its JSON Schema."""


@click.command(epilog=example("phase playbook check -p playbooks/local.yaml"))
@playbook_option
@json_option
def check(playbook_path: Path | None, as_json: bool) -> None:
    """Read a playbook and its kernel.yaml; report every mistake with file:line and the nearest valid name (exit 2).

    Checked without compilers, torch or the kernel's own code: keys and values, rules, variants, architectures, dtypes,
    and that the files, directories and the contract module that are named exist. With --json "mistakes" lists file,
    line and text of each.
    """
    loaded, kernel = _both(playbook_path or find_playbook())
    if as_json:
        print_json(
            {
                "playbook": loaded.name,
                "kernel": kernel.name,
                "phases": [section.name for section in loaded.phases],
                "mistakes": [],
                "notes": list(loaded.notes),
            }
        )
        return
    for line in loaded.notes:
        click.echo(line)
    click.echo(f"{loaded.path}: no mistakes; kernel {kernel.name}, phases {loaded.phase_names()}")


def _both(path: Path) -> tuple[Playbook, Kernel]:
    """Playbook and kernel.yaml. Raises PlaybookError with the mistakes of both."""
    from phases.harness import contract
    from phases.playbook import loader
    from phases.playbook.located import Mistake, Mistakes, Where, load

    found = Mistakes()
    loaded = kernel = None
    named = load(path, Mistakes()).get("kernel")
    try:
        loaded = loader.load(path)
    except PlaybookError as fault:
        found.found += [Mistake(Where(file, line), text) for file, line, text in fault.mistakes]
    file = loaded.kernel if loaded else path.parent / named.value if named and isinstance(named.value, str) else None
    if file and file.is_file():
        try:
            kernel = contract.load(file)
        except PlaybookError as fault:
            found.found += [Mistake(Where(file, line), text) for file, line, text in fault.mistakes]
    found.raise_if_any("playbook and its kernel.yaml")
    assert loaded and kernel
    return loaded, kernel


@click.command(
    epilog=example(
        "phase playbook schema > playbook.schema.json",
        "# then, as the first line of a playbook: # yaml-language-server: $schema=playbook.schema.json",
    )
)
@click.option("--kernel", "of_kernel", is_flag=True, help="The schema of kernel.yaml instead.")
@json_option
def schema(of_kernel: bool, as_json: bool) -> None:
    """Print the JSON Schema (draft 2020-12) of playbooks; --json changes nothing, it is JSON."""
    if of_kernel:
        from phases.harness import contract

        print_json(contract.schema())
        return
    from phases.playbook import loader

    print_json(loader.schema())
