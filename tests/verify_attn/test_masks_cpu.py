"""Masks: every layout means the same, one bit changes exactly the row it belongs to."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st
from verify_attn import InputError, masks, verify_attention

from tests.verify_attn.helpers import problem, run


def _random_masks(sizes, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.rand(q, q, generator=random) < 0.5 for q in sizes]


@settings(deadline=None)
@given(st.lists(st.integers(0, 70), max_size=5), st.integers(0, 3), st.integers(0, 99))
def test_bits_there_and_back(sizes, padding, seed):
    made = _random_masks(sizes, seed)
    bits = masks.pack_bits(made, tokens=sum(sizes) + padding)
    row = 0
    for mask in made:
        q = mask.shape[0]
        assert torch.equal(masks.unpack_bits(bits[row:row + q], q), mask)
        row += q
    assert not bits[row:].any()


def test_all_layouts_give_the_same_bits_of_output():
    sizes, prefixes = [9, 40, 1], [50, 0, 7]
    made = _random_masks(sizes)
    base = problem(sizes, prefixes)
    qlen, qlen_indptr = masks.qlen_mask(made)
    full, full_indptr = masks.full_mask(made, prefixes)
    common = {name: getattr(base, name) for name in ("qo_indptr", "kv_indptr", "kv_indices", "prefix_lens", "draft_slots", "scale", "latent_dim")}
    layouts = {
        "bits": dict(mask=masks.pack_bits(made)),
        "uint32": dict(mask=masks.pack_bits(made).view(torch.uint32)),
        "bool qlen": dict(mask=qlen.bool(), mask_layout="qlen"),
        "uint8 qlen": dict(mask=qlen, mask_indptr=qlen_indptr, mask_layout="qlen"),
        "full": dict(mask=full, mask_indptr=full_indptr),
        "bool full": dict(mask=full.bool(), mask_indptr=full_indptr.int()),
    }
    results = {}
    for variant in ("cpu", "torch_gemm"):
        for name, layout in layouts.items():
            results[variant, name] = verify_attention(base.q, base.kv_pool, **common, **layout, variant=variant)[0]
        for name in layouts:
            assert torch.equal(results[variant, name], results[variant, "bits"]), (variant, name)
    assert torch.equal(masks.full_indptr(base.qo_indptr, base.prefix_lens), full_indptr)


@pytest.mark.parametrize("variant", ["cpu", "naive", "torch_gemm"])
def test_flipping_one_bit_changes_that_row_and_no_other(variant):
    p = problem(33, 200, heads=3)
    before = run(p, variant)[0]
    for row, column in ((32, 0), (5, 2), (20, 19), (3, 31)):
        bits = p.mask.clone()
        bits[row, 0] ^= 1 << column if column < 31 else -(2**31)
        after = run(dataclasses.replace(p, mask=bits), variant)[0]
        changed = (before != after).flatten(1).any(1)
        assert changed.nonzero().flatten().tolist() == [row]


def test_no_mask_is_a_chain():
    p = problem(9, 20, mask="none")
    chain = masks.pack_bits([torch.ones(9, 9).tril()])
    with_bits = problem(9, 20, tree="chain")
    assert torch.equal(with_bits.mask, chain)
    assert torch.equal(run(p)[0], run(dataclasses.replace(p, mask=chain, mask_kind=with_bits.mask_kind))[0])


def test_packing_refuses_what_does_not_fit():
    with pytest.raises(InputError, match=r"stream 1 has shape \(2, 3\); give \[q, q\]"):
        masks.pack_bits([torch.ones(1, 1), torch.ones(2, 3)])
    with pytest.raises(InputError, match="do not hold masks with 40 rows, the widest of 40"):
        masks.pack_bits([torch.ones(40, 40)], words=1)
    with pytest.raises(InputError, match="1 masks for 2 prefix lengths"):
        masks.full_mask([torch.ones(1, 1)], [1, 2])
