"""Random tensors for a case, made to hurt: pages and slots shuffled, everything a kernel must not read filled with NaN or
nonsense, and draft rows weighty enough that a wrong mask shows in the result even after a long prefix.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from verify_attn import ddtree, masks
from verify_attn.cases import Json, full
from verify_attn.problem import Problem, make_problem

SCALE = 192**-0.5  # DeepSeek V3's: 128 + 64 dims of the unabsorbed query
NONSENSE = 1_000_003  # index entries no kernel may follow
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def inputs(case: Json, seed: int, device: str) -> Json:
    """Inputs of a case: tensors named as `verify_attention` takes them, and its options under the same names."""
    p = full(case)
    host = torch.Generator().manual_seed(seed)
    index = torch.int64 if p["index"] == 64 else torch.int32
    made: Json = {"page_size": p["page"], "scale": SCALE, "latent_dim": p["latent"], "chunk": p["chunk"],
                  "max_q": max(p["q"], default=0), "max_prefix": max(p["prefix"], default=0)}
    pages, slots, pool_rows = places(p, host)
    made |= indices(p, pages, index)
    made |= _rows(p, case["dtype"], slots, pages, pool_rows, index, seed, device)
    made |= tree_mask(p, host, index)
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in made.items()}


def outputs(case: Json, device: str) -> dict[str, Tensor]:
    p = full(case)
    tokens = sum(p["q"]) + p["padding"]
    return {"out": torch.empty(tokens, p["heads"], p["latent"], dtype=DTYPES[case["dtype"]], device=device),
            "lse": torch.empty(tokens, p["heads"], dtype=torch.float32, device=device)}


def problem(made: Json, out: dict[str, Tensor], check_values: bool | None = None) -> Problem:
    """The checked problem of inputs and outputs."""
    return make_problem(**{k: v for k, v in made.items() if k != "trees"}, out=out["out"], lse=out["lse"], check_values=check_values)


def shape_only(case: Json, device: str) -> Problem:
    """A problem whose host-known fields are the case's and whose tensors hold nothing: for asking variants, not running."""
    p = full(case)
    streams, row = len(p["q"]), p["latent"] + p["rope"]
    out = outputs(case, device)
    index = torch.int64 if p["index"] == 64 else torch.int32
    tokens = out["out"].shape[0]
    dtype = DTYPES[case["dtype"]]
    zeros = torch.zeros(streams + 1, dtype=index, device=device)
    tree: Json = {}
    if p["mask"] == "bits":
        tree["mask"] = torch.zeros(tokens, max(1, -(-max(p["q"]) // 32)), dtype=torch.int32, device=device)
    elif p["mask"] != "none":
        layout = "full" if p["mask"] == "full" else "qlen"
        tree = {"mask": torch.zeros(1, dtype=torch.uint8, device=device), "mask_indptr": zeros, "mask_layout": layout}
    draft = {"draft_kv": torch.empty(tokens, row, dtype=dtype, device=device)} if p["draft"] == "beside" else \
        {"draft_slots": torch.zeros(tokens, dtype=index, device=device)}
    return make_problem(
        torch.empty(tokens, p["heads"], row, dtype=dtype, device=device), torch.empty(1, row, dtype=dtype, device=device),
        qo_indptr=zeros, kv_indptr=zeros, kv_indices=zeros[:0], prefix_lens=torch.zeros(streams, dtype=torch.int32, device=device),
        page_size=p["page"], scale=SCALE, latent_dim=p["latent"], chunk=p["chunk"], max_q=max(p["q"]), max_prefix=max(p["prefix"]),
        check_values=False, **tree, **draft, **out)


def perturbations(case: Json, made: Json, seed: int) -> list[tuple[str, Json]]:
    """The inputs with one thing changed that must change the result: a mask bit, a draft KV row, a prefix KV row."""
    p = full(case)
    random = torch.Generator().manual_seed(seed)
    changed = []
    wide = [b for b, q in enumerate(p["q"]) if q > 1]
    if p["mask"] != "none" and wide:
        b = wide[int(torch.randint(len(wide), (1,), generator=random))]
        row = int(torch.randint(1, p["q"][b], (1,), generator=random))
        column = int(torch.randint(row, (1,), generator=random))
        changed.append(("flip a mask bit", {**made, "mask": _flipped(p, made, b, row, column)}))
    longest = max(range(len(p["q"])), key=lambda b: p["prefix"][b] if p["q"][b] else -1)
    if p["prefix"][longest] and p["logits"] == "normal":
        key = int(torch.randint(p["prefix"][longest], (1,), generator=random))
        pool = made["kv_pool"].clone()
        page = int(made["kv_indices"][int(made["kv_indptr"][longest]) + key // p["page"]])
        pool[page * p["page"] + key % p["page"]] *= -3
        changed.append(("another KV row", {**made, "kv_pool": pool}))
    return changed


def trees(p: Json, random: torch.Generator) -> list[Tensor]:
    """Bool [q, q] for every stream of the case's kind of tree."""
    return [_tree("chain" if p["mask"] == "none" else p["tree"], q, random) for q in p["q"]]


def _tree(kind: str, q: int, random: torch.Generator) -> Tensor:
    if kind == "ddtree":
        marginals = torch.randn(6, 50, generator=random).mul(2).log_softmax(-1)
        return ddtree.build_tree(0, marginals, q - 1).mask() if q else torch.zeros(0, 0, dtype=torch.bool)
    parents = [-1]
    for node in range(1, q):
        choice = int(torch.randint(node, (1,), generator=random))
        parents.append({"chain": node - 1, "star": 0, "deep": max(choice, node - 3)}.get(kind, choice))
    mask = ddtree.ancestor_mask(parents[:q])
    if kind == "blind" and q > 2:
        mask[2] = False
    return mask


def places(p: Json, random: torch.Generator) -> tuple[list[Tensor], Tensor, int]:
    """Pages of each stream's prefix, slots of the draft rows, and rows in the pool; all shuffled, some pages unused."""
    size = p["page"]
    counts = [-(-n // size) for n in p["prefix"]]
    draft_pages = -(-sum(p["q"]) // size)
    total = sum(counts) + draft_pages + 3
    order = torch.randperm(total, generator=random)
    pages = list(order[: sum(counts)].split(counts)) if counts else []
    free = (order[sum(counts): sum(counts) + draft_pages, None] * size + torch.arange(size)).reshape(-1)
    slots = free[torch.randperm(free.numel(), generator=random)][: sum(p["q"])]
    return pages, slots, total * size


def indices(p: Json, pages: list[Tensor], index: torch.dtype) -> Json:
    nonsense = torch.full((2,), NONSENSE)
    return {"qo_indptr": _indptr(p["q"], index), "kv_indptr": _indptr([len(x) for x in pages], index),
            "kv_indices": torch.cat([*pages, nonsense]).to(index), "prefix_lens": torch.tensor(p["prefix"], dtype=torch.int32)}


def _rows(p: Json, dtype: str, slots: Tensor, pages: list[Tensor], pool_rows: int, index: torch.dtype, seed: int, device: str) -> Json:
    """Queries, pool and draft rows. Slots that belong to nobody, and padding rows, hold NaN."""
    random = torch.Generator(device).manual_seed(seed + 1)
    row, live, tokens = p["latent"] + p["rope"], sum(p["q"]), sum(p["q"]) + p["padding"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=device)

    q, draft = normal(tokens, p["heads"], row), normal(live, row)
    if p["logits"] == "large":
        q *= 40
    elif p["logits"] == "normal":  # a direction shared by queries and draft rows lifts the draft's share to about a half
        direction = torch.nn.functional.normalize(normal(row), dim=0)
        lift = math.sqrt(math.log(max(p["prefix"], default=0) + 1.0) / SCALE)
        q, draft = q + lift * direction, draft + lift * direction
    q[live:] = float("nan")
    pool = torch.full((pool_rows, row), float("nan"), device=device)
    for own, n in zip(pages, p["prefix"]):
        keys = torch.arange(n)
        pool[(own[keys // p["page"]] * p["page"] + keys % p["page"]).to(device)] = normal(n, row)
    if p["logits"] == "equal":
        q[:live], draft = 0.0, draft
    kind = DTYPES[dtype]
    made: Json = {"q": q.to(kind)}
    if p["draft"] == "beside":
        beside = torch.full((tokens, row), float("nan"), device=device)
        beside[:live] = draft
        made["draft_kv"] = beside.to(kind)
    else:
        pool[slots.to(device)] = draft
        made["draft_slots"] = torch.cat([slots, torch.full((p["padding"],), NONSENSE)]).to(index)
    return {**made, "kv_pool": pool.to(kind)}


def tree_mask(p: Json, random: torch.Generator, index: torch.dtype) -> Json:
    made = trees(p, random)
    if p["mask"] == "none":
        return {}
    if p["mask"] == "bits":
        return {"mask": masks.pack_bits(made, tokens=sum(p["q"]) + p["padding"]), "mask_layout": "bits"}
    if p["mask"] == "full":
        flat, indptr = masks.full_mask(made, p["prefix"])
        return {"mask": flat, "mask_indptr": indptr.to(index), "mask_layout": "full"}
    flat, indptr = masks.qlen_mask(made)
    return {"mask": flat.bool(), "mask_indptr": indptr.to(index), "mask_layout": "qlen"}


def _flipped(p: Json, made: Json, stream: int, row: int, column: int) -> Tensor:
    mask = made["mask"].clone()
    if p["mask"] == "bits":
        token = int(made["qo_indptr"][stream]) + row
        value = (int(mask[token, column // 32]) ^ (1 << (column % 32))) & 0xFFFFFFFF
        mask[token, column // 32] = value - 2**32 if value >= 2**31 else value
        return mask
    q, skip = p["q"][stream], p["prefix"][stream] if p["mask"] == "full" else 0
    at = int(made["mask_indptr"][stream]) + row * (skip + q) + skip + column
    mask[at] = ~mask[at] if mask.dtype == torch.bool else 1 - mask[at]
    return mask


def _indptr(lengths: list[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def rearranged(case: Json, made: Json, order: list[int]) -> tuple[Json, Json]:
    """The same streams in another order or with repetitions; the pool is shared. For batch invariance.

    Args:
        order: streams of the new batch, by their number in the old.

    Returns:
        (case, inputs) of the new batch.
    """
    p = full(case)
    new = {**case["params"], "q": [p["q"][b] for b in order], "prefix": [p["prefix"][b] for b in order], "padding": 0}
    tokens = torch.cat([torch.arange(int(made["qo_indptr"][b]), int(made["qo_indptr"][b + 1])) for b in order])
    pages = [made["kv_indices"][int(made["kv_indptr"][b]): int(made["kv_indptr"][b + 1])] for b in order]
    index, device = made["kv_indices"].dtype, made["q"].device
    changed: dict[str, Any] = {
        "q": made["q"][tokens.to(device)], "mask": made["mask"][tokens.to(device)],
        "qo_indptr": _indptr(new["q"], index).to(device), "kv_indptr": _indptr([len(x) for x in pages], index).to(device),
        "kv_indices": torch.cat(pages), "prefix_lens": torch.tensor(new["prefix"], dtype=torch.int32, device=device)}
    for name in ("draft_slots", "draft_kv"):
        if name in made:
            changed[name] = made[name][tokens.to(device)]
    return {"name": f"{case['name']} as {order}", "dtype": case["dtype"], "params": new}, {**made, **changed}
