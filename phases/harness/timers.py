"""How one call of a variant is timed: CPU by the worker's own clock, CUDA by events around graph replays.

Both run over a rotation of input sets larger than the last-level cache, so that every call finds its inputs cold, as
the layers of a model do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phases.harness import guards

Call = Callable[[int], None]  # runs the variant on input set number i

MIN_CPU_WINDOW = 1e-3  # seconds one CPU sample should last; fast kernels are called several times a sample
MIN_CUDA_WINDOW = 5e-4
_SPIN_CYCLES = 400_000  # a short spin in front lets the host queue event and graph before the device gets there


class CpuTimer:
    """Times calls with the clock the worker took hold of before the kernel was imported."""

    method = "perf_counter"

    def __init__(self, sets: int) -> None:
        self.sets = sets

    def prepare(self, call: Call, seconds: float) -> None:
        """Choose how many calls a sample makes, from a first guess of one call's seconds."""
        self.calls = max(1, min(self.sets, int(MIN_CPU_WINDOW / max(seconds, 1e-9)) + 1))

    def sample(self, call: Call, order: Sequence[int]) -> float:
        """Seconds a call over the first `calls` sets of `order`."""
        clock = guards.perf_counter
        sets = order[: self.calls]
        start = clock()
        for number in sets:
            call(number)
        return (clock() - start) / len(sets)

    def touched(self, order: Sequence[int]) -> Sequence[int]:
        """The sets a sample with this order runs on."""
        return order[: self.calls]

    def back_to_back(self, call: Call, calls: int) -> int:
        """Run about `calls` calls and wait for them; returns how many."""
        for number in range(calls):
            call(number % self.sets)
        return calls


class CudaTimer:
    """Times replays of a graph that holds one call for each input set.

    A variant that cannot be captured is timed call by call between events; `method` then says `eager events`, whose
    numbers include launch gaps and whatever the host does in between.
    """

    def __init__(self, sets: int) -> None:
        self.sets = sets
        self.method = "graph replay"
        self.why_eager = ""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._event, self._graph_type, self._stream = torch.cuda.Event, torch.cuda.CUDAGraph, torch.cuda.Stream
        self._synchronize, self._spin, self._capture = torch.cuda.synchronize, torch.cuda._sleep, torch.cuda.graph
        self._on, self._current = torch.cuda.stream, torch.cuda.current_stream

    def prepare(self, call: Call, seconds: float) -> None:
        """Capture the graph; `seconds` of one call decide how often a sample replays it."""
        before = self._current()
        side = self._stream()
        side.wait_stream(before)
        with self._on(side):
            for number in range(min(self.sets, 3)):
                call(number)
        before.wait_stream(side)
        self._synchronize()
        if not (why := self._waits_for_the_device(call)):
            why = self._record(call, before)
        if why:
            self.method, self.why_eager = "eager events", why
        self.replays = max(1, min(200, int(MIN_CUDA_WINDOW / max(self.sets * seconds, 1e-9)) + 1))

    def _waits_for_the_device(self, call: Call) -> str:
        """torch's complaint when the call synchronises, which no graph can hold; asked first, since a broken capture is ugly."""
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(0)
        except RuntimeError as fault:
            return _one_line(fault)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            self._synchronize()
        return ""

    def _record(self, call: Call, before: torch.cuda.Stream) -> str:
        """Capture one call for each set; why it failed, or empty."""
        graph = self._graph_type()
        try:
            with self._capture(graph):
                for number in range(self.sets):
                    call(number)
            self._synchronize()
        except Exception as fault:
            torch.cuda.set_stream(before)  # a failed capture leaves its own stream behind as the current one
            self._synchronize()
            return _one_line(fault)
        self._graph = graph
        return ""

    def sample(self, call: Call, order: Sequence[int]) -> float:
        """Seconds a call, over all sets."""
        start, end = self._event(enable_timing=True), self._event(enable_timing=True)
        self._spin(_SPIN_CYCLES)
        start.record()
        self._once(call)
        end.record()
        self._synchronize()
        return start.elapsed_time(end) * 1e-3 / (self.sets * self.replays)

    def touched(self, order: Sequence[int]) -> Sequence[int]:
        return range(self.sets)

    def back_to_back(self, call: Call, calls: int) -> int:
        rounds = -(-calls // (self.sets * self.replays))
        for _ in range(rounds):
            self._once(call)
        self._synchronize()
        return rounds * self.sets * self.replays

    def _once(self, call: Call) -> None:
        for _ in range(self.replays):
            if self._graph is not None:
                self._graph.replay()
            else:
                for number in range(self.sets):
                    call(number)


def _one_line(fault: BaseException) -> str:
    return " ".join(f"{type(fault).__name__}: {fault}".split())[:200]
