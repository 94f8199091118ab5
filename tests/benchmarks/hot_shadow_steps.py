"""Run inside the serving environment (`bench_hot.py shadow --steps`): verify steps of the real CPU backend with the shadow.

No server: the backend's own `init_forward_metadata` and `verify` on batches laid out as SGLang lays them out, all layers of a step.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))
import cpu_layouts  # noqa: E402

LAYERS, HEADS, LATENT, ROPE = 4, 16, 512, 64


def steps(prefixes: list[int], dtype: torch.dtype, count: int) -> dict:
    """Median milliseconds of plain and of compared verify steps, which alternate at random, so that both meet the same machine."""
    torch.manual_seed(1)
    cpu_layouts.PREFIXES = prefixes
    width, draft = max(prefixes) + cpu_layouts.DRAFT, cpu_layouts.DRAFT
    rows = torch.randn(len(prefixes) * width + 1, 1, LATENT + ROPE).to(dtype)
    table = (torch.randperm(len(prefixes) * width) + 1).view(len(prefixes), width).int()
    made, given = cpu_layouts.backend(rows, table), _batch(table, prefixes, draft)
    made.shadow.rate = 0.5
    q = torch.randn(len(prefixes) * draft, HEADS, LATENT + ROPE).to(dtype)
    out = q.new_zeros(q.shape[0], HEADS, LATENT)
    layers = [SimpleNamespace(scaling=0.05, layer_id=number) for number in range(LAYERS)]
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(count + 3):
        started = time.perf_counter()
        made.init_forward_metadata(given)
        for layer in layers:
            made.verify(q, rows, layer, given, out)
        if number >= 3:
            times[made.shadowing].append(1e3 * (time.perf_counter() - started))
    assert made.shadow.evidence is None and made.counters.incumbent_calls == 0
    plain, compared = (statistics.median(times[which]) for which in (False, True))
    return {"prefixes": prefixes, "plain_ms": round(plain, 2), "compared_ms": round(compared, 2), "n": [len(times[False]), len(times[True])],
            "slowdown_of_the_average_step": {f"{rate:.0%}": round(rate * (compared / plain - 1), 4) for rate in (0.0, 0.01, 0.1, 1.0)}, "worst": made.shadow.worst}  # fmt: skip


def _batch(table: torch.Tensor, prefixes: list[int], draft: int) -> SimpleNamespace:
    tree = (torch.rand(len(prefixes), draft, draft) < 0.5).tril(-1) | torch.eye(draft, dtype=torch.bool)
    mode = SimpleNamespace(is_target_verify=lambda: True, is_idle=lambda: False, is_decode=lambda: False)
    slots = torch.cat([table[row, p : p + draft] for row, p in enumerate(prefixes)]).long()
    return SimpleNamespace(forward_mode=mode, req_pool_indices=torch.arange(len(prefixes)), seq_lens=torch.tensor(prefixes), out_cache_loc=slots,
                           spec_info=SimpleNamespace(draft_token_num=draft, custom_mask=tree.flatten()))  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    json.dump([steps(prefixes, torch.bfloat16, 150) for prefixes in ([1024] * 4, [4096], [200])], sys.stdout)


if __name__ == "__main__":
    main()
