"""Outputs against the float64 reference.

The error of an output is its relative Frobenius error ‖out − ref‖ / ‖ref‖ (the absolute root mean square where the
reference is all zero). One wrong row among thousands hardly moves that, so each row (last dimension) is held to
ROW_FACTOR times the tolerance as well, relative to the larger of its own norm and the root mean square of all row norms.
Special values of the reference are exact: where it is infinite the output must equal it, where it is NaN the kernel must
leave the element untouched. NaN or infinity anywhere else never passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phases.harness.buffers import is_poison

ROW_FACTOR = 16.0


@dataclass(frozen=True)
class Comparison:
    error: float | None  # worst output's relative error; None when it could not be computed
    max_abs: float | None
    reason: str  # why not ok; empty when ok

    @property
    def ok(self) -> bool:
        return not self.reason


def compare(outputs: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], tolerance: float) -> Comparison:
    """Compare every output with its reference; the first fault found is the reason."""
    if set(outputs) != set(reference):
        return Comparison(None, None, f"outputs are {sorted(outputs)}, the reference gives {sorted(reference)}")
    each = [_compare_one(name, outputs[name], reference[name], tolerance) for name in outputs]
    errors = [c.error for c in each if c.error is not None]
    distances = [c.max_abs for c in each if c.max_abs is not None]
    reason = next((c.reason for c in each if c.reason), "")
    complete = len(errors) == len(each)
    return Comparison(max(errors) if complete else None, max(distances) if complete else None, reason)


def _compare_one(name: str, output: torch.Tensor, reference: torch.Tensor, tolerance: float) -> Comparison:
    if output.shape != reference.shape:
        return Comparison(None, None, f"{name} has shape {list(output.shape)}, its reference {list(reference.shape)}")
    untouched = is_poison(output).to(reference.device)
    value = output.to(reference.device, torch.float64)
    if reason := _special_values(name, value, reference, untouched):
        return Comparison(None, None, reason)
    finite = torch.isfinite(reference)
    if not bool(finite.any()):
        return Comparison(0.0, 0.0, "")
    wanted = torch.where(finite, reference, 0.0)
    difference = torch.where(finite, value, 0.0) - wanted
    norm = float(torch.linalg.vector_norm(wanted))
    error = float(torch.linalg.vector_norm(difference)) / (norm or float(finite.sum()) ** 0.5)
    max_abs = float(difference.abs().max())
    if error > tolerance:
        return Comparison(
            error,
            max_abs,
            f"{name} is off by {error:.3g} (relative), tolerance {tolerance:g}, largest difference {max_abs:.3g}",
        )
    return Comparison(error, max_abs, _worst_row(name, difference, wanted, tolerance))


def _special_values(name: str, value: torch.Tensor, reference: torch.Tensor, untouched: torch.Tensor) -> str:
    skip = torch.isnan(reference)
    if bool((skip & ~untouched).any()):
        return f"{name} was written at {int((skip & ~untouched).sum())} elements that must stay untouched, first at {_first(skip & ~untouched)}"
    missing = untouched & ~skip
    if bool(missing.any()):
        return (
            f"{name} was never written at {int(missing.sum())} of {value.numel()} elements, first at {_first(missing)}"
        )
    nans = torch.isnan(value) & ~skip
    if bool(nans.any()):
        return f"{name} is NaN at {int(nans.sum())} of {value.numel()} elements, first at {_first(nans)}"
    infinite = (torch.isinf(value) | torch.isinf(reference)) & (value != reference) & ~skip
    if bool(infinite.any()):
        return f"{name} is infinite, or not where it should be, at {int(infinite.sum())} elements, first at {_first(infinite)}"
    return ""


def _worst_row(name: str, difference: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> str:
    if difference.dim() == 0:
        return ""
    off = torch.linalg.vector_norm(difference, dim=-1)
    norms = torch.linalg.vector_norm(wanted, dim=-1)
    scale = torch.maximum(norms, norms.square().mean().sqrt())
    relative = torch.where(scale > 0, off / scale, off)
    worst = float(relative.max())
    if worst <= ROW_FACTOR * tolerance:
        return ""
    return f"{name} has a row off by {worst:.3g} (relative), limit {ROW_FACTOR * tolerance:g}, at {_first(relative == relative.max())}"


def _first(mask: torch.Tensor) -> list[int]:
    return mask.nonzero()[0].tolist()
