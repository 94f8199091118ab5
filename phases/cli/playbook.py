"""`phase playbook check` and `schema`."""

from __future__ import annotations

from pathlib import Path

import click

from phases.cli.common import example, json_option, load_playbook, playbook_option, print_json
from phases.cli.lazy import LazyGroup


@click.group(cls=LazyGroup, table={
    "check": ("phases.cli.playbook:check", "Read a playbook and report every mistake at once."),
    "schema": ("phases.cli.playbook:schema", "Print the JSON Schema of playbooks, for editors."),
}, epilog=example("phase playbook check -p playbooks/local.yaml", "phase playbook schema > playbook.schema.json"))  # fmt: skip
def playbook() -> None:
    """Check a playbook; print its JSON Schema."""


@click.command(epilog=example("phase playbook check -p playbooks/local.yaml"))
@playbook_option
@json_option
def check(playbook_path: Path | None, as_json: bool) -> None:
    """Read a playbook and its kernel.yaml; report every mistake with file:line and the nearest valid name (exit 2)."""
    from phases.kernel import contract

    loaded = load_playbook(playbook_path)
    kernel = contract.load(loaded.kernel)
    if as_json:
        print_json({"playbook": loaded.name, "kernel": kernel.name, "phases": [section.name for section in loaded.phases]})
        return
    click.echo(f"{loaded.path}: no mistakes; kernel {kernel.name}, phases {loaded.phase_names()}")


@click.command(epilog=example(
    "phase playbook schema > playbook.schema.json",
    "# then, as the first line of a playbook: # yaml-language-server: $schema=playbook.schema.json",
))  # fmt: skip
@click.option("--kernel", "of_kernel", is_flag=True, help="The schema of kernel.yaml instead.")
@json_option
def schema(of_kernel: bool, as_json: bool) -> None:
    """Print the JSON Schema (draft 2020-12) of playbooks; --json changes nothing, it is JSON."""
    if of_kernel:
        from phases.kernel import contract

        print_json(contract.schema())
        return
    from phases.playbook import loader

    print_json(loader.schema())
