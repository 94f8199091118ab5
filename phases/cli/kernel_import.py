"""`phase kernel import`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from phases.cli.common import example, harmless, json_option, load_playbook, playbook_option, print_json, say
from phases.harness.contract import DEVICES, ROLES


@click.command(
    "import",
    epilog=example(
        "phase kernel import rmsnorm_triton_v1.json",
        "phase kernel import s.json --as triton_v1 --device cuda --definition d.json",
    ),
)
@click.argument("solution", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--as", "variant", metavar="NAME", help="Name of the variant. Default: the Solution's name, made fit.")
@click.option(
    "--role", type=click.Choice([r for r in ROLES if r != "reference"]), default="candidate", show_default=True
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    help="Where it runs. Default: cuda for Triton and CUDA, cpu for C++, any for Python.",
)
@click.option(
    "--definition",
    "definition_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Its Definition, where the kernel's contract module names none of that name.",
)
@playbook_option
@json_option
def import_(
    solution: Path,
    variant: str | None,
    role: str,
    device: str | None,
    definition_file: Path | None,
    playbook_path: Path | None,
    as_json: bool,
) -> None:
    """Make a flashinfer-bench Solution a variant of the playbook's kernel, to be proved and timed like any other.

    This is code of others. Nothing of it runs now; `phase run build-parity` runs it in worker processes that have your rights, as
    it does the kernel's own: read it first, under `solutions/` of the kernel. kernel.yaml keeps its sha256, and a file changed
    afterwards is refused.
    """
    from phases.export import bring_in
    from phases.harness import contract
    from phases.harness.exchange import Solution

    playbook = load_playbook(playbook_path)
    kernel = contract.load(playbook.kernel)
    parsed = Solution.from_json(bring_in.read_record(solution), str(solution))
    given = bring_in.read_record(definition_file) if definition_file else None
    definition, covers_all = bring_in.definition_for(kernel, parsed.definition, given, str(definition_file))
    where = device or {"triton": "cuda", "cuda": "cuda", "cpp": "cpu"}.get(parsed.language, "any")
    name = variant or re.sub(r"\W+", "_", parsed.name.lower()).strip("_")
    made = bring_in.import_solution(
        kernel, parsed, definition, covers_all=covers_all, variant=name, role=role, device=where
    )
    if as_json:
        print_json(
            {
                "variant": made.variant,
                "sha256": parsed.sha256,
                "definition": parsed.definition,
                "directory": str(made.directory),
                "files": [str(path) for path in made.files],
                "again": made.again,
            }
        )
        return
    here = os.path.relpath(made.directory)
    if made.again:
        say(f"{harmless(parsed.name)} is variant {made.variant} of {kernel.name} already; nothing was written.")
        return
    say(
        f"{harmless(parsed.name)} by {harmless(parsed.author)} ({parsed.language}, sha256 {parsed.sha256[:16]}) is now variant {made.variant} of {kernel.name}."
    )
    for path in made.files:
        say(f"  wrote {os.path.relpath(path)}")
    if parsed.dependencies:
        say(f"It says it needs {harmless(', '.join(parsed.dependencies))}; nothing was installed.")
    say(f"This is code of others, and will run with your rights: read {here} before `phase run build-parity`.")
