"""A case in flashinfer-bench's words: Definition, axes and inputs (see `phases.harness.definitions` for the form).

Covered: bit masks, draft rows in the pool, 32-bit indices, no padding, no batch-invariant mode; whatever heads, page size,
dimensions and dtype, which are constants of the Definition.
"""

from __future__ import annotations

from typing import Any

import torch

from verify_attn import inputs as made_inputs
from verify_attn.cases import Json, full

REFERENCE = '''\
import torch


def run(q, kv_pool, qo_indptr, kv_indptr, kv_indices, prefix_lens, draft_slots, mask, scale):
    """Each query sees its stream's whole prefix, and those draft rows whose bit its row of `mask` sets."""
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, LATENT, dtype=q.dtype, device=q.device)
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float32, device=q.device)
    for stream in range(prefix_lens.shape[0]):
        first, last = int(qo_indptr[stream]), int(qo_indptr[stream + 1])
        if first == last:
            continue
        keys = torch.arange(int(prefix_lens[stream]), device=q.device)
        pages = kv_indices[int(kv_indptr[stream]) + keys // PAGE].long()
        slots = torch.cat([pages * PAGE + keys % PAGE, draft_slots[first:last].long()])
        kv = kv_pool[slots].double()
        column = torch.arange(last - first, device=q.device)
        tree = (mask[first:last][:, column // 32] >> (column % 32)) & 1
        hidden = torch.cat([tree.new_zeros(last - first, len(keys)), 1 - tree], dim=1).bool()
        scores = torch.einsum("thd,kd->thk", q[first:last].double(), kv) * scale
        scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
        total = torch.logsumexp(scores, dim=-1, keepdim=True)
        weights = torch.exp(scores - total).nan_to_num(0.0)  # a row that sees nothing: 0 and -inf
        out[first:last] = (weights @ kv[:, :LATENT]).to(q.dtype)
        lse[first:last] = total[..., 0].float()
    return out, lse
'''

MAIN = '''\
"""verify_attn's VARIANT. Compiled objects are built on first use, with the compiler that is at hand (g++ or nvcc)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from verify_attn import verify_attention  # noqa: E402


def run(q, kv_pool, qo_indptr, kv_indptr, kv_indices, prefix_lens, draft_slots, mask, scale, out, lse):
    verify_attention(
        q, kv_pool, qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, prefix_lens=prefix_lens, page_size=PAGE,
        draft_slots=draft_slots, mask=mask, mask_layout="bits", scale=scale, latent_dim=LATENT, out=out, lse=lse, variant="VARIANT")
'''


def definition(case: Json) -> Json:
    """The case's Definition with its workload; empty where the case is not covered."""
    p = full(case)
    if p["mask"] != "bits" or p["draft"] != "pool" or p["index"] != 32 or p["padding"] or p["chunk"]:
        return {}
    host = torch.Generator().manual_seed(0)
    pages, slots, pool_rows = made_inputs.places(p, host)
    tensors = made_inputs.indices(p, pages, torch.int32)
    tensors["kv_indices"] = tensors["kv_indices"][: sum(map(len, pages))].clone()  # without the traps at its end
    tensors |= {"draft_slots": slots.to(torch.int32), "mask": made_inputs.tree_mask(p, host, torch.int32)["mask"]}
    axes = {"tokens": sum(p["q"]), "slots": pool_rows, "streams": len(p["q"]), "boundaries": len(p["q"]) + 1,
            "pages": tensors["kv_indices"].shape[0], "words": tensors["mask"].shape[1]}  # fmt: skip
    order = [name for name in _inputs(case["dtype"]) if name in tensors]
    given: Json = {"q": "random", "kv_pool": "random", **{name: tensors[name] for name in order}, "scale": made_inputs.SCALE}
    constants = {"LATENT": str(p["latent"]), "PAGE": str(p["page"])}
    return {"definition": _definition(p, case["dtype"], _filled(REFERENCE, constants)), "axes": axes, "inputs": given, "main": _filled(MAIN, constants)}


def _definition(p: Json, dtype: str, reference: str) -> Json:
    heads, latent, rope, page = p["heads"], p["latent"], p["rope"], p["page"]
    variable = {name: {"type": "var"} for name in ("tokens", "slots", "streams", "boundaries", "pages", "words")}
    constant = {name: {"type": "const", "value": value} for name, value in (("heads", heads), ("row", latent + rope), ("latent", latent))}
    return {
        "name": f"mla_verify_tree_h{heads}_ckv{latent}_kpe{rope}_ps{page}_{dtype}", "op_type": "mla_paged",
        "description": "Attention of speculative decoding's verify step: a tree of draft tokens over a paged prefix, in MLA's absorbed form.",
        "tags": ["stage:verify", "status:draft"], "axes": {**variable, **constant}, "inputs": _inputs(dtype),
        "outputs": {"out": _tensor(dtype, "tokens", "heads", "latent"), "lse": {**_tensor("float32", "tokens", "heads"), "description": "natural logarithm"}},
        "constraints": ["boundaries == streams + 1"], "reference": reference,
    }  # fmt: skip


def _inputs(dtype: str) -> Json:
    return {
        "q": _tensor(dtype, "tokens", "heads", "row"), "kv_pool": _tensor(dtype, "slots", "row"),
        "qo_indptr": _tensor("int32", "boundaries"), "kv_indptr": _tensor("int32", "boundaries"), "kv_indices": _tensor("int32", "pages"),
        "prefix_lens": _tensor("int32", "streams"), "draft_slots": _tensor("int32", "tokens"),
        "mask": {**_tensor("int32", "tokens", "words"), "description": "bit j of a row: whether it sees draft row j of its stream"},
        "scale": {"shape": None, "dtype": "float32", "description": "multiplies q·kv"},
    }  # fmt: skip


def _tensor(dtype: str, *shape: str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype}


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text
