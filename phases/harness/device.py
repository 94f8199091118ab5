"""Which device Phase 1 runs a kernel on, told without importing torch."""

from __future__ import annotations

import ctypes
from importlib import metadata

from phases.base.errors import PhaseError
from phases.base.extras import Extra
from phases.playbook.schema import Device


class DeviceError(PhaseError):
    """The device that the playbook names is not here."""

    stage = "device"


def choose(wanted: Device) -> str:
    """cpu or cuda; `auto` is the GPU where the driver shows one and this torch can use it.

    Raises:
        MissingExtra: this installation has no torch.
        DeviceError: the playbook says cuda, and this machine or this torch has none.
    """
    Extra.BENCH.require("Phase 1")
    if wanted is Device.CPU:
        return "cpu"
    lack = lack_of_cuda()
    if lack and wanted is Device.CUDA:
        raise DeviceError(f"the playbook says `device: cuda`, but {lack}.", hint=CURE)
    return "cpu" if lack else "cuda"


CURE = "Run on a machine with a GPU and a torch built for it, or set `device: cpu` in build-parity."


def lack_of_cuda() -> str:
    """Why a kernel cannot run on a GPU here, as a clause; empty when it can."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no CUDA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        return "the driver shows no CUDA device"
    if not Extra.BENCH.installed:
        return Extra.BENCH.missing
    version = metadata.version("torch")
    return f"torch {version} is built without CUDA" if "+cpu" in version else ""
