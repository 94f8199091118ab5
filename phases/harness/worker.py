"""The worker process: does one job of kernel work and reports through its own pipe (`python -m phases.harness.worker`).

Argument 1 is the descriptor of the pipe, 2 that of the pulse; the job comes as JSON on stdin. Started by
`phases.harness.process`, never by hand.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from phases.base.errors import KernelContractError, PhaseError
from phases.harness.channel import Channel, die_with_parent


def main() -> None:
    die_with_parent()
    channel = Channel(int(sys.argv[1]), int(sys.argv[2]))
    job = json.load(sys.stdin)
    try:
        _OPERATIONS[job["op"]](job, channel)
    except PhaseError as fault:
        channel.send("error", message=fault.message, hint=fault.hint, contract=isinstance(fault, KernelContractError))
    else:
        channel.send("done")


def _check_device(device: str) -> None:
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise PhaseError(
            "there is no CUDA device that this torch can use.",
            hint="Run on a machine with a GPU, or use the device cpu.",
        )


def _describe(job: dict[str, Any], channel: Channel) -> None:
    from phases.harness.entry import Entry
    from phases.harness.facts import facts

    _check_device(job["device"])
    entry = Entry(job["kernel"])
    channel.send(
        "described",
        parity=entry.cases("parity", job["device"]),
        benchmark=entry.cases("benchmark", job["device"]),
        facts=facts(job["device"]),
    )


def _build(job: dict[str, Any], channel: Channel) -> None:
    from pathlib import Path

    from phases.harness.entry import Entry, blame

    entry = Entry(job["kernel"])
    try:
        channel.send("built", records=entry.build(job["archs"], Path(job["cache"]), channel.progress))
    except (Exception, SystemExit) as fault:
        channel.send("build-failed", reason=blame(fault))


def _definitions(job: dict[str, Any], channel: Channel) -> None:
    from phases.harness.definitions import describe

    describe(job, channel)


def _parity(job: dict[str, Any], channel: Channel) -> None:
    from phases.harness.parity_worker import prove

    _check_device(job["device"])
    prove(job, channel)


def _benchmark(job: dict[str, Any], channel: Channel) -> None:
    from phases.harness.benchmark_worker import measure

    _check_device(job["device"])
    measure(job, channel)


def _ceilings(job: dict[str, Any], channel: Channel) -> None:
    _check_device(job["device"])
    if job["device"].startswith("cuda"):
        from phases.harness.ceilings_cuda import measure
    else:
        from phases.harness.ceilings_cpu import measure
    measure(job, channel)


_OPERATIONS = {
    "describe": _describe,
    "build": _build,
    "definitions": _definitions,
    "parity": _parity,
    "benchmark": _benchmark,
    "ceilings": _ceilings,
}

if __name__ == "__main__":
    main()
