"""The cases verify_attn is proved and timed on, and what each costs. Plain data; inputs.py makes tensors of them.

A case is {"name", "dtype", "params"}. Names read q9/16384/s1 (draft-tree queries / prefix / streams), with a word for what
is special. params: heads, q and prefix (one number a stream), tree, mask, page, draft, index, logits, padding, chunk,
latent, rope; DEFAULTS holds what a case does not say.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

DEFAULTS: Json = {
    "tree": "random",    # random | chain | star | deep | ddtree | blind (one row sees nothing)
    "mask": "bits",      # bits | bool (q×q) | full (SGLang's) | none (a chain)
    "page": 1,           # keys a page; pages are always shuffled
    "draft": "pool",     # pool | beside
    "index": 32,         # bits of the index tensors
    "logits": "normal",  # normal | equal (all scores alike) | large (spread of hundreds)
    "padding": 0,        # rows past the last stream
    "chunk": 0,          # > 0: batch-invariant mode
    "latent": 512,
    "rope": 64,
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def make(q: int | list[int], prefix: int | list[int], streams: int = 1, *, heads: int, dtype: str, word: str = "", **params: Any) -> Json:
    """A case; q and prefix may differ by stream."""
    q_list = [q] * streams if isinstance(q, int) else q
    prefixes = [prefix] * streams if isinstance(prefix, int) else prefix
    unknown = set(params) - set(DEFAULTS)
    if unknown or len(q_list) != len(prefixes):
        raise ValueError(f"case parameters {sorted(unknown)} are unknown" if unknown else "q and prefix differ in length")
    name = f"q{_range(q_list)}/{_range(prefixes)}/s{len(q_list)}" + (f"/{word}" if word else "")
    return {"name": name, "dtype": dtype, "params": {"heads": heads, "q": q_list, "prefix": prefixes, **params}}


def full(case: Json) -> Json:
    """The case's params with the defaults filled in."""
    return {**DEFAULTS, **case["params"]}


def cost(case: Json) -> Json:
    """Needed bytes, each once (KV rows, q, out, lse, indices, mask), and FLOPs of both products over every key."""
    p = full(case)
    size, row, latent = BYTES[case["dtype"]], p["latent"] + p["rope"], p["latent"]
    keys = sum(n + q for q, n in zip(p["q"], p["prefix"]) if q)
    pairs = sum(q * (n + q) for q, n in zip(p["q"], p["prefix"])) * p["heads"]
    rows = sum(p["q"]) * p["heads"]
    index = p["index"] // 8
    pages = sum(-(-n // p["page"]) for q, n in zip(p["q"], p["prefix"]) if q)
    words = sum(q * -(-q // 32) * 4 for q in p["q"])
    moved = keys * row * size + rows * ((row + latent) * size + 4) + pages * index + words
    access = "gather" if p["page"] == 1 else "read"
    return {"bytes": moved, "flops": 2 * pairs * (row + latent), "access": access}


def headline(device: str) -> list[Json]:
    """The six headline cases: the prefixes of the seed table at one stream, and two batches. All 64 heads on a GPU; fewer on a
    CPU, where plain torch and the float64 reference would take minutes (64 and 128 heads are among the nasty ones)."""
    cuda = device == "cuda"
    grid = [(9, 1024, 1, 16), (9, 4096, 1, 16), (9, 16384, 1, 8), (9, 65536, 1, 2), (17, 4096, 4, 4), (65, 1024, 2, 4)]
    grid = [(q, n, s, 64 if cuda else h) for q, n, s, h in grid]
    dtypes = ("float32", "bfloat16", "float16") if cuda else ("float32", "bfloat16")
    return [make(q, n, s, heads=h, dtype=d) for d in dtypes for q, n, s, h in grid]


def nasty(dtype: str) -> list[Json]:
    """Where kernels of this kind were seen to fail."""
    def case(q, prefix, streams=1, *, heads=8, **more):
        return make(q, prefix, streams, heads=heads, dtype=dtype, **more)

    mixed_q, mixed_prefix = [9, 1, 17, 9, 33], [700, 0, 5, 1500, 64]
    return [
        case(9, 0, word="empty-prefix"),
        case([9, 9, 9], [0, 300, 0], word="some-empty-prefixes"),
        case(9, 5, word="prefix-under-16"),
        case([5, 9], [1, 15], word="prefixes-1-and-15"),
        case(1, 777, 2, word="one-node"),
        case(1, 0, word="one-node-empty-prefix"),
        case(33, 500, word="chain", tree="chain"),
        case(33, 500, word="star", tree="star"),
        case(65, 300, word="deep", tree="deep"),
        case(17, 400, 2, word="ddtree", tree="ddtree"),
        case(9, 100, word="no-mask-is-a-chain", mask="none"),
        case([7, 7], [0, 50], word="row-sees-nothing", tree="blind"),
        case(257, 300, heads=4, word="q257"),
        case([257, 3], [129, 1000], heads=4, word="q257-bool", mask="bool"),
        *[case([9, 17], [1000, 333], word=f"page{page}", page=page) for page in (16, 64, 128, 256)],
        case([9, 9, 9], [255, 256, 257], word="page256-edges", page=256),
        case(mixed_q, mixed_prefix, word="mixed"),
        case(mixed_q, mixed_prefix, word="mixed-bool", mask="bool", index=64),
        case(mixed_q, mixed_prefix, word="mixed-full", mask="full", draft="beside", index=64),
        case(mixed_q, mixed_prefix, word="mixed-full-page64", mask="full", draft="beside", page=64),
        case([9, 0, 9, 0], [200, 40, 800, 0], word="padding", padding=11),
        case([9, 0, 17], [200, 40, 800], word="padding-full", padding=3, mask="full", draft="beside"),
        case(9, 600, word="draft-beside", draft="beside"),
        case(9, 1000, word="equal-scores", logits="equal"),
        case(9, 1000, word="large-logits", logits="large"),
        case(9, 1000, heads=1, word="one-head"),
        case(9, 300, heads=64, word="64-heads"),
        case(9, 300, heads=128, word="128-heads"),
        case(mixed_q, mixed_prefix, word="batch-invariant", chunk=256),
        case([9, 9, 9, 9], [4000, 10, 0, 900], word="batch-invariant-long", chunk=512),
    ]


def small_models(dtype: str) -> list[Json]:
    """Tiny models of the embedded fleet (latent 64, rope 16); the CPU kernel takes any dimensions."""
    shape = {"latent": 64, "rope": 16}
    return [make([8, 8], [40, 3], heads=4, dtype=dtype, word="latent64", mask="bool", index=64, **shape),
            make([8, 8], [40, 3], heads=64, dtype=dtype, word="latent64-full", mask="full", draft="beside", index=64, **shape),
            make(9, 100, heads=3, dtype=dtype, word="latent20", latent=20, rope=7)]


def parity(device: str) -> list[Json]:
    """The parity grid."""
    cases = headline(device)
    for dtype in ("float32", "bfloat16"):
        cases += nasty(dtype)
        if device == "cpu":
            cases += small_models(dtype)
    if device == "cpu":
        cases += [make([9, 17], [300, 33], heads=8, dtype="float16", page=16, word="page16"),
                  make(9, 0, heads=8, dtype="float16", word="empty-prefix")]
    else:
        cases += nasty("float16")
    return cases


def benchmark(device: str) -> list[Json]:
    """q × prefix × streams at 64 and 8 heads: on a GPU the whole grid in bfloat16, plus the seed table in float32; on a CPU
    the part of it that two cores do in a fraction of a second a call, in float32."""
    if device == "cuda":
        grid = [(q, n, s, h) for h in (64, 8) for q in (9, 17, 33, 65) for n in (1024, 4096, 16384, 65536) for s in (1, 4, 16)]
        seed = [make(9, n, heads=64, dtype="float32") for n in (1024, 4096, 16384, 65536)]
        return seed + [make(q, n, s, heads=h, dtype="bfloat16") for q, n, s, h in grid] + [make(9, 131072, 16, heads=8, dtype="bfloat16")]
    chosen = [(9, n, 1, 64) for n in (1024, 4096, 16384, 65536)] + [(17, 4096, 1, 64), (33, 1024, 1, 64), (65, 1024, 1, 64)]
    chosen += [(q, n, 1, 8) for q in (9, 17, 33, 65) for n in (1024, 4096)]
    chosen += [(9, 16384, 1, 8), (17, 16384, 1, 8), (9, 65536, 1, 8), (9, 4096, 4, 8), (65, 1024, 4, 8)]
    return [make(q, n, s, heads=h, dtype="float32") for q, n, s, h in chosen] + [make(9, 16384, heads=64, dtype="bfloat16")]


def _range(values: list[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}-{max(values)}"
