"""Run inside the serving environment by test_hot_seam.py: the hot fallback under CUDA graphs, on SGLang's own classes, without a GPU.

Real are the hook registry, the graph runner's admission, its loop over what to capture, its keys, and the graph backend that captures
and replays. Stand-ins are torch's CUDA graph, which remembers the function and runs it again, and the batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace

import torch

CONTROL = tempfile.NamedTemporaryFile(delete=False)
CONTROL.write(b"c")
CONTROL.close()
os.environ |= {"VERIFY_ATTN_CONTROL": CONTROL.name, "VERIFY_ATTN_HOT": "both", "SGLANG_EAGER_INPUT_NO_COPY": "1"}

from sglang.srt.layers.attention.triton_backend import TritonAttnBackend  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as runners  # noqa: E402
from sglang.srt.model_executor.runner.eager_runner import EagerRunner  # noqa: E402
from sglang.srt.model_executor.runner_backend import full_cuda_graph_backend as backends  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from verify_attn.sglang import graphs  # noqa: E402
from verify_attn.sglang.control import Control  # noqa: E402
from verify_attn.sglang.cuda_backend import CudaBackend  # noqa: E402
from verify_attn.sglang.facts import Counters  # noqa: E402
from verify_attn.sglang.graphs import Graphs, Way  # noqa: E402
from verify_attn.sglang.shadow import Shadow  # noqa: E402


@dataclass
class Batch:
    """Stand-in for SGLang's ForwardBatch, a dataclass of which its eager runner makes a copy, without what is no field."""

    batch_size: int
    input_ids: torch.Tensor
    forward_mode: ForwardMode = ForwardMode.TARGET_VERIFY
    replace_embeds: object = None
    spec_info: object = None
    lora_ids: object = None


class Graph:
    """Stand-in for torch.cuda.CUDAGraph: replaying runs what was captured once more."""

    def __init__(self) -> None:
        self.function = None

    def replay(self) -> None:
        self.function()


def put(byte: bytes) -> None:
    handle = os.open(CONTROL.name, os.O_WRONLY)
    os.pwrite(handle, byte, 0)
    os.close(handle)


def our_backend(way: Way, rate: float = 0.0) -> CudaBackend:
    made = CudaBackend.__new__(CudaBackend)
    made.control, made.counters, made.graphs = Control(CONTROL.name), Counters(), Graphs(way, captures=True)
    made.shadow = Shadow(rate, made.control)
    made.use, made.shadowing, made.verifying = True, False, True
    made.planned, made._begin = None, lambda verifying: None
    return made


def eager_step(ours: CudaBackend) -> dict:
    """A verify step that no graph may run, as SGLang goes about it: asked when planned, asked when run, then run on a copy."""
    TritonAttnBackend.init_forward_metadata = lambda self, forward_batch: None
    planned = batch()
    asked = [runner(ours).can_run_graph(planned), runner(ours).can_run_graph(planned)]
    ours.init_forward_metadata(EagerRunner.load_batch(None, planned))
    found = {"asked": asked, "use": ours.use, "compared": ours.shadowing, "steps": ours.shadow.steps}
    prefill = batch()
    prefill.forward_mode = ForwardMode.EXTEND
    ours.init_forward_metadata(prefill)
    return found | {"prefill compared": ours.shadowing}


def runner(backend: object) -> runners.DecodeCudaGraphRunner:
    made = runners.DecodeCudaGraphRunner.__new__(runners.DecodeCudaGraphRunner)
    model = SimpleNamespace(
        attn_backend=backend,
        spec_algorithm=SpeculativeAlgorithm.from_string("NGRAM"),
        is_draft_worker=False,
        device="cpu",
        gpu_id=0,
        model=None,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type="deepseek_v3")),
    )
    made.__dict__ |= {
        "attn_backend": backend,
        "model_runner": model,
        "ragged_verify_mode": False,
        "captured_req_width": 5,
        "require_mlp_tp_gather": False,
        "enable_pdmux": False,
        "record_nolora_graph": False,
        "disable_padding": False,
        "max_bs": 4,
        "require_mlp_sync": False,
        "is_encoder_decoder": False,
        "enable_two_batch_overlap": False,
        "capture_bs": [1, 2, 4],
        "compile_bs": [],
        "_profiler": None,
    }
    made.attention_graph_variants = runners.create_dsv41_candidate_graph_variants(model, ForwardMode.TARGET_VERIFY, 5)
    return made


def batch(size: int = 2) -> Batch:
    return Batch(size, torch.zeros(size * 5))


def eager_incumbent() -> dict:
    """Way `candidate`: admission to the graph follows the control, and what was decided for a batch stays."""
    put(b"c")
    ours = our_backend(Way.CANDIDATE)
    made, planned = runner(ours), batch()
    found = {"variants": made.attention_graph_variants is None, "candidate": made.can_run_graph(planned)}
    put(b"i")
    found["planned stays"] = made.can_run_graph(planned)
    found["incumbent"] = made.can_run_graph(batch())
    found["too large for any graph"] = made.can_run_graph(batch(8))
    put(b"c")
    found["candidate again"] = made.can_run_graph(batch())
    found["another backend"] = runner(SimpleNamespace()).can_run_graph(batch())
    found["compared step"] = eager_step(our_backend(Way.CANDIDATE, rate=1.0))
    put(b"i")
    found["incumbent step"] = eager_step(our_backend(Way.CANDIDATE, rate=1.0))
    put(b"c")
    off = our_backend(Way.OFF)
    off.graphs.reason = "VERIFY_ATTN_HOT is off"
    found["off"] = runner(off).can_run_graph(batch())
    put(b"i")
    off.control.follow()
    found["off says"] = [off.hot()["able"], off.hot()["choice"], off.choice()]
    ours.runner = SimpleNamespace(attn_backend=ours)
    ours.control.follow()
    found["switchable says"] = [ours.hot()["able"], ours.hot()["choice"], ours.hot()["graphs"]["way"]]
    ours.runner.attn_backend = None
    found["wrapped says"] = ours.hot()["reason"]
    return found


def both_captured() -> dict:
    """Way `both`: SGLang's loop captures each shape twice, and each replay picks by the control."""
    put(b"c")
    ours = our_backend(Way.BOTH)
    made = runner(ours)
    graph_backend = graph_backend_of(made)
    made.backend, ran = graph_backend, []

    def capture_one_shape(size, forward, stream_idx=None, variant_label=None, attention_variant=None):
        ours.verifying = True
        ours.use = graphs.capturing() != graphs.INCUMBENT_GRAPH  # as init_forward_metadata_out_graph does
        uses = ours.use
        graph_backend.capture_one(
            made._make_graph_key(size, stream_idx, variant_label, attention_variant), lambda: ran.append((size, uses))
        )

    made.capture_one_shape = capture_one_shape
    runners.torch_compile_decoration.patch_model = lambda *a, **k: contextlib.nullcontext(lambda: None)
    runners.get_available_gpu_memory = lambda *a, **k: 0.0
    runners.get_parallel = lambda: SimpleNamespace(tp_rank=1, tp_group=None)
    torch.cuda.mem_get_info = lambda: (1 << 30, 1 << 31)
    made._capture_one_stream()
    found = {
        "labels": list(made.attention_graph_variants.capture_labels),
        "graphs": len(graph_backend._graphs),
        "cost": ours.graphs.facts(),
        "label after": graphs.capturing(),
    }
    ran.clear()
    for byte in (b"c", b"i", b"c"):
        put(byte)
        for size in (1, 4):
            seen = batch(size)
            assert made.can_run_graph(seen)
            key = made._make_graph_key(size, attention_variant=made._resolve_attention_variant(seen, size))
            graph_backend.replay(key, seen)
    found["replayed"] = ran
    return found


def graph_backend_of(made: runners.DecodeCudaGraphRunner) -> backends.FullCudaGraphBackend:
    graph_backend = backends.FullCudaGraphBackend.__new__(backends.FullCudaGraphBackend)

    @contextlib.contextmanager
    def graph(cuda_graph, pool, stream):
        yield

    precarve = SimpleNamespace(measure=contextlib.nullcontext, mint=lambda: None)
    graph_backend.__dict__ |= {
        "_graphs": {},
        "_outputs": {},
        "_pool": None,
        "_cuda_graph_runner": made,
        "_capture_stream": None,
        "_precarve": precarve,
        "_reuse_output_buffer": False,
        "_output_buffer": None,
        "_memory_saver_adapter": None,
        "_tp_group": SimpleNamespace(barrier=lambda: None),
        "_device_module": SimpleNamespace(synchronize=lambda: None, graph=graph),
    }
    torch.cuda.CUDAGraph = Graph
    backends.graph_pool_capture_scope = backends.graph_pool_replay_scope = contextlib.nullcontext
    original = backends.FullCudaGraphBackend.capture_one

    def remembering(self, key, function, *arguments, **options):
        original(self, key, function, *arguments, **options)
        self._graphs[key].function = function

    graph_backend.capture_one = remembering.__get__(graph_backend)
    return graph_backend


def compared() -> dict:
    """An eager step that the shadow compares: with a kernel that is right, then with one that is not. Torch computes both."""
    import cuda_seam
    from verify_attn import cuda
    from verify_attn.attention import run_problem

    put(b"c")
    made, given = cuda_seam.backend(), cuda_seam.inputs(graph=False)
    right = cuda_seam.expected(given, tree=True)
    made.control, broken, engine_calls = Control(CONTROL.name), [], []
    made.shadow = Shadow(1.0, made.control)
    made.shadowing = True

    def run(problem, variant, *, num_splits, workspace):
        run_problem(problem, "naive")
        if broken:
            problem.out[5:10].mul_(1.05)  # the second request

    def engine(q, k, v, o, *arguments, **options):
        engine_calls.append(o.data_ptr())
        o.copy_(right)

    cuda.run, cuda.choose, cuda.workspace_bytes = (
        run,
        lambda problem: ("naive", 1),
        lambda problem, variant, num_splits: 16,
    )
    made.engine_attention = engine
    agreed = cuda_seam.call(made, given, 0, given["mask"])
    found = {
        "agreed": made.shadow.evidence is None and made.use,
        "error": float((agreed.double() - right).abs().max()),
        "engine calls": len(engine_calls),
    }
    broken.append(True)
    served = cuda_seam.call(made, given, 1, given["mask"])
    found |= {
        "served": float((served.double() - right).abs().max()),
        "rest of the step": made.use,
        "next forward": made.control.decide(9),
    }
    found |= {
        "worst": made.shadow.evidence.worst_request,
        "lengths": list(made.shadow.evidence.prefix_lengths),
        "layer": made.shadow.evidence.layer,
    }
    return found | {"byte": open(CONTROL.name).read()}


def unknown_settings() -> list[str]:
    """Settings that are looked at and that this SGLang does not have where it keeps what it decided."""
    from sglang.srt.arg_groups.fields.exec_ import ExecComm

    return [name for name in (graphs.CUSTOM_OFF, *graphs.TIED) if name not in ExecComm.__struct_fields__]


def main() -> None:
    graphs.hook()
    HookRegistry.apply_hooks()
    report = {
        "missing": graphs.missing_hook(Way.BOTH),
        "unknown": unknown_settings(),
        "eager": eager_incumbent(),
        "both": both_captured(),
        "compared": compared(),
    }
    os.unlink(CONTROL.name)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
