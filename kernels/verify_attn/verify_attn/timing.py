"""Timing on a GPU by CUDA graphs: calls captured once, replayed between two events, contestants taking turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One CUDA graph of these calls in order; the first is run once outside it, to load and configure kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_graphs(graphs: Mapping[str, torch.cuda.CUDAGraph], calls: int, *, rounds: int = 15, least_ms: float = 1.0) -> dict[str, list[float]]:
    """Microseconds per call of each graph, one sample a round.

    Args:
        graphs: name -> graph of `calls` calls.
        rounds: samples; within a round the graphs take turns, so that a drift of the clocks meets all of them.
        least_ms: a sample replays its graph until about this long.
    """
    repeats, samples = {}, {name: [] for name in graphs}
    for name, graph in graphs.items():
        repeats[name] = max(1, math.ceil(least_ms / max(_replay_ms(graph, 1), 1e-3)))
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name].append(_replay_ms(graph, repeats[name]) / repeats[name] / calls * 1e3)
    return samples


def _replay_ms(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
