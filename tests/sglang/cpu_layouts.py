"""Run inside the serving environment by test_cpu_layouts.py: the CPU backend hands every mask layout to the kernel rightly.

Compared are the kernel and the plain torch attention of the same backend, on the same batch.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from verify_attn.sglang.control import Control
from verify_attn.sglang.cpu_backend import CpuBackend
from verify_attn.sglang.facts import Counters
from verify_attn.sglang.shadow import Shadow

HEADS, DRAFT = 4, 6
PREFIXES = [9, 1, 70]


def backend(rows: torch.Tensor, table: torch.Tensor) -> CpuBackend:
    made = CpuBackend.__new__(CpuBackend)
    made.control, made.counters, made.kernel_inputs, made.segments = Control(None), Counters(), {}, []
    made.shadow = Shadow(1.0, made.control)
    made.req_to_token_pool = SimpleNamespace(req_to_token=table)
    made.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: rows, set_kv_buffer=lambda *given: None)
    return made


def batch(table: torch.Tensor, layout: str) -> SimpleNamespace:
    tree = (torch.rand(len(PREFIXES), DRAFT, DRAFT) < 0.5).tril(-1) | torch.eye(DRAFT, dtype=torch.bool)
    mask = {"chain": None, "qlen": tree.flatten()}.get(layout)
    if layout == "full":
        blocks = [torch.cat([torch.ones(DRAFT, p, dtype=torch.bool), t], 1).flatten() for p, t in zip(PREFIXES, tree)]
        mask = torch.cat(blocks)
    mode = SimpleNamespace(is_target_verify=lambda: True, is_idle=lambda: False, is_decode=lambda: False)
    lengths = torch.tensor(PREFIXES)
    slots = torch.cat([table[row, p : p + DRAFT] for row, p in enumerate(PREFIXES)]).long()
    return SimpleNamespace(
        forward_mode=mode,
        req_pool_indices=torch.arange(len(PREFIXES)),
        seq_lens=lengths,
        out_cache_loc=slots,
        spec_info=SimpleNamespace(draft_token_num=DRAFT, custom_mask=mask),
        tree=tree,
    )


def main() -> None:
    report = {}
    for latent, rope in ((512, 64), (64, 16)):
        for dtype in (torch.float32, torch.bfloat16):
            for layout in ("qlen", "full", "chain"):
                torch.manual_seed(1)
                rows = torch.randn(600, 1, latent + rope).to(dtype)
                table = torch.randperm(599)[: 3 * 100].view(3, 100).int() + 1
                made, given = backend(rows, table), batch(table, layout)
                made.init_forward_metadata(given)
                if layout == "full":  # the torch attention reads QLEN masks only
                    made.segments = [
                        seg.__class__(seg.first, seg.last, seg.slots, tree=tree)
                        for seg, tree in zip(made.segments, given.tree)
                    ]
                layer = SimpleNamespace(scaling=0.07, layer_id=0)
                q = torch.randn(len(PREFIXES) * DRAFT, HEADS, latent + rope).to(dtype)
                ours, theirs = (q.new_zeros(q.shape[0], HEADS, latent) for _ in range(2))
                made.verify(q, rows, layer, given, ours)
                made.attend(q, rows, layer.scaling, theirs)
                error = ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
                report[f"{latent} {str(dtype)[6:]} {layout}"] = error
                assert made.counters.verify_calls == 1 and made.counters.incumbent_calls == 0
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
