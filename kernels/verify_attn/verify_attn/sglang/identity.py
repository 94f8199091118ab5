"""Who this backend is: its fact file and its line in the log."""

from __future__ import annotations

import logging
import os

from verify_attn.sglang import publish
from verify_attn.sglang.facts import FactFile, counters_json

log = logging.getLogger(__name__)


def announce(backend, runner) -> FactFile:
    """Start the fact file of a target backend, publish its metrics and log one line.

    Args:
        backend: has `name`, `variant()`, `build()`, `choice()` and `counters`.
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
        "release": release,
        "build": backend.build(),
    }
    labels = {"backend": backend.name, "variant": backend.variant(), "release": release[:12], "rank": str(rank)}
    metrics = publish.Metrics(labels)

    def current() -> dict:
        counters = counters_json(backend.counters)
        metrics.update(counters["verify_calls"], counters["verify_forwards"])
        return {"variant": backend.variant(), "choice": backend.choice(), "counters": counters}

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
    return FactFile(os.environ.get("VERIFY_ATTN_FACTS"), identity, current)
