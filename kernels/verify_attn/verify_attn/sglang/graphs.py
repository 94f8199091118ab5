"""The hot fallback under CUDA graphs. Its seam is tested on the CPU against SGLang's own classes; what it did on H200s is in README.md here.

A captured graph keeps the kernels it was captured with, so the way to the incumbent is chosen by VERIFY_ATTN_HOT:

    candidate  (default) only the candidate is captured; while the control says incumbent, verify runs eagerly
    both       both are captured, for every batch size, and each replay picks one: more start-up time and memory, measured here
    off        captured graphs keep the candidate; the facts say that this server cannot be switched

`both` uses what SGLang 0.5.23 has for attention variants (`attention_graph_variants`: one graph a shape and label, chosen at each
replay). Nothing is hooked without a control file, or when `off`.

A tensor-parallel rank needs no agreement about its own heads, but graphs and all-reduces tie ranks together. SGLang reduces over one
communicator in graphs and over another outside, so ranks of which one replays and one runs eagerly would wait for each other for good:
`candidate` is for one rank. Custom all-reduce kernels read peers at addresses recorded at capture, which differ between the two
graphs of a shape: `both` with several ranks needs them off. Other servers start as `off`, with the reason in the facts.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict, dataclass, field
from enum import Enum

log = logging.getLogger(__name__)

CANDIDATE_GRAPH, INCUMBENT_GRAPH = "verify_attn_candidate", "verify_attn_incumbent"
RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner."
CAN_RUN, VARIANTS = RUNNER + "DecodeCudaGraphRunner.can_run_graph", RUNNER + "create_dsv41_candidate_graph_variants"
CAPTURE_ONE = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.capture_one"
# Server arguments whose all-reduce reads other ranks' memory at recorded addresses; the first is turned off by its flag.
CUSTOM_OFF = "disable_custom_all_reduce"
# FlashInfer's fusion goes by the name of its backend since SGLang 0.5.23, which turns it on by itself for DeepSeek models on Hopper and Blackwell.
TIED = ("enable_mscclpp", "enable_torch_symm_mem", "enable_symm_mem", "enable_nccl_nvls", "enable_flashinfer_allreduce_fusion",
        "flashinfer_allreduce_fusion_backend")  # fmt: skip
REGISTER = "NCCL_GRAPH_REGISTER"  # NCCL's own recorded addresses; SGLang 0.5.23 sets it to 0 for several ranks unless it is set already


class Way(Enum):
    """How tree verify gets to the incumbent under CUDA graphs."""

    CANDIDATE = "candidate"
    BOTH = "both"
    OFF = "off"


@dataclass
class Captured:
    """What capturing one side cost this rank."""

    graphs: int = 0
    seconds: float = 0.0
    bytes: int = 0  # of device memory, as free memory before less after


@dataclass
class Graphs:
    """One server's way and what it cost.

    Attributes:
        reason: why the server cannot be switched; empty when it can.
        captures: decode runs under CUDA graphs. alone: one tensor-parallel rank, so that it may leave a graph by itself.
    """

    way: Way
    reason: str = ""
    captures: bool = False
    alone: bool = True
    captured: dict[str, Captured] = field(default_factory=dict)

    def facts(self) -> dict:
        return {"way": self.way.value, **{label: asdict(cost) for label, cost in self.captured.items()}}


@dataclass(frozen=True)
class HotVariants:
    """SGLang's `AttentionGraphVariants`: both graphs of every shape, the control choosing at each replay."""

    backend: object
    capture_labels = (CANDIDATE_GRAPH, INCUMBENT_GRAPH)

    def select(self, forward_batch) -> str:
        return CANDIDATE_GRAPH if self.backend.decide() else INCUMBENT_GRAPH


def wanted() -> Way:
    """VERIFY_ATTN_HOT; ValueError for a word that is none of the three."""
    word = os.environ.get("VERIFY_ATTN_HOT", "") or Way.CANDIDATE.value
    try:
        return Way(word)
    except ValueError:
        raise ValueError(f"VERIFY_ATTN_HOT is {word!r}; give candidate, both or off") from None


def of_server(runner, control) -> Graphs:
    """The way of the server that this ModelRunner belongs to."""
    from sglang.srt.runtime_context import get_exec, get_parallel

    try:
        from sglang.srt.model_executor.cuda_graph_config import Backend

        captures = get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED
        arguments = get_exec().comm  # as decided; the server's arguments keep what was asked for
    except (ImportError, AttributeError):  # SGLang before 0.5.23
        captures, arguments = not getattr(runner.server_args, "disable_cuda_graph", False), runner.server_args
    return choose_way(wanted(), controlled=bool(control.path), captures=captures, ranks=get_parallel().tp_size, arguments=arguments)


def choose_way(way: Way, *, controlled: bool, captures: bool, ranks: int, arguments: object) -> Graphs:
    """The way a server can go.

    Args:
        way: asked for. controlled: there is a control file. captures: decode runs under CUDA graphs.
        ranks: tensor-parallel ranks. arguments: SGLang's, of its communication.
    """
    alone = ranks == 1
    if not (controlled and captures):  # eager forwards follow the control as they are
        return Graphs(way, "", captures, alone)
    if way is Way.OFF:
        return Graphs(Way.OFF, "VERIFY_ATTN_HOT is off", captures, alone)
    if way is Way.CANDIDATE and not alone:
        return Graphs(Way.OFF, f"{ranks} ranks under CUDA graphs cannot run verify eagerly each by itself; see VERIFY_ATTN_HOT=both", captures, alone)
    tied = [] if getattr(arguments, CUSTOM_OFF, False) else ["custom all-reduce (see --disable-custom-all-reduce)"]
    tied += [name for name in TIED if getattr(arguments, name, False)]
    tied += [f"{REGISTER}={os.environ[REGISTER]}"] if os.environ.get(REGISTER, "0") != "0" else []
    if tied and not alone:
        return Graphs(Way.OFF, f"{ranks} ranks share memory by {', '.join(tied)}, which ties the graphs of all ranks together", captures, alone)
    return Graphs(way, "", captures, alone)


def hook() -> None:
    """Register what the ways and the shadow need; before a CUDA server starts. Nothing when there is neither."""
    way, shadowed = wanted(), os.environ.get("VERIFY_ATTN_SHADOW", "0") not in ("", "0")
    switched = bool(os.environ.get("VERIFY_ATTN_CONTROL")) and way is not Way.OFF
    if not (switched or shadowed):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(CAN_RUN, _can_run_graph, HookType.AROUND)
    if switched and way is Way.BOTH:
        HookRegistry.register(VARIANTS, _variants, HookType.AROUND)
        HookRegistry.register(CAPTURE_ONE, _measured, HookType.AROUND)


def missing_hook(way: Way) -> str:
    """Which place in SGLang could not be hooked (it only logs that), or ""."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    applied = getattr(HookRegistry, "_patched", set())
    needed = [CAN_RUN, *([VARIANTS] if way is Way.BOTH else [])]
    return next((target for target in needed if target not in applied), "")


def capturing() -> str | None:
    """Label of the graph being captured now; None outside of a capture of both."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

    return get_capture_attention_variant()


def _can_run_graph(original, runner, forward_batch):
    """Eager while the incumbent is to run and was not captured, and for a step that the shadow compares."""
    possible = original(runner, forward_batch)
    ours = getattr(runner.attn_backend, "runs_eagerly", None)
    return possible and not (ours is not None and ours(forward_batch))


def _variants(original, model_runner, mode, *arguments, **options):
    """Both sides of the target's verify graphs, unless SGLang has variants of its own for this model."""
    found = original(model_runner, mode, *arguments, **options)
    backend = getattr(model_runner, "attn_backend", None)
    graphs = getattr(backend, "graphs", None)
    if found is not None or graphs is None or graphs.way is not Way.BOTH or not mode.is_target_verify():
        return found
    return HotVariants(backend)


def _measured(original, graph_backend, shape_key, *arguments, **options):
    """Time and memory of one capture, by side."""
    backend = getattr(graph_backend._cuda_graph_runner, "attn_backend", None)
    label = shape_key.attention_variant
    if label not in (CANDIDATE_GRAPH, INCUMBENT_GRAPH) or getattr(backend, "graphs", None) is None:
        return original(graph_backend, shape_key, *arguments, **options)
    import torch

    before, started = torch.cuda.mem_get_info()[0], time.perf_counter()
    result = original(graph_backend, shape_key, *arguments, **options)
    cost = backend.graphs.captured.setdefault(label.removeprefix("verify_attn_"), Captured())
    cost.graphs += 1
    cost.seconds += time.perf_counter() - started
    cost.bytes += max(0, before - torch.cuda.mem_get_info()[0])
    log.info("verify_attn: captured %s for %s: %d graphs, %.2f s, %.1f MiB so far", label, shape_key.size, cost.graphs, cost.seconds, cost.bytes / 2**20)
    return result
