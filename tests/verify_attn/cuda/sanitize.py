"""A small grid for compute-sanitizer: `compute-sanitizer --tool memcheck|racecheck python -m tests.verify_attn.cuda.sanitize [variant ...]`.

Runs each variant eagerly and under a replayed graph, judges the output, and exits 1 when an output is wrong; the
sanitizer itself exits with what --error-exitcode says when it finds something.
"""

from __future__ import annotations

import dataclasses
import sys

import torch

from tests.verify_attn.cuda import lab
from tests.verify_attn.cuda.lab import Shape
from verify_attn import cuda, reference


def grid(dtype: torch.dtype) -> list[tuple[Shape, dict]]:
    """Shapes and bounds; of float32, whose kernels are the same templates, only the first."""
    shape = dict(dtype=dtype)
    shapes = [
        (Shape(8, (9, 0, 3), (130, 7, 0), mask="full", wide=True, padding=2, **shape), {}),
        (Shape(8, (9, 17), (333, 64), page=16, beside=True, mask="qlen", **shape), {}),
        (Shape(8, (9, 9), (300, 20), **shape), dict(chunk=64)),
        (Shape(64, (5,), (700,), mask="causal", **shape), dict(max_q=9, max_prefix=1000)),
    ]
    return shapes[:1] if dtype == torch.float32 else shapes


def expected_of(batch: lab.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 reference computed on the CPU: under the sanitizer, matrix products on the GPU take most of the time."""
    values = {f.name: getattr(batch.problem, f.name) for f in dataclasses.fields(batch.problem)}
    on_cpu = dataclasses.replace(batch.problem, **{k: v.cpu() for k, v in values.items() if isinstance(v, torch.Tensor)})
    out, lse = reference.attend(on_cpu)
    return out.cuda(), lse.cuda()


def main(names: list[str]) -> int:
    wrong = 0
    for name in names or list(cuda.variants()):
        for dtype in (torch.bfloat16, torch.float32):
            for shape, bounds in grid(dtype):
                batch = lab.make_batch(shape, **bounds)
                expected = expected_of(batch)
                verdict = lab.try_variant(batch, name, expected)
                if isinstance(verdict, str):
                    print(f"{name}: refused: {verdict}")
                    continue
                workspace = cuda.make_workspace(batch.problem, name)
                graph = lab.graph_of([lambda: cuda.run(batch.problem, name, workspace=workspace)])
                lab.poison(batch.problem)
                graph.replay()
                again = lab.judge(batch, expected)
                wrong += bool(verdict.why or again.why)
                print(f"{name} {dtype} q={shape.q} prefix={shape.prefix} chunk={bounds.get('chunk', 0)}: {verdict.why or again.why or 'ok'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
