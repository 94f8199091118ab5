"""A small grid for compute-sanitizer: `compute-sanitizer --tool memcheck|racecheck python -m tests.verify_attn.cuda.sanitize [variant ...]`.

Runs each variant eagerly and under a replayed graph, judges the output, and exits 1 when an output is wrong; the
sanitizer itself exits with what --error-exitcode says when it finds something.
"""

from __future__ import annotations

import sys

import torch

from tests.verify_attn.cuda import lab
from tests.verify_attn.cuda.lab import Shape
from verify_attn import cuda


def grid(dtype: torch.dtype) -> list[tuple[Shape, dict]]:
    shape = dict(dtype=dtype)
    return [
        (Shape(8, (9, 0, 3), (130, 7, 0), mask="full", wide=True, padding=2, **shape), {}),
        (Shape(8, (9, 17), (333, 64), page=16, beside=True, mask="qlen", **shape), {}),
        (Shape(8, (9, 9), (300, 20), **shape), dict(chunk=64)),
        (Shape(64, (5,), (700,), mask="causal", **shape), dict(max_q=9, max_prefix=1000)),
    ]


def main(names: list[str]) -> int:
    wrong = 0
    for name in names or list(cuda.variants()):
        for dtype in (torch.bfloat16, torch.float32):
            for shape, bounds in grid(dtype):
                batch = lab.make_batch(shape, **bounds)
                expected = lab.reference(batch)
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
