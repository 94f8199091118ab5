"""What machine, device and libraries a measurement was made with."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def facts(device: str) -> dict[str, Any]:
    """Plain JSON: python, torch, threads, and the CPU's or GPU's own description."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache(),
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "sm": f"{properties.major}{properties.minor}",
            "sms": properties.multi_processor_count,
            "gpu_memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
        }
    return found


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0; 32 MiB where the system does not say."""
    sizes = []
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = index.read_text().strip()
        sizes.append(
            int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]] if text[-1] in "KMG" else int(text)
        )
    return max(sizes, default=32 << 20)


def device_name(device: str) -> str:
    """The name tables show: the GPU's or the CPU's."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_properties(device).name
    return cpu_name()
