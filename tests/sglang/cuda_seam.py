"""Run inside the serving environment by test_cuda_seam.py: the CUDA backend's seam with CPU tensors and the torch variant.

No GPU is here; what is tested is everything around the kernel: which calls it takes, the layouts it hands on (int64 and int32
offsets, FULL masks in oversized buffers, draft rows beside the pool, padded requests), its plans and its counts.
"""

from __future__ import annotations

import json
import sys

import torch
from verify_attn import cuda
from verify_attn.attention import run_problem
from verify_attn.sglang.control import Control
from verify_attn.sglang.cuda_backend import CudaBackend
from verify_attn.sglang.facts import Counters

HEADS, LATENT, ROPE, DRAFT, LAYERS = 2, 512, 64, 5, 3
PREFIXES = [7, 1, 40]


def backend() -> CudaBackend:
    made = CudaBackend.__new__(CudaBackend)
    made.control, made.counters = Control(None), Counters()
    made.use, made.shadowing, made.warming = True, False, False
    made.first_layer, made.layers, made.layer, made.verifying = 0, LAYERS, 0, True
    made.device, made.num_head, made.max_context_len = "cpu", HEADS, 64
    made.kv_indptr64, made.qo_indptr64 = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    made.prefix_lens, made.count = torch.zeros(8, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    made.plans, made.workspaces = {}, {}
    made.token_to_kv_pool = type("Pool", (), {"get_key_buffer": lambda self, layer: torch.zeros(4, 1, LATENT + ROPE)})()
    made.engine_calls = 0

    def engine(*arguments, **options):
        made.engine_calls += 1

    made.engine_attention = engine
    return made


def inputs(graph: bool) -> dict:
    torch.manual_seed(3)
    streams, tokens = len(PREFIXES), len(PREFIXES) * DRAFT
    offsets = torch.tensor([0, *PREFIXES]).cumsum(0)
    masks = []
    for prefix in PREFIXES:
        tree = torch.rand(DRAFT, DRAFT) < 0.5
        tree = tree.tril(-1) | torch.eye(DRAFT, dtype=torch.bool)
        masks.append(torch.cat([torch.ones(DRAFT, prefix, dtype=torch.bool), tree], 1).flatten())
    mask = torch.cat(masks)
    spare = 1000 if graph else 0  # under graphs buffers are larger than what is used
    pool = torch.randn(200, 1, LATENT + ROPE)
    return {
        "q": torch.randn(tokens, HEADS, LATENT + ROPE), "k": torch.randn(tokens, 1, LATENT + ROPE), "pool": pool,
        "qo": torch.arange(0, tokens + 1, DRAFT, dtype=torch.int64 if graph else torch.int32),
        "kv": offsets.int(), "indices": torch.cat([torch.randperm(200)[: sum(PREFIXES)], torch.zeros(spare, dtype=torch.int64)]),
        "mask": torch.cat([mask.to(torch.uint8 if graph else torch.bool), torch.zeros(spare, dtype=torch.uint8 if graph else torch.bool)]),
        "mask_offsets": torch.tensor([0, *(DRAFT * (p + DRAFT) for p in PREFIXES)]).cumsum(0), "streams": streams,
    }  # fmt: skip


def call(made: CudaBackend, given: dict, layer: int, mask, **options) -> torch.Tensor:
    out = torch.full((given["q"].shape[0], HEADS, LATENT), float("nan"))
    made.layer = layer
    made._attention(
        given["q"], given["k"], given["k"][..., :LATENT], out, given["pool"], given["pool"][..., :LATENT], given["qo"], given["kv"],
        given["indices"], mask, True, given["mask_offsets"], DRAFT, 1.0, 1.0, 0.05, logit_cap=0, sliding_window_size=-1, sinks=None,
        window_kv_offsets=None, xai_temperature_len=-1, page_size=1, score_mod=None, aux_tensors=None, **options)  # fmt: skip
    return out


def expected(given: dict, tree: bool) -> torch.Tensor:
    rows = []
    for b, prefix in enumerate(PREFIXES):
        first, start = b * DRAFT, int(given["kv"][b])
        keys = torch.cat(
            [given["pool"][given["indices"][start : start + prefix], 0], given["k"][first : first + DRAFT, 0]]
        ).double()
        at = int(given["mask_offsets"][b])
        seen = given["mask"][at : at + DRAFT * (prefix + DRAFT)].view(DRAFT, -1).bool()
        if not tree:
            seen = torch.ones(DRAFT, prefix + DRAFT, dtype=torch.bool).tril(prefix)
        scores = torch.einsum("thd,kd->htk", given["q"][first : first + DRAFT].double(), keys) * 0.05
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        rows.append(torch.einsum("htk,kd->thd", weights, keys[:, :LATENT]))
    return torch.cat(rows)


def main() -> None:
    ran = []

    def run(problem, variant, *, num_splits, workspace):
        ran.append((variant, workspace.numel()))
        run_problem(problem, "naive")

    cuda.run, cuda.choose, cuda.workspace_bytes = (
        run,
        lambda problem: ("naive", 4),
        lambda problem, variant, num_splits: 16,
    )
    report: dict = {}
    for name, graph in (("eager", False), ("graph", True)):
        made, given = backend(), inputs(graph)
        outs = [call(made, given, layer, given["mask"]) for layer in range(LAYERS)]
        report[f"{name} error"] = float((outs[0].double() - expected(given, True)).abs().max())
        report[f"{name} chain error"] = float(
            (call(made, given, 1, None).double() - expected(given, False)).abs().max()
        )
        report[f"{name} count"] = int(made.count[0])
        report[f"{name} plans"] = len(made.plans)
        report[f"{name} engine calls"] = made.engine_calls
    made, given = backend(), inputs(False)
    made.verifying = False
    call(made, given, 0, given["mask"])
    made.verifying = True
    made.use = False
    call(made, given, 0, given["mask"])
    report["handed on"] = made.engine_calls
    made.count_on_host = made.count
    made._take_count()
    report["incumbent_calls"] = made.counters.incumbent_calls
    report["workspaces"] = sorted({size for _, size in ran})
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
