"""The numerical guard: on a sampled share of verify steps both attention paths run on the same inputs and are compared.

A step over tolerance trips the fallback by itself: the incumbent's result is what that step goes on with, the control byte says
incumbent from then on, and what is kept as evidence is shapes, lengths and errors, never tokens or activations.

Environment: VERIFY_ATTN_SHADOW, the share of verify steps in 0..1 (default 0: off). Error measures, a request at a time, so that one
wrong request does not hide among many right ones: Frobenius norm of the difference over that of the incumbent's output, and its
largest element over the root mean square of the incumbent's output. Both paths round in the KV type, hence the tolerances by type.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from verify_attn.sglang.control import Control

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tolerance:
    """Largest errors that count as agreement."""

    frobenius: float
    maximum: float


TOLERANCES = {
    torch.float32: Tolerance(1e-4, 2e-3),
    torch.float16: Tolerance(4e-3, 1e-1),
    torch.bfloat16: Tolerance(2e-2, 5e-1),
}


@dataclass(frozen=True)
class Mismatch:
    """Evidence of one step over tolerance: shapes and errors, no user data."""

    at: float  # seconds since the epoch
    rank: int
    forward: int
    layer: int
    variant: str
    dtype: str
    query_shape: tuple[int, ...]  # [draft rows of all requests, heads, row]
    draft_tokens: int
    prefix_lengths: tuple[int, ...]  # of the batch's requests
    worst_request: int  # index into the batch
    frobenius: float
    maximum: float
    tolerance: dict


class Shadow:
    """Decides which steps are compared, compares, and trips the control.

    Args:
        rate: share of verify steps, 0..1. control: what a mismatch trips.
        directory: where evidence is written besides the fact file; None: nowhere.
        seed: of the choice of steps.
    """

    def __init__(self, rate: float, control: Control, directory: str | None = None, seed: int = 0) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"VERIFY_ATTN_SHADOW is {rate:g}; give the share of verify steps to compare, 0 to 1")
        self.rate, self.control, self.directory = rate, control, directory
        self.rank = 0
        self.steps = self.layers = 0
        self.worst = 0.0
        self.evidence: Mismatch | None = None
        self._random = random.Random(seed)

    @classmethod
    def from_environment(cls, control: Control) -> Shadow:
        """Raises ValueError for a rate that is no number in 0..1: a server must not start with a guard that is not there."""
        text = os.environ.get("VERIFY_ATTN_SHADOW", "") or "0"
        try:
            rate = float(text)
        except ValueError:
            raise ValueError(f"VERIFY_ATTN_SHADOW is {text!r}; give the share of verify steps to compare, 0 to 1") from None
        return cls(rate, control, os.environ.get("VERIFY_ATTN_FACTS"), seed=os.getpid())

    def due(self) -> bool:
        """Whether the verify step that begins now is compared. Asked once a step."""
        return self.rate > 0 and (self.rate >= 1 or self._random.random() < self.rate)

    def begin(self) -> None:
        self.steps += 1

    def agrees(self, ours: Tensor, theirs: Tensor, *, q: Tensor, lengths: Sequence[int], layer: int, variant: str) -> bool:
        """Compare one layer's outputs; a mismatch trips the control and is kept as evidence. Waits for the device.

        Args:
            ours, theirs: [rows, heads, latent], rows = requests * draft tokens, of the candidate and of the incumbent.
            q: [rows, heads, row], the queries, of which only shape and type are kept.
            lengths: committed prefix of each request.
        """
        self.layers += 1
        frobenius, maximum = errors(ours, theirs, len(lengths))
        tolerance = TOLERANCES[q.dtype]
        worst = int(frobenius.argmax())
        values = float(frobenius.max()), float(maximum.max())
        if max(values) < math.inf:
            self.worst = max(self.worst, values[0])
        if values[0] <= tolerance.frobenius and values[1] <= tolerance.maximum:  # false for NaN
            return True
        found = Mismatch(
            time.time(), self.rank, self.control.forward, layer, variant, str(q.dtype).removeprefix("torch."), tuple(q.shape),
            q.shape[0] // max(1, len(lengths)), tuple(int(length) for length in lengths), worst, *values, asdict(tolerance),
        )  # fmt: skip
        self._keep(found)
        return False

    def facts(self) -> dict:
        """The `shadow` entry of the fact file."""
        evidence = _plain(asdict(self.evidence)) if self.evidence else None
        return {"rate": self.rate, "steps": self.steps, "layers": self.layers, "worst": self.worst, "tripped": evidence}

    def _keep(self, found: Mismatch) -> None:
        reason = (f"shadow: layer {found.layer}, request {found.worst_request} of {len(found.prefix_lengths)}: the outputs differ by "
                  f"{found.frobenius:.3g} (allowed {found.tolerance['frobenius']:g}), at most {found.maximum:.3g}")  # fmt: skip
        if self.evidence is None:  # the first one tells most; the rest of its step may be its consequence
            self.evidence = found
            log.error("verify_attn: %s; evidence: %s", reason, json.dumps(_plain(asdict(found))))
            self._write(found)
        self.control.trip(reason)

    def _write(self, found: Mismatch) -> None:
        if not self.directory:
            return
        try:
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            path = Path(self.directory) / f"shadow-{found.rank}.json"
            path.write_text(json.dumps({"schema": "verify_attn/shadow/v1", **_plain(asdict(found))}, indent=1))
        except OSError as fault:
            log.error("verify_attn: cannot write the evidence to %s: %s", self.directory, fault.strerror)


def errors(ours: Tensor, theirs: Tensor, requests: int) -> tuple[Tensor, Tensor]:
    """(relative Frobenius error, largest error over root mean square) of each request, [requests] float32 each.

    A request whose outputs are not finite has the error infinity.
    """
    a, b = (tensor.reshape(requests, -1).float() for tensor in (ours, theirs))
    difference = a - b
    norm = b.norm(dim=1)
    floor = torch.finfo(torch.float32).tiny
    frobenius = difference.norm(dim=1) / norm.clamp_min(floor)
    maximum = difference.abs().amax(1) / (norm / math.sqrt(b.shape[1])).clamp_min(floor)
    broken = ~(a.isfinite().all(1) & b.isfinite().all(1))
    return frobenius.masked_fill(broken, math.inf), maximum.masked_fill(broken, math.inf)


def _plain(found: dict) -> dict:
    """As JSON can say it: infinity has no number there."""
    return {key: (str(value) if isinstance(value, float) and not math.isfinite(value) else value) for key, value in found.items()}
