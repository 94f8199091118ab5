"""Building a kernel's variants through its contract module, in a worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phases.base.errors import BuildError, KernelContractError
from phases.base.results import BuildRecord
from phases.harness import process, toolchain
from phases.harness.contract import Kernel, Progress, silent, to_json

SILENCE_SECONDS = 1800.0  # one compiler invocation may print nothing for this long


def build(kernel: Kernel, archs: Sequence[str], cache: Path, progress: Progress = silent) -> tuple[BuildRecord, ...]:
    """Build the kernel for `archs`, reusing `cache`; a kernel without build() yields one record of arch `python`.

    Its build() gets the compilers that the toolkit found as $CXX and $NVCC.

    Raises:
        BuildError: nothing could be built, with the compiler's or the builder's own words.
        KernelContractError: build() does not return build records.
    """
    answers: list[dict[str, Any]] = []

    def listen(message: dict[str, Any]) -> None:
        progress(message["text"]) if message["type"] == "progress" else answers.append(message)

    job = {"op": "build", "kernel": to_json(kernel), "archs": list(archs), "cache": str(cache)}
    death = process.run(job, listen, silence=SILENCE_SECONDS, environment=toolchain.environment())
    if death:
        raise BuildError(
            f"the build of {kernel.name} {death.reason}.", hint="Run it again; a killed build leaves nothing behind."
        )
    answer = answers[-1]
    if answer["type"] == "build-failed":
        raise BuildError(f"{kernel.name}: {answer['reason']}")
    return tuple(_record(kernel, row) for row in answer["records"])


def _record(kernel: Kernel, row: dict[str, Any]) -> BuildRecord:
    known = {item.name for item in dataclasses.fields(BuildRecord)}
    if not isinstance(row, dict) or not {"variant", "arch", "ok"} <= set(row) <= known:
        raise KernelContractError(
            f"{kernel.entry}: build() must return dicts with the fields of a build record, not {row!r}."
        )
    return BuildRecord(**{**row, "flags": tuple(row.get("flags", ()))})
