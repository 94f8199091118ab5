"""verify_attn on a GPU: the tables of every CUDA variant with the recorded field beside them.

    python -m tests.benchmarks.bench_gpu_kernel [--json FILE] [--plot FILE.png] [--shapes 8/9/16/16384 ...] [--variants ...]

Tree mask, page size 1, bfloat16, shuffled slots. KV is cold: sets of rows rotate through 200 MB or more. Times are medians of
CUDA-graph replays, all kernels of a shape taking turns. A time is printed only for what was right against float64 before and
after it was timed. SGLang's Triton verify kernel is measured in the same run where SGLang is importable; otherwise its
column, like those of the other kernels, shows the recorded anchor of anchors_h200.json, marked with an r.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.verify_attn.cuda import lab
from tests.verify_attn.cuda.lab import Batch, ColdSets, Shape
from verify_attn import cuda
from verify_attn.timing import graph_of, time_graphs

SHAPES = ("8/9/1/1024", "8/9/4/4096", "8/9/1/16384", "8/9/1/65536", "8/9/16/16384", "8/9/16/131072", "8/17/16/16384",
          "8/33/16/16384", "8/65/16/16384", "64/9/1/16384", "64/9/16/16384", "64/33/16/16384")
TARGETS = dict(zip(SHAPES, (12, 20, 16, 28, 90, 640, 130, 240, 450, 40, 490, 1750)))
FIELD = ("sglang_triton_tree_page1", "fa3_cascade_tree_page1", "flashmla_sparse_tree_page1", "flashinfer_fa3_causal_page1",
         "flashmla_causal_page64")
SEED_PREFIXES = (1024, 4096, 16384, 65536)
CHUNKS = (256, 512, 1024, 2048)
CHECKED_PAIRS = 4e9  # rows x keys of float64 reference a shape is worth; beyond, only its first and last stream
Result = dict[str, Any]


def shape_of(text: str, dtype: torch.dtype = torch.bfloat16) -> Shape:
    heads, q, streams, prefix = (int(part) for part in text.split("/"))
    return Shape.even(heads, q, streams, prefix, dtype=dtype)


def floor_us(shape: Shape, ceilings: dict[str, float]) -> float:
    """max(bytes over the gather ceiling, FLOPs over the matrix ceiling), microseconds."""
    rate = "flops_bfloat16" if shape.dtype != torch.float32 else "flops_float32"
    return max(shape.needed_bytes / ceilings["gather"], shape.flops / ceilings[rate]) * 1e6


def measure(shape: Shape, variants: list[str], rounds: int, foreign: dict[str, Callable[[Batch], Callable[[], object]]]) -> Result:
    """Samples (us) of each variant and foreign kernel; a text instead where it refused or was wrong."""
    sets = ColdSets(shape)
    last = sets.batches[-1]
    streams = len(shape.q)
    checked = list(range(streams)) if sum(shape.q) * shape.heads * shape.prefix[0] < CHECKED_PAIRS else [0, streams - 1]
    expected = lab.reference(last, checked)
    found: Result = {}
    calls, kept = {}, []
    for name in variants:
        reason = cuda.refuse(name, last.problem)
        if reason:
            found[name] = f"refused: {reason}"
            continue
        workspace = cuda.make_workspace(last.problem, name)
        kept.append(workspace)
        calls[name] = [_call(b, name, workspace) for b in sets.batches]
    calls |= {name: [make(b) for b in sets.batches] for name, make in foreign.items()}
    graphs = {}
    for name, each in calls.items():
        try:
            graphs[name] = graph_of(each)
        except Exception as error:  # somebody else's kernel: whatever it raises is its result
            if name in variants:
                raise
            found[name] = f"failed: {error}"
            continue
        wrong = _wrong(last, graphs[name], expected, checked, lse=name in variants)
        if wrong:
            found[name] = f"wrong before timing: {wrong}"
            del graphs[name]
    samples = time_graphs(graphs, len(sets.batches), rounds=rounds)
    for name, graph in graphs.items():
        wrong = _wrong(last, graph, expected, checked, lse=name in variants)
        found[name] = f"wrong after timing: {wrong}" if wrong else samples[name]
    torch.cuda.empty_cache()
    return found


def _call(batch: Batch, variant: str, workspace: torch.Tensor) -> Callable[[], object]:
    return lambda: cuda.run(batch.problem, variant, workspace=workspace)


def _wrong(batch: Batch, graph: torch.cuda.CUDAGraph, expected: tuple, checked: list[int], *, lse: bool) -> str:
    lab.poison(batch.problem)
    graph.replay()
    torch.cuda.synchronize()
    return lab.judge(batch, expected, checked, lse=lse).why


def sglang_triton() -> Callable[[Batch], Callable[[], object]] | str:
    """Maker of calls to SGLang's own verify kernel, or why there is none."""
    extend_attention_fwd, errors = None, []
    for module in ("sglang.kernels.ops.attention.extend_attention", "sglang.srt.layers.attention.triton_ops.extend_attention"):
        try:  # newer, older releases
            extend_attention_fwd = importlib.import_module(module).extend_attention_fwd
            break
        except ImportError as error:
            errors.append(str(error))
    if extend_attention_fwd is None:
        return "; ".join(errors)

    def maker(batch: Batch) -> Callable[[], object]:
        p, shape = batch.problem, batch.shape
        draft = p.kv_pool[p.draft_slots.long()][:, None]
        pool = p.kv_pool[:, None]
        ones = [torch.ones(q, n, dtype=torch.bool, device="cuda") for q, n in zip(shape.q, shape.prefix)]
        mask = torch.cat([torch.cat([o, m], 1).reshape(-1) for o, m in zip(ones, batch.masks)]).to(torch.uint8)
        sizes = torch.tensor([0, *(q * (n + q) for q, n in zip(shape.q, shape.prefix))])
        mask_indptr = sizes.cumsum(0).cuda()
        kv_indices = p.kv_indices.long()
        return lambda: extend_attention_fwd(
            p.q, draft, draft[..., :512], p.out, pool, pool[..., :512], p.qo_indptr, p.kv_indptr, kv_indices, mask, True, mask_indptr,
            p.max_q, 1.0, 1.0, sm_scale=p.scale)

    return maker


def measured_ceilings() -> dict[str, float]:
    """Bytes/s and FLOP/s of this device, measured now."""
    from phases.harness import ceilings

    return {c.kind: c.value for c in ceilings.measure("cuda")}


def anchors() -> tuple[dict[str, dict[str, float]], str]:
    data = json.loads(Path(__file__).with_name("anchors_h200.json").read_text())
    return {row["shape"]: row["microseconds"] for row in data["rows"]}, data["device"]


def main_table(shapes: list[str], variants: list[str], rounds: int, ceilings: dict[str, float]) -> dict[str, Result]:
    recorded, device = anchors()
    if torch.cuda.get_device_name() != device:
        recorded = {}
    sglang = sglang_triton()
    foreign = {} if isinstance(sglang, str) else {FIELD[0]: sglang}
    if isinstance(sglang, str):
        print(f"SGLang is not importable here ({sglang}): its column is recorded\n")
    print("bfloat16, tree mask, page size 1, microseconds; r = recorded earlier on another H200, not measured in this run")
    head = ["heads/q/streams/prefix", "floor", *variants, "target", "best/floor", *FIELD]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    all_found = {}
    for text in shapes:
        shape = shape_of(text)
        slow = shape.flops > 3e11  # the foreign kernel takes tens of milliseconds there
        found = measure(shape, variants, 5 if slow else rounds, {} if slow else foreign)
        all_found[text] = found
        medians = {n: statistics.median(s) for n, s in found.items() if isinstance(s, list)}
        own = [medians[v] for v in variants if v in medians]
        least = floor_us(shape, ceilings)
        cells = [text, f"{least:.1f}", *(_cell(found.get(v), medians.get(v)) for v in variants), str(TARGETS.get(text, "")),
                 f"{min(own) / least:.2f}" if own else ""]
        for name in FIELD:
            old = recorded.get(text, {}).get(name)
            cells.append(f"{medians[name]:.1f}" if name in medians else f"{old:.1f} r" if old else "")
        print("| " + " | ".join(cells) + " |", flush=True)
    for text, found in all_found.items():
        for name, result in found.items():
            if isinstance(result, str):
                print(f"{text} {name}: {result}")
    return all_found


def _cell(result: Any, median: float | None) -> str:
    if median is not None:
        return f"{median:.1f}"
    return "-" if result is None else result.split(":")[0]


def seed_table(ceilings: dict[str, float], heads: int = 64) -> dict[str, Result]:
    """The seed table: float32, 64 heads, q9, one stream."""
    print("\nfloat32, 64 heads, q9, one stream, microseconds\n| prefix | floor | cuda_naive | per_head | per_head is faster |\n|---|---|---|---|---|")
    all_found = {}
    for prefix in SEED_PREFIXES:
        shape = shape_of(f"{heads}/9/1/{prefix}", torch.float32)
        found = measure(shape, ["cuda_naive", "per_head"], 5, {})
        all_found[f"{heads}/9/1/{prefix} float32"] = found
        medians = {n: statistics.median(s) for n, s in found.items() if isinstance(s, list)}
        ratio = f"{medians['cuda_naive'] / medians['per_head']:.1f} times" if len(medians) == 2 else ""
        print(f"| {prefix} | {floor_us(shape, ceilings):.1f} | " + " | ".join(_cell(found[n], medians.get(n)) for n in ("cuda_naive", "per_head"))
              + f" | {ratio} |", flush=True)
    return all_found


def invariance_table(variants: list[str], rounds: int, texts: tuple[str, ...] = ("8/9/16/16384", "8/9/1/16384", "8/9/4/4096")) -> None:
    """What the batch-invariant mode costs: the time with fixed chunks over the time without."""
    print("\nbatch-invariant mode, microseconds (times the free split)\n| shape | variant | off | " + " | ".join(f"chunk {c}" for c in CHUNKS) + " |")
    print("|---|---|---|" + "---|" * len(CHUNKS))
    for text in texts:
        sets = ColdSets(shape_of(text))
        for name in variants:
            if cuda.refuse(name, replace(sets.batches[0].problem, chunk=CHUNKS[0])):
                continue
            graphs, kept = {}, []
            for chunk in (0, *CHUNKS):
                problems = [replace(b.problem, chunk=chunk) for b in sets.batches]
                kept.append(cuda.make_workspace(problems[0], name))
                graphs[str(chunk)] = graph_of([_problem_call(p, name, kept[-1]) for p in problems])
            medians = {k: statistics.median(s) for k, s in time_graphs(graphs, len(sets.batches), rounds=rounds).items()}
            print(f"| {text} | {name} | {medians['0']:.1f} | " + " | ".join(f"{medians[str(c)]:.1f} ({medians[str(c)] / medians['0']:.2f})" for c in CHUNKS) + " |", flush=True)
        torch.cuda.empty_cache()


def _problem_call(problem, name: str, workspace: torch.Tensor) -> Callable[[], object]:
    return lambda: cuda.run(problem, name, workspace=workspace)


def plot(measured: Result) -> bytes:
    """PNG of measured time over the roofline floor, by the toolkit's own plot of benchmark records, from what --json wrote."""
    from phases.report import plots
    from phases.base.results import BenchmarkRecord, Case

    records = []
    for text, result in measured["microseconds"].items():
        shape, *kind = text.split(" ")
        dtype = kind[0] if kind else "bfloat16"
        floor = floor_us(shape_of(shape, getattr(torch, dtype)), measured["ceilings"]) * 1e-6
        records += [BenchmarkRecord(Case(shape, dtype), f"{v} {dtype}", "candidate", "cuda", tuple(s * 1e-6 for s in samples), roofline_seconds=floor)
                    for v, samples in result.items() if isinstance(samples, list) and v not in FIELD]
    return plots.achieved(records, f"verify_attn on {measured['device']}, cold KV, page size 1, tree mask")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), metavar="HEADS/Q/STREAMS/PREFIX")
    parser.add_argument("--variants", nargs="*", help="default: all that run on this GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tables", nargs="*", choices=("main", "seed", "invariance"), default=["main", "seed", "invariance"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG of measured time over the floor")
    parser.add_argument("--replot", type=Path, metavar="JSON", help="measure nothing: plot what --json wrote earlier")
    options = parser.parse_args(argv)
    if options.replot:
        options.plot.write_bytes(plot(json.loads(options.replot.read_text())))
        return 0
    if not torch.cuda.is_available():
        print("error: no CUDA device here; run this on the GPU to be measured", file=sys.stderr)
        return 1
    usable = [v for v in cuda.variants() if v != "cuda_naive" and v != "per_head"]
    variants = options.variants or usable
    ceilings = measured_ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ceilings of this run: "
          + ", ".join(f"{k} {v / 1e12:.2f} T{'FLOP' if k.startswith('flops') else 'B'}/s" for k, v in ceilings.items()))
    found = main_table(options.shapes, variants, options.rounds, ceilings) if "main" in options.tables else {}
    seeds = seed_table(ceilings) if "seed" in options.tables else {}
    if "invariance" in options.tables:
        invariance_table(variants, options.rounds)
    measured = {"device": torch.cuda.get_device_name(), "ceilings": ceilings, "microseconds": {**found, **seeds}}
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1))
    if options.plot:
        options.plot.write_bytes(plot(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
