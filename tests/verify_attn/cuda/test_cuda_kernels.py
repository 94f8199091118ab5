"""The CUDA variants on a real GPU: parity on the nasty shapes, the mask, graphs over changing batches, batch invariance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from verify_attn import abi, cuda
from verify_attn.errors import InputError, RefusedError
from verify_attn.problem import make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

if torch.cuda.is_available():  # the lab's inputs live on the GPU
    from tests.verify_attn.cuda import lab
    from tests.verify_attn.cuda.lab import Shape

VARIANTS = list(cuda.variants())
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def shapes() -> dict[str, object]:
    """Name -> shape; heads stay at 8 (one rank of TP8) unless the case is about heads."""
    even = Shape.even
    return {
        "headline": even(8, 9, 1, 1024),
        "sixteen_streams": even(8, 9, 16, 4096),
        "full_mask": even(8, 9, 2, 100, mask="full"),
        "empty_prefix": even(8, 9, 1, 0),
        "short_prefix_one_node": even(8, 1, 3, 5, mask="qlen"),
        "mixed_padded_page16": Shape(8, (9, 0, 17, 1, 33), (1000, 50, 15, 0, 4097), page=16, mask="full", wide=True, padding=5),
        "page64_beside_chain": Shape(8, (9, 9, 9), (31, 32, 33), page=64, mask="causal", beside=True),
        "page128_star": Shape(16, (65, 3), (700, 130), page=128, mask="qlen", tree="star"),
        "page256_q257": Shape(8, (257, 9), (777, 5000), page=256),
        "many_heads": even(64, 9, 1, 3000, mask="full", beside=True, wide=True),
        "odd_heads_deep": Shape(5, (7, 8), (333, 444), tree="chain", padding=2),
        "equal_scores": even(8, 9, 1, 2048, equal=True),
        "large_logits": even(8, 9, 2, 2048, amplitude=8.0),
        "ragged_forty": Shape(8, (9,) * 40, tuple(37 * i for i in range(40))),
        "uneven_twenty": Shape(8, (9, 3, 9, 1, 5) * 4, tuple(977 * i % 6000 for i in range(20))),
        "one_long_of_32": Shape(8, (9,) * 32, (30000,) + (40,) * 31),
        "three_of_thirty": Shape(8, ((9,) + (0,) * 9) * 3, ((5000,) + (0,) * 9) * 3),
        "left_over_blocks_help": Shape(64, (9,) * 15 + (5,), (4500,) * 15 + (6000,)),
        "forty_rows": even(8, 5, 2, 3000),
        "long": even(8, 9, 1, 40000),
    }


SHAPE_NAMES = ["headline", "sixteen_streams", "full_mask", "empty_prefix", "short_prefix_one_node", "mixed_padded_page16",
               "page64_beside_chain", "page128_star", "page256_q257", "many_heads", "odd_heads_deep", "equal_scores",
               "large_logits", "ragged_forty", "uneven_twenty", "one_long_of_32", "three_of_thirty", "left_over_blocks_help",
               "forty_rows", "long"]


def skip_refused(variant: str, problem) -> None:
    reason = cuda.refuse(variant, problem)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_parity(name, dtype, variant):
    batch = lab.make_batch(replace(shapes()[name], dtype=dtype), seed=3)
    skip_refused(variant, batch.problem)
    expected = lab.reference(batch)
    for splits in (0, 1, 3):
        verdict = lab.try_variant(batch, variant, expected, num_splits=splits)
        assert not verdict.why, f"{splits} splits: {verdict}"


@pytest.mark.parametrize("variant", ["cuda_naive", "per_head"])
def test_small_dimensions(variant):
    batch = lab.make_batch(Shape(4, (9, 5), (100, 40), dtype=torch.float32, latent=64, rope=16))
    verdict = lab.try_variant(batch, variant, lab.reference(batch))
    assert not verdict.why, verdict


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_flipped_mask_bit_changes_exactly_its_row(variant):
    batch = lab.make_batch(Shape.even(8, 9, 2, 50))
    p = batch.problem
    skip_refused(variant, p)
    cuda.run(p, variant)
    before = p.out.clone()
    p.mask[4, 0] ^= 1  # row 4 of stream 0 and its root
    cuda.run(p, variant)
    changed = (before != p.out).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [4]


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_that_see_nothing(variant):
    batch = lab.make_batch(Shape.even(8, 9, 2, 0))
    p = batch.problem
    skip_refused(variant, p)
    p.mask[3] = 0
    lab.poison(p)
    cuda.run(p, variant)
    assert bool((p.out[3] == 0).all()) and bool((p.lse[3] == -torch.inf).all())
    assert not bool(p.out.isnan().any())


@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_is_not_hidden(variant):
    batch = lab.make_batch(Shape.even(8, 9, 2, 300))
    p = batch.problem
    skip_refused(variant, p)
    p.kv_pool[p.kv_indices[123].long(), 5] = torch.nan  # a prefix key of stream 0: all its rows see it
    cuda.run(p, variant)
    assert bool(p.out[:9].isnan().any(-1).all()) and not bool(p.out[9:].isnan().any())


@pytest.mark.parametrize("variant", VARIANTS)
def test_broken_bounds_give_nan_not_a_crash(variant):
    batch = lab.make_batch(Shape.even(8, 9, 2, 300), max_prefix=200)
    p = batch.problem
    skip_refused(variant, p)
    cuda.run(p, variant)
    torch.cuda.synchronize()
    assert bool(p.out.isnan().all()) and bool(p.lse.isnan().all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_graph_serves_shrinking_and_growing_batches(variant):
    """Lengths, indptr, mask and page table change under one captured graph; each replay equals an eager run, bit by bit."""
    largest = Shape(8, (9,) * 8, (6000, 1, 513, 4096, 77, 3000, 2999, 640))
    held = lab.make_batch(largest, max_q=17, max_prefix=8192)
    p = held.problem
    skip_refused(variant, p)
    workspace = cuda.make_workspace(p, variant)
    graph = lab.graph_of([lambda: cuda.run(p, variant, workspace=workspace)])
    batches = [((9,) * 8, largest.prefix), ((9, 9, 0, 0, 0, 0, 0, 0), (50, 7000, 0, 0, 0, 0, 0, 0)), ((0,) * 8, (0,) * 8),
               ((1,) * 8, tuple(range(8))), ((17, 17, 17, 9, 9, 1, 1, 1), (8000, 20, 3, 100, 100, 1, 0, 31)), ((9,) * 8, largest.prefix)]
    for seed, (q, prefix) in enumerate(batches):
        now = lab.make_batch(Shape(8, q, prefix, padding=72 - sum(q)), seed=seed + 10, max_q=17, max_prefix=8192)
        _load(p, now.problem)
        lab.poison(p)
        graph.replay()
        expected = lab.reference(now)
        rows = sum(q)
        lab.poison(now.problem)
        cuda.run(now.problem, variant)
        assert torch.equal(p.out[:rows], now.problem.out[:rows]) and torch.equal(p.lse[:rows], now.problem.lse[:rows])
        assert bool(p.out[rows:].isnan().all())
        assert rows == 0 or not lab.judge(now, expected).why


def _load(held, now) -> None:
    """Copy a batch into the tensors a graph was captured with (the pool too: slots are the batch's own)."""
    for name in ("q", "qo_indptr", "kv_indptr", "prefix_lens"):
        getattr(held, name).copy_(getattr(now, name))
    held.mask.zero_()
    held.mask[:, :now.mask.shape[1]].copy_(now.mask)
    for name in ("kv_pool", "kv_indices", "draft_slots"):
        target, source = getattr(held, name), getattr(now, name)
        assert source.shape[0] <= target.shape[0], name
        target[:source.shape[0]].copy_(source)


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_invariant_mode(variant):
    """With fixed chunks a stream's bits do not depend on the other streams, nor on the bounds."""
    together = lab.make_batch(Shape(8, (9, 17, 9, 3), (5000, 100, 1023, 0)), chunk=1024, max_q=17, max_prefix=9000)
    p = together.problem
    skip_refused(variant, p)
    expected = lab.reference(together)
    verdict = lab.try_variant(together, variant, expected)
    assert not verdict.why, verdict
    first = 0
    for b, q in enumerate(together.shape.q):
        alone = _alone(p, b, first, q)
        lab.poison(alone)
        cuda.run(alone, variant)
        assert torch.equal(alone.out, p.out[first:first + q]) and torch.equal(alone.lse, p.lse[first:first + q])
        first += q


def _alone(p, b: int, first: int, q: int):
    """Stream b of a problem as a problem of its own, over the same pool."""
    begin, end = int(p.kv_indptr[b]), int(p.kv_indptr[b + 1])
    rows = slice(first, first + q)
    return replace(p, q=p.q[rows].clone(), qo_indptr=p.qo_indptr.new_tensor([0, q]), kv_indptr=p.kv_indptr.new_tensor([0, end - begin]),
                   kv_indices=p.kv_indices[begin:end].clone(), prefix_lens=p.prefix_lens[b:b + 1].clone(),
                   draft_slots=p.draft_slots[rows].clone(), mask=p.mask[rows].clone(), out=p.out[rows].clone(),
                   lse=p.lse[rows].clone(), max_q=q, max_prefix=int(p.prefix_lens[b]))


def test_naive_refuses_what_its_score_row_cannot_hold():
    batch = lab.make_batch(Shape.even(8, 9, 1, 65536))
    assert "score row of 65545 keys" in cuda.refuse("cuda_naive", batch.problem)
    assert cuda.refuse("per_head", batch.problem) == ""


def test_auto_runs_and_names_its_choice():
    batch = lab.make_batch(Shape.even(8, 9, 2, 700))
    expected = lab.reference(batch)
    assert cuda.run(batch.problem) in cuda.variants()
    assert not lab.judge(batch, expected).why


# ---- the workspace ----


def test_one_workspace_serves_every_variant_and_shape_in_turn():
    """Also where one took another way than those before and after it: nobody overwrites what the next relies on."""
    shapes_in_turn = [Shape(8, (9,) * 16, (3000,) * 16), Shape(8, (9,), (70000,)), Shape(8, (9,) * 16, (3000,) * 16)]
    batches = [lab.make_batch(shape, chunk=chunk) for chunk in (64, 0) for shape in shapes_in_turn]
    turns = [(b, v) for v in ("auto", *VARIANTS, "auto") for b in batches if v == "auto" or not cuda.refuse(v, b.problem)]
    workspace = torch.zeros(max(cuda.workspace_bytes(b.problem, v) for b, v in turns), dtype=torch.uint8, device="cuda")
    expected = {id(b): lab.reference(b) for b in batches}
    for batch, variant in turns:
        lab.poison(batch.problem)
        ran = cuda.run(batch.problem, variant, workspace=workspace)
        assert not lab.judge(batch, expected[id(batch)]).why, (ran, batch.problem.chunk)
        assert not bool(workspace[:65536].any()), (ran, "left counters")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_workspace_that_was_not_zeroed_hangs_nobody(variant):
    """Its results are worth nothing, but the launch ends, and zeros make it good again."""
    batch = lab.make_batch(Shape.even(8, 9, 16, 3000))
    p = batch.problem
    skip_refused(variant, p)
    workspace = torch.full_like(cuda.make_workspace(p, variant), 1)
    cuda.run(p, variant, workspace=workspace)
    torch.cuda.synchronize()
    workspace.zero_()
    lab.poison(p)
    cuda.run(p, variant, workspace=workspace)
    assert not lab.judge(batch, lab.reference(batch)).why


def test_a_workspace_that_cannot_be_used_is_refused():
    p = lab.make_batch(Shape.even(8, 9, 2, 700)).problem
    size = cuda.workspace_bytes(p)
    for workspace, why in (
        (torch.zeros(size, dtype=torch.uint8), "is on cpu but q on cuda"),
        (torch.zeros(size + 8, dtype=torch.uint8, device="cuda")[8:], "multiple of 16 bytes"),
        (torch.zeros(size - 1, dtype=torch.uint8, device="cuda"), f"this call needs {size}"),
    ):
        with pytest.raises(InputError, match=why):
            cuda.run(p, workspace=workspace)
    assert cuda.run(p, workspace=torch.zeros(size, dtype=torch.uint8, device="cuda")) in VARIANTS


@pytest.mark.parametrize("variant", VARIANTS)
def test_nobody_waits_for_a_multiprocessor_that_a_foreign_block_holds(variant):
    """What the block that cannot start would have done is done by the others, to the same bits, while the foreign one still runs."""
    even, all_busy = Shape.even, [(8, 9, 1, 132 * 64 - 18), (8, 9, 12, 4000), (8, 9, 40, 900), (64, 9, 16, 1000)]  # of 132 multiprocessors
    for shape, chunk in ((even(8, 9, 16, 4000), 0), (even(8, 9, 3, 3000), 128), *((even(*numbers), 0) for numbers in all_busy)):
        batch = lab.make_batch(shape, chunk=chunk)
        p = batch.problem
        if cuda.refuse(variant, p):
            continue
        workspace = cuda.make_workspace(p, variant)
        cuda.run(p, variant, workspace=workspace)
        alone, alone_lse = p.out.clone(), p.lse.clone()
        lab.poison(p)
        foreign, held, ours = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
        torch.cuda.synchronize()
        with torch.cuda.stream(foreign):
            torch.cuda._sleep(500_000_000)  # one block, a quarter of a second
            held.record()
        for _ in range(3):
            cuda.run(p, variant, workspace=workspace)
        ours.record()
        ours.synchronize()
        ended_before = not held.query()
        held.synchronize()
        assert ended_before, "ours waited for the foreign block"
        assert torch.equal(p.out, alone) and torch.equal(p.lse, alone_lse)
        assert not bool(workspace[:65536].any())


# ---- batch invariance where a block has several items ----


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("heads, q, chunk", [(64, 9, 512), (8, 9, 64), (8, 17, 192), (5, 7, 100)])
def test_what_a_block_did_before_does_not_show_in_the_bits(variant, heads, q, chunk):
    """A stream behind others, whose items begin wherever those before ended."""
    for before, prefix in ((33, 40), (140, 70), (150, 130)):
        together = lab.make_batch(Shape(heads, (q,) * (before + 2), (prefix,) * before + (900, 333)), chunk=chunk).problem
        if cuda.refuse(variant, together):
            continue
        cuda.run(together, variant)
        for b in (before, before + 1):
            alone = _alone(together, b, b * q, q)
            lab.poison(alone)
            cuda.run(alone, variant)
            rows = slice(b * q, b * q + q)
            assert torch.equal(alone.out, together.out[rows]) and torch.equal(alone.lse, together.lse[rows]), (before, b)


def test_auto_keeps_its_variant_in_batch_invariant_mode():
    chosen = {cuda.choose(lab.make_batch(Shape(8, (9,) * len(prefixes), prefixes), chunk=64).problem)[0]
              for prefixes in ((1000,), (1000, 70000), (3000,) * 16)}  # fmt: skip
    assert len(chosen) == 1
    long = lab.make_batch(Shape(8, (9,), (1000,)), chunk=1, max_prefix=20_000_000)
    with pytest.raises(RefusedError, match="auto takes no other variant"):
        cuda.choose(long.problem)


# ---- masks, NaN, range ----


@pytest.mark.parametrize("variant", VARIANTS)
def test_masks_of_ragged_streams_are_read_as_padded(variant):
    batch = lab.make_batch(Shape(8, (9, 5, 9), (300, 40, 777), padding=4))
    padded = torch.ones(3, 9, 9, dtype=torch.bool, device="cuda")
    for b, mask in enumerate(batch.masks):
        padded[b, : len(mask), : len(mask)] = mask
    p = batch.problem
    again = make_problem(p.q, p.kv_pool, qo_indptr=p.qo_indptr, kv_indptr=p.kv_indptr, kv_indices=p.kv_indices, prefix_lens=p.prefix_lens,
                         draft_slots=p.draft_slots, mask=padded, scale=p.scale, out=p.out, lse=p.lse, max_q=9, max_prefix=777)  # fmt: skip
    skip_refused(variant, again)
    lab.poison(again)
    cuda.run(again, variant)
    assert not lab.judge(batch, lab.reference(batch)).why


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("column", [3, 511, 540])
def test_a_broken_draft_row_reaches_the_rows_that_see_it_and_no_other(variant, dtype, column):
    for q, prefix, beside, chunk in ((9, 500, False, 0), (65, 500, True, 0), (70, 37, False, 0), (9, 1000, True, 64)):
        for value in (torch.nan, torch.inf, -torch.inf):
            batch = lab.make_batch(Shape.even(8, q, 3, prefix, dtype=dtype, beside=beside), seed=q, chunk=chunk)
            p = batch.problem
            if cuda.refuse(variant, p):
                continue
            cuda.run(p, variant)
            whole, whole_lse = p.out.clone(), p.lse.clone()
            row = q + 2  # the third of stream 1
            if beside:
                p.draft_kv[row, column] = value
            else:
                p.kv_pool[p.draft_slots[row].long(), column] = value
            lab.poison(p)
            cuda.run(p, variant)
            sees = torch.zeros(3 * q, dtype=torch.bool, device="cuda")
            sees[q : 2 * q] = batch.masks[1][:, 2]
            assert bool(p.out[sees].isnan().all()) and bool(p.lse[sees].isnan().all()), (q, value)
            off = float((p.out[~sees].double() - whole[~sees].double()).norm() / whole[~sees].double().norm())  # partial results may be scaled otherwise
            assert off <= 1e-4 and float((p.lse[~sees] - whole_lse[~sees]).abs().max()) <= 1e-5, (q, value, off)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_large_latent_leaves_the_others_their_digits(variant, dtype):
    """Up to the ratio of README: halves under one power of two carry the partial results of a warp's latents."""
    for shape in (Shape.even(8, 9, 2, 6000, dtype=dtype), Shape.even(64, 9, 1, 6000, dtype=dtype)):
        batch = lab.make_batch(shape)
        p = batch.problem
        skip_refused(variant, p)
        p.kv_pool[:, 77] *= 2.0**18 if dtype == torch.bfloat16 else 2.0**12
        p.q[:, :, 77] = 0  # its scores are none of this test's business
        expected = lab.reference(batch)
        cuda.run(p, variant)
        others = [d for d in range(512) if d != 77]
        error = float((p.out[..., others].double() - expected[0][..., others]).norm() / expected[0][..., others].norm())
        assert error <= lab.TOLERANCE[dtype], error


# ---- plans ----


@pytest.mark.parametrize("variant", ["auto", *VARIANTS])
def test_a_plan_does_what_run_does(variant):
    batch, other = (lab.make_batch(Shape.even(8, 9, 2, 700), seed=s) for s in (1, 2))
    p = batch.problem
    if variant != "auto":
        skip_refused(variant, p)
    plan = cuda.Plan(p, variant)
    plan()
    assert not lab.judge(batch, lab.reference(batch)).why
    lab.poison(other.problem)
    plan(**{name: tensor for name in abi.TENSORS if (tensor := getattr(other.problem, name)) is not None})
    assert not lab.judge(other, lab.reference(other)).why
    plan(kv_indices=torch.cat([other.problem.kv_indices] * 2))  # any length
    for wrong, why in ((dict(q=p.q[:5]), "make another plan"), (dict(out=p.out.float()), "make another plan"), (dict(draft_kv=p.kv_pool), "is no tensor of"),
                       (dict(q=torch.empty(p.q.numel() + 4, dtype=p.q.dtype, device="cuda")[4:].view_as(p.q)), "8 bytes past a multiple of 16")):  # fmt: skip
        with pytest.raises(InputError, match=why):
            plan(**wrong)
