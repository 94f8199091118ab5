"""`phase kernel survey`."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import click

from phases.base.errors import UsageError
from phases.cli.common import example, json_option, print_json, say, show_table
from phases.cli.lazy import LazyGroup

if TYPE_CHECKING:
    from phases.harness.survey import Surveyed


@click.group(
    cls=LazyGroup,
    table={
        "survey": (
            "phases.cli.kernel:survey",
            "Which verify kernels a Python environment holds, and what each can do.",
        ),
        "tune": ("phases.cli.kernel_tune:tune", "Measure which variant serves which shape best on this device."),
        "import": ("phases.cli.kernel_import:import_", "Make a flashinfer-bench Solution a variant of the kernel."),
    },
    epilog=example("phase kernel survey", "phase kernel survey --python /opt/sglang/bin/python"),
)
def kernel() -> None:
    """Survey kernels that are installed, tune verify_attn for this device, import kernels of others."""


@click.command(
    epilog=example("phase kernel survey", "phase kernel survey --python /opt/sglang/bin/python --page-size 64 --json")
)
@click.option(
    "--python",
    default=sys.executable,
    show_default="this one",
    metavar="PATH",
    help="Python of the environment to look into.",
)
@click.option(
    "--page-size", default=1, show_default=True, type=click.IntRange(min=1), help="KV page size the kernel must serve."
)
@click.option(
    "--gpu",
    metavar="ARCH",
    default="",
    help="GPU architecture it must serve, such as sm_90. Default: this machine's GPU.",
)
@json_option
def survey(python: str, page_size: int, gpu: str, as_json: bool) -> None:
    """List the MLA and verify kernels installed in a Python environment: SGLang Triton, FlashInfer, FlashMLA, cutlass-MLA, ours.

    For each: version, the architectures its binaries were built for, and whether it can do tree masks, this page size and
    this GPU, with the reason when not.
    """
    from phases.harness import survey as kernel_survey

    found = kernel_survey.survey(python, page_size=page_size, sm=_capability(gpu))
    if as_json:
        print_json(found.to_json())
        return
    say(
        f"Python {found.python}, torch {found.torch or 'not installed'}, GPU {', '.join(found.gpus) or 'none here (name one with --gpu)'}"
    )
    columns = [
        "kernel",
        "version",
        "built for",
        "tree mask",
        f"page {page_size}",
        f"sm_{found.sm}" if found.sm else "GPU",
        "usable",
    ]
    show_table(columns, [_row(kernel) for kernel in found.kernels], {"yes": "green", "no": "red", "?": "yellow"})
    for kernel in found.kernels:
        if kernel.imports not in ("", "ok"):
            say(f"  {kernel.name}, import: {kernel.imports}")
        for what, answer in (("tree mask", kernel.tree), ("page size", kernel.page), ("GPU", kernel.gpu)):
            if answer.ok is not True and not (what == "GPU" and found.sm is None):  # said once, in the first line
                say(f"  {kernel.name}, {what}: {answer.why.removeprefix('page size ')}")


def _row(kernel: Surveyed) -> list[str]:
    said = {True: "yes", False: "no", None: "?"}
    version = kernel.version or ("installed" if kernel.installed else "not installed")
    could_be = (
        kernel.installed
        and kernel.imports in ("", "ok")
        and kernel.tree.ok
        and kernel.page.ok
        and kernel.gpu.ok is None
    )
    usable = (
        "yes" if kernel.usable else "?" if could_be else "no"
    )  # where there is no GPU to judge for, nobody can tell
    return [
        kernel.name,
        version,
        " ".join(kernel.built_for) or "-",
        said[kernel.tree.ok],
        said[kernel.page.ok],
        said[kernel.gpu.ok],
        usable,
    ]


def _capability(gpu: str) -> int | None:
    """90 from sm_90 or sm_90a; None when none is named."""
    match = re.fullmatch(r"(?:sm_)?(\d{2,3})[af]?", gpu)
    if gpu and not match:
        raise UsageError(f"{gpu!r} is not a GPU architecture.", hint="Name one such as sm_90 or sm_120.")
    return int(match[1]) if match else None
