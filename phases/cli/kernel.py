"""`phase kernel survey`."""

from __future__ import annotations

import sys

import click

from phases.cli.common import example, json_option, print_json
from phases.cli.lazy import LazyGroup


@click.group(cls=LazyGroup, table={
    "survey": ("phases.cli.kernel:survey", "Which verify kernels a Python environment holds, and what each can do."),
    "tune": ("phases.cli.kernel_tune:tune", "Measure which variant serves which shape best on this device."),
}, epilog=example("phase kernel survey", "phase kernel survey --python /opt/sglang/bin/python"))  # fmt: skip
def kernel() -> None:
    """Look at kernels."""


@click.command(epilog=example("phase kernel survey", "phase kernel survey --python /opt/sglang/bin/python --page-size 64 --json"))
@click.option("--python", default=sys.executable, show_default="this one", metavar="PATH", help="Python of the environment to look into.")
@click.option("--page-size", default=1, show_default=True, type=click.IntRange(min=1), help="KV page size the kernel must serve.")
@click.option("--gpu", metavar="ARCH", default="", help="GPU architecture it must serve, such as sm_90. Default: this machine's GPU.")
@json_option
def survey(python: str, page_size: int, gpu: str, as_json: bool) -> None:
    """List the MLA and verify kernels installed in a Python environment: SGLang Triton, FlashInfer, FlashMLA, cutlass-MLA, ours.

    For each: version, the architectures its binaries were built for, and whether it can do tree masks, this page size and
    this GPU, with the reason when not.
    """
    from phases.kernel import survey as kernel_survey

    found = kernel_survey.survey(python, page_size=page_size, gpu=gpu)
    if as_json:
        print_json({"python": python, "kernels": kernel_survey.to_json(found)})
        return
    click.echo(kernel_survey.table(found).rstrip())
