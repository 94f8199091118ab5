"""`phase kernel tune`."""

from __future__ import annotations

from pathlib import Path

import click

from phases.base.errors import KernelContractError, UsageError
from phases.base.extras import Extra
from phases.cli.common import example, json_option, note, print_json


@click.command(
    epilog=example("phase kernel tune", "phase kernel tune --dtype float32 --out /etc/verify_attn/dispatch.json")
)
@click.option(
    "--dtype",
    default="bfloat16",
    show_default=True,
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Element type to tune for.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    default=None,
    help="Where the table goes; point $VERIFY_ATTN_DISPATCH at it. Default: dispatch.json here.",
)
@json_option
def tune(dtype: str, out: Path | None, as_json: bool) -> None:
    """Measure which variant of verify_attn, with how many KV splits, serves which shape best on this GPU, and record it.

    Only what gave the right numbers at that very shape is timed. Takes some minutes; needs the GPU for itself.
    """
    Extra.BENCH.require("Tuning")
    try:
        import torch
        from verify_attn import dispatch
        from verify_attn import tune as tuner
        from verify_attn.errors import VerifyAttnError
    except ImportError as fault:
        raise UsageError(
            f"verify_attn cannot be imported ({fault}).", hint="Install it beside phasegate (`make setup` does)."
        ) from None
    if not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here to measure on.", hint="Run this on the GPU the table is for.")
    target = out or Path("dispatch.json")
    try:
        rows = tuner.tune(dtype, progress=note)
    except VerifyAttnError as fault:
        raise KernelContractError(
            f"tuning stopped: {fault}.", hint="Mend that variant first; nothing was written."
        ) from None
    dispatch.write(target, tuple(rows))
    if as_json:
        print_json({"table": str(target), "rows": [vars(row) for row in rows]})
    else:
        click.echo(f"{len(rows)} rows written to {target}; use it with VERIFY_ATTN_DISPATCH={target.resolve()}")
