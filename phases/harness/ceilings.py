"""The ceilings of this very device, measured in the same run as the benchmark that is compared with them."""

from __future__ import annotations

from phases.base.errors import PhaseError
from phases.base.results import Ceiling
from phases.harness import process
from phases.harness.contract import Progress, silent


class CeilingsError(PhaseError):
    stage = "ceilings"


def measure(device: str, threads: int | None = None, progress: Progress = silent) -> tuple[Ceiling, ...]:
    """Measure bandwidths (read, copy, gather: bytes/s) and arithmetic rates (flops_<dtype>: FLOP/s).

    Args:
        device: cpu or cuda.
        threads: CPU threads; what torch takes by default when None.

    Raises:
        CeilingsError: the device could not be measured.
    """
    found: list[Ceiling] = []

    def listen(message: dict) -> None:
        if message["type"] == "progress":
            progress(message["text"])
        elif message["type"] == "ceiling":
            found.append(Ceiling(device, message["kind"], message["value"], tuple(message["samples"])))
            unit = "TFLOP/s" if message["kind"].startswith("flops") else "GB/s"
            progress(f"ceiling {message['kind']}: {message['value'] / (1e12 if unit == 'TFLOP/s' else 1e9):.4g} {unit}")

    death = process.run({"op": "ceilings", "device": device, "threads": threads}, listen, silence=120.0)
    if death:
        raise CeilingsError(
            f"the worker measuring {device} {death.reason}.",
            hint="Run it again; see whether the machine is short of memory.",
        )
    return tuple(found)
