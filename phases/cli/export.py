"""`phase export`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from phases.base.errors import UsageError
from phases.cli.common import example, json_option, load_playbook, note, open_ledger, playbook_option, print_json
from phases.cli.gate import choose


@click.command(epilog=example("phase export --flashinfer-bench ./trace", "phase export --flashinfer-bench ./trace 3"))
@click.argument("checkpoint", required=False)
@click.option(
    "--flashinfer-bench",
    "target",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    required=True,
    help="Write a flashinfer-bench dataset, or add to the one there: definitions, workloads, solutions, traces.",
)
@playbook_option
@json_option
def export(checkpoint: str | None, target: Path, playbook_path: Path | None, as_json: bool) -> None:
    """Write the kernel and the results of a build-parity checkpoint in the format of another tool.

    CHECKPOINT is a number, a name, a digest, or the directory of an exported checkpoint; without it, the newest build-parity
    checkpoint of the playbook. Solutions hold the kernel's code as it was committed. A second export adds nothing twice.
    """
    from phases.base.results import Results
    from phases.export.write import export as write
    from phases.harness import contract
    from phases.ledger.checkpoint import RESULTS
    from phases.ledger.export import read_directory

    playbook = load_playbook(playbook_path)
    ledger = open_ledger(playbook)
    if checkpoint and Path(checkpoint).is_dir():
        name, (files, manifest) = Path(checkpoint).resolve().name, read_directory(Path(checkpoint))
    else:
        chosen = choose(playbook, ledger, checkpoint or "build-parity")
        name, files, manifest = chosen.name, ledger.files(chosen), chosen.manifest
    if manifest["phase"] != "build-parity":
        raise UsageError(
            f"{name} is of {manifest['phase']}; benchmarks are in build-parity checkpoints.",
            hint="Name one (`phase checkpoint list`).",
        )
    kernel = contract.load(playbook.kernel)
    if kernel.name != manifest["kernel"]:
        raise UsageError(
            f"{name} is of kernel {manifest['kernel']}, the playbook's is {kernel.name}.",
            hint="Name its playbook with -p.",
        )
    made = write(kernel, Results.from_json(json.loads(files[RESULTS])), manifest, ledger.git, target)
    if as_json:
        print_json({"checkpoint": name, "directory": str(target), **vars(made)})
        return
    for line in made.left_out:
        note(f"left out: {line}")
    click.echo(
        f"{name} in {target}: {len(made.definitions)} definitions and {len(made.solutions)} solutions; "
        f"{made.workloads} workloads and {made.traces} traces are new, in {len(made.written)} files"
    )
