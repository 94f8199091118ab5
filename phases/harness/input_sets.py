"""The rotation of input sets a benchmark runs over: cold, poisoned, and never the same values twice in a row."""

from __future__ import annotations

from typing import Any

import torch

from phases.harness.buffers import GuardedOutputs, tensors_of, total_bytes
from phases.harness.entry import Entry, Json, Tensors

CACHE_MULTIPLE = 1.5  # the rotation moves at least so many times the last-level cache between two uses of a set
MAX_SETS = 256
MEMORY_SHARE = 0.25  # of what is free


class InputSets:
    """`count` independent input sets of one case, each with its own guarded outputs.

    The small floating inputs change places between the sets before every timed call: the same addresses then hold other
    values, so that a result kept from an earlier call is a wrong result.
    """

    def __init__(self, entry: Entry, case: Json, device: str, seed: int, cache_bytes: int, free_bytes: int) -> None:
        self.entry, self.case, self.device = entry, case, device
        first = entry.inputs(case, seed, device)
        needed = max(1, min(int(entry.cost(case)["bytes"]), total_bytes(first)))
        held = total_bytes(first) + total_bytes(entry.outputs(case, device))
        wanted = int(CACHE_MULTIPLE * cache_bytes / needed) + 2
        most = min(MAX_SETS, int(MEMORY_SHARE * free_bytes / max(held, 1)))
        self.count = max(2, min(wanted, most))
        self.cold = self.count * needed >= CACHE_MULTIPLE * cache_bytes
        self.inputs: list[Tensors] = [first] + [
            entry.inputs(case, seed + 101 * n, device) for n in range(1, self.count)
        ]
        self.outputs = [GuardedOutputs(entry.outputs(case, device)) for _ in range(self.count)]
        self._moving = _moving_paths(self.inputs)
        self._pristine = [
            {path: tensor.clone() for path, tensor in tensors_of(one) if path in self._moving} for one in self.inputs
        ]
        self.state = [n for n in range(self.count)]  # which set's small inputs each set holds now

    def refresh(self, number: int) -> None:
        """Give set `number` the small inputs of the next set in turn, and poison its outputs."""
        self.restore(number, (self.state[number] + 1) % self.count)
        self.outputs[number].poison()

    def restore(self, number: int, state: int) -> None:
        """Put set `number` into an earlier state."""
        self.state[number] = state
        for path, tensor in tensors_of(self.inputs[number]):
            if path in self._moving:
                tensor.copy_(self._pristine[state][path])

    def reference(self, number: int, state: int) -> Tensors:
        """float64 reference of set `number` in `state`; leaves the set in that state."""
        self.restore(number, state)
        return self.entry.reference(self.case, self.inputs[number])


def _moving_paths(inputs: list[Tensors]) -> set[str]:
    """Paths of the floating inputs that change places: all but the largest, or that one where no other can.

    Only what may stand in for another: same shape in every set, and NaN (rows that belong to nobody) at the same places,
    since elsewhere another input's indices may point at them.
    """
    floating = {
        path: tensor
        for path, tensor in tensors_of(inputs[0])
        if tensor.is_floating_point() and tensor.dim() and tensor.numel()
    }
    by_size = sorted(floating, key=lambda path: floating[path].numel() * floating[path].element_size())
    rest = [dict(tensors_of(one)) for one in inputs[1:]]
    alike = [path for path in by_size if all(_interchangeable(floating[path], one.get(path)) for one in rest)]
    smaller = [path for path in alike if path != by_size[-1]]
    return set(smaller or alike)


def _interchangeable(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and other.shape == tensor.shape and torch.equal(torch.isnan(tensor), torch.isnan(other))


def free_memory(device: str) -> int:
    """Bytes that can be allocated on the device now."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def cache_bytes(device: str) -> int:
    """Bytes of the device's last-level cache (L2 on a GPU)."""
    from phases.harness.facts import last_level_cache

    return (
        int(torch.cuda.get_device_properties(device).L2_cache_size) if device.startswith("cuda") else last_level_cache()
    )


def describe(sets: InputSets) -> dict[str, Any]:
    return {"input_sets": sets.count, "cold": sets.cold, "moving_inputs": sorted(sets._moving)}
