"""Paired, interleaved latency: each prompt goes to both servers, one right after the other, in random order.

Ratios are taken within a pair, so that what slows the machine for a while slows both sides of the pair. While one server
works the other is idle.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phases.base.results import RATIO, Measurement
from phases.serving.activity import Activity, read_activity, summarize
from phases.serving.client import Client, Completion
from phases.serving.prompts import timing_prompt
from phases.serving.statistics import median_ratio

WARM_UP = 2  # pairs that are not kept
SEED = 7


@dataclass(frozen=True)
class Timing:
    """One request: seconds, and what the kernel's plugin says its verify attention took."""

    total: float
    verify_step: float | None  # decoding time a verify step
    verify_attention: float | None  # attention time a tree-verify forward; None where the plugin does not time it


def measure(
    incumbent: Client,
    candidate: Client,
    package: str,
    pairs: int,
    tokens: int,
    prompt_tokens: int,
    progress: Callable[[str], None],
) -> tuple[tuple[Measurement, ...], dict[str, Any]]:
    """Ratios candidate / incumbent with their intervals, and every sample as plain JSON."""
    draw = random.Random(SEED)
    timings: dict[str, list[Timing]] = {"incumbent": [], "candidate": []}
    for pair in range(-WARM_UP, pairs):
        prompt = timing_prompt(pair, prompt_tokens)
        order = [("incumbent", incumbent), ("candidate", candidate)]
        draw.shuffle(order)
        for side, client in order:
            timing = _time(client, prompt, tokens, package)
            if pair >= 0:
                timings[side].append(timing)
    progress(f"{pairs} pairs of {tokens} tokens after {prompt_tokens}")
    source = f"{pairs} pairs, {prompt_tokens} prompt tokens, {tokens} generated, one request at a time"
    kinds = (
        ("e2e_latency_ratio", "total"),
        ("verify_step_ratio", "verify_step"),
        ("verify_attention_ratio", "verify_attention"),
    )
    measurements = tuple(_ratio(metric, timings, field, source) for metric, field in kinds)
    return measurements, {"timings": {side: [vars(row) for row in rows] for side, rows in timings.items()}}


def _time(client: Client, prompt: list[int], tokens: int, package: str) -> Timing:
    before = summarize(read_activity(client, package))
    completion = client.generate(prompt, tokens)
    after = summarize(read_activity(client, package))
    return Timing(completion.seconds, _verify_step(completion), _verify_attention(before, after))


def _verify_step(completion: Completion) -> float | None:
    if not completion.verify_steps or completion.server_seconds is None:
        return None
    return (completion.server_seconds - (completion.first_seconds or 0.0)) / completion.verify_steps


def _verify_attention(before: Activity, after: Activity) -> float | None:
    forwards = after.verify_forwards - before.verify_forwards
    seconds = after.verify_seconds - before.verify_seconds
    return seconds / forwards if forwards > 0 and seconds > 0 else None


def _ratio(metric: str, timings: dict[str, list[Timing]], field: str, source: str) -> Measurement:
    ours = [getattr(row, field) for row in timings["candidate"]]
    theirs = [getattr(row, field) for row in timings["incumbent"]]
    if any(value is None for value in (*ours, *theirs)):
        return Measurement(metric, None, source="not reported by both servers")
    ratio = median_ratio(ours, theirs)
    detail = {"candidate_median": sorted(ours)[len(ours) // 2], "incumbent_median": sorted(theirs)[len(theirs) // 2]}
    return Measurement(metric, ratio.estimate, ratio.low, ratio.high, len(ours), RATIO, source, detail)
