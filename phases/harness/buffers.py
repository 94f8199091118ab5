"""Outputs a kernel cannot cheat with, and fingerprints of inputs it must not touch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

GUARD_BYTES = 1 << 16
_GUARD = 0xA5
# Quiet NaNs with a payload no arithmetic produces: an element still holding it was never written.
_POISON = {
    torch.float64: (torch.int64, 0x7FF8DEADBEEF0001),
    torch.float32: (torch.int32, 0x7FC0DEAD),
    torch.bfloat16: (torch.int16, 0x7FDE),
    torch.float16: (torch.int16, 0x7EAD),
}
_BYTE_POISON = 0x5A  # other dtypes
_BLOCK = 1 << 20  # int64 words a fingerprint takes at a time


class GuardedOutputs:
    """Output tensors laid out as the kernel asked, each inside a buffer with guard bytes at both ends.

    Attributes:
        tensors: by name, with shapes, strides and dtypes of the kernel's own outputs.
    """

    def __init__(self, like: dict[str, torch.Tensor]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._guards: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, tensor in like.items():
            extent = (
                1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                if tensor.numel()
                else 0
            )
            size = extent * tensor.element_size()
            buffer = torch.full((2 * GUARD_BYTES + size,), _GUARD, dtype=torch.uint8, device=tensor.device)
            inside = buffer[GUARD_BYTES : GUARD_BYTES + size].view(tensor.dtype)
            self.tensors[name] = inside.as_strided(tensor.shape, tensor.stride(), inside.storage_offset())
            self._guards[name] = (buffer[:GUARD_BYTES], buffer[GUARD_BYTES + size :])

    def poison(self) -> None:
        """Fill every element with a value that shows whether it was written."""
        for tensor in self.tensors.values():
            kind, value = _POISON.get(tensor.dtype, (torch.uint8, _BYTE_POISON))
            (tensor.view(kind) if tensor.dtype != torch.bool else tensor.view(torch.uint8)).fill_(value)

    def overrun(self) -> str:
        """The output around which bytes were written out of bounds, or empty. Guards are restored."""
        for name, (before, after) in self._guards.items():
            for where, guard in (("before", before), ("after", after)):
                if bool((guard != _GUARD).any()):
                    distance = int((guard != _GUARD).nonzero()[-1 if where == "before" else 0])
                    guard.fill_(_GUARD)
                    offset = GUARD_BYTES - distance if where == "before" else distance + 1
                    return f"wrote out of bounds: {offset} bytes {where} output {name!r}"
        return ""

    def unwritten(self) -> int:
        """Number of elements that still hold the poison."""
        return sum(int(is_poison(tensor).sum()) for tensor in self.tensors.values())

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Bool tensor: which elements hold the poison bit pattern (all False for dtypes without NaN)."""
    if tensor.dtype not in _POISON:
        return torch.zeros_like(tensor, dtype=torch.bool)
    kind, value = _POISON[tensor.dtype]
    return tensor.view(kind) == value


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes; NaNs and signed zeros compare by their bits."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(left, right)


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside nested dicts, lists and tuples, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors_of(item, f"{path}[{number}]")


def copied(value: Any) -> Any:
    """The same nesting with every tensor cloned."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return type(value)([copied(item) for item in value]) if isinstance(value, (list, tuple)) else value


def total_bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(value))


def fingerprint(value: Any) -> dict[str, int]:
    """A 64-bit position-weighted checksum of each tensor's bytes, computed where the tensor lives."""
    return {path: _checksum(tensor) for path, tensor in tensors_of(value)}


def _checksum(tensor: torch.Tensor) -> int:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64) if data.storage_offset() % 8 == 0 else data[:whole].clone().view(torch.int64)
    total = int.from_bytes(bytes(data[whole:].tolist()), "little")
    weights = _weights(tensor.device)
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK]
        total = (total * 0x9E3779B97F4A7C15 + int((block * weights[: block.numel()]).sum())) & 0xFFFFFFFFFFFFFFFF
    return total


_weight_cache: dict[str, torch.Tensor] = {}


def _weights(device: torch.device) -> torch.Tensor:
    if str(device) not in _weight_cache:
        generator = torch.Generator().manual_seed(0x5EED)
        _weight_cache[str(device)] = (torch.randint(-(2**62), 2**62, (_BLOCK,), generator=generator) * 2 + 1).to(device)
    return _weight_cache[str(device)]
