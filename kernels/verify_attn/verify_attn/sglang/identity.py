"""Who this backend is: its fact file and its line in the log."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict

from verify_attn.sglang import publish
from verify_attn.sglang.control import Control
from verify_attn.sglang.facts import FactFile, counters_json

log = logging.getLogger(__name__)


def announce(backend, runner) -> FactFile:
    """Start the fact file of a target backend, publish its metrics and log one line.

    Args:
        backend: has `name`, `variant()`, `build()`, `choice()`, `hot()` and `counters`; `control` and `shadow` if it has a candidate.
        runner: SGLang's ModelRunner.
    """
    from sglang.srt.runtime_context import get_parallel

    release = os.environ.get("VERIFY_ATTN_RELEASE") or os.environ.get("PHASEGATE_RELEASE", "")
    rank, ranks = get_parallel().tp_rank, get_parallel().tp_size
    identity = {
        "rank": rank,
        "ranks": ranks,
        "backend": backend.name,
        "device": str(backend.device),
        "gpu": _gpu(backend.device),
        "release": release,
        "build": backend.build(),
    }
    labels = {"backend": backend.name, "variant": backend.variant(), "release": release[:12], "rank": str(rank)}
    metrics = publish.Metrics(labels)
    control, shadow = getattr(backend, "control", None), getattr(backend, "shadow", None)
    if shadow:
        shadow.rank = rank

    def current() -> dict:
        counters = counters_json(backend.counters)
        metrics.update(counters["verify_calls"], counters["verify_forwards"])
        found = {"variant": backend.variant(), "choice": backend.choice(), "hot": backend.hot(), "counters": counters}
        return {**found, "shadow": shadow.facts()} if shadow else found

    log.warning(
        "verify_attn: backend %s is active: rank %d of %d, device %s, variant %s, build %s, release %s",
        backend.name,
        rank,
        ranks,
        backend.device,
        backend.variant(),
        backend.build()[:12] or "none",
        release[:12] or "none",
    )
    return FactFile(os.environ.get("VERIFY_ATTN_FACTS"), identity, current, control)


def _gpu(device) -> str:
    """The device's name as CUDA has it; empty for a CPU."""
    import torch

    return torch.cuda.get_device_name(device) if str(device).startswith("cuda") else ""


def hot_facts(control: Control, reason: str = "") -> dict:
    """The `hot` entry of a fact file.

    Args:
        reason: why this server cannot be switched, if it cannot; the acknowledgement then still says what serves.
    """
    if not control.path:
        reason = reason or "VERIFY_ATTN_CONTROL is not set"
    return {"able": not reason, "reason": reason, "file": control.path, **asdict(control.acknowledged), "tripped": control.tripped}
