"""Masks: every layout means the same, one bit changes exactly the row it belongs to."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st
from verify_attn import InputError, bits, masks, verify_attention

from tests.verify_attn.helpers import problem, run


def _random_masks(sizes, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.rand(q, q, generator=random) < 0.5 for q in sizes]


@settings(deadline=None)
@given(st.lists(st.integers(0, 70), max_size=5), st.integers(0, 3), st.integers(0, 99))
def test_bits_there_and_back(sizes, padding, seed):
    made = _random_masks(sizes, seed)
    packed = masks.pack_bits(made, tokens=sum(sizes) + padding)
    row = 0
    for mask in made:
        q = mask.shape[0]
        assert torch.equal(masks.unpack_bits(packed[row:row + q], q), mask)
        row += q
    assert not packed[row:].any()


def test_all_layouts_give_the_same_bits_of_output():
    sizes, prefixes = [9, 40, 1], [50, 0, 7]
    made = _random_masks(sizes)
    base = problem(sizes, prefixes)
    qlen, qlen_indptr = masks.qlen_mask(made)
    full, full_indptr = masks.full_mask(made, prefixes)
    padded = torch.ones(len(sizes), 40, 40, dtype=torch.bool)  # what is behind a stream's own rows and columns may not count
    for b, mask in enumerate(made):
        padded[b, : sizes[b], : sizes[b]] = mask
    common = {name: getattr(base, name) for name in ("qo_indptr", "kv_indptr", "kv_indices", "prefix_lens", "draft_slots", "scale", "latent_dim")}
    layouts = {
        "bits": dict(mask=masks.pack_bits(made)),
        "uint32": dict(mask=masks.pack_bits(made).view(torch.uint32)),
        "bool qlen": dict(mask=qlen.bool(), mask_indptr=qlen_indptr.int(), mask_layout="qlen"),
        "uint8 qlen": dict(mask=qlen, mask_indptr=qlen_indptr, mask_layout="qlen"),
        "bool [streams, q, q]": dict(mask=padded),
        "uint8 [streams, q, q], larger still": dict(mask=torch.nn.functional.pad(padded.to(torch.uint8), (0, 3, 0, 3), value=1), mask_layout="qlen"),
        "full": dict(mask=full, mask_indptr=full_indptr, mask_layout="full"),
        "bool full": dict(mask=full.bool(), mask_indptr=full_indptr.int(), mask_layout="full"),
    }
    results = {}
    for variant in ("cpu", "torch_gemm", "naive"):
        for name, layout in layouts.items():
            results[variant, name] = verify_attention(base.q, base.kv_pool, **common, **layout, variant=variant)[0]
        for name in layouts:
            assert torch.equal(results[variant, name], results[variant, "bits"]), (variant, name)
    assert torch.equal(masks.full_indptr(base.qo_indptr, base.prefix_lens), full_indptr)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 9), st.integers(0, 99))
def test_a_mask_of_squares_means_the_corner_of_each_stream(sizes, padding, wider, seed):
    """Also where no value is looked at, as on a GPU: the lengths are used on the device."""
    made, n = _random_masks(sizes, seed), max(sizes) + wider
    squares = torch.rand(len(sizes), n, n, generator=torch.Generator().manual_seed(seed)) < 0.5
    for b, mask in enumerate(made):
        squares[b, : sizes[b], : sizes[b]] = mask
    ends = torch.tensor(sizes).cumsum(0)
    packed = bits.bits_of_squares(squares, torch.cat([ends.new_zeros(1), ends]).int(), sum(sizes) + padding)
    for b, q in enumerate(sizes):
        assert torch.equal(masks.unpack_bits(packed[ends[b] - q : ends[b]], q), made[b])


@pytest.mark.parametrize("variant", ["cpu", "naive", "torch_gemm"])
def test_flipping_one_bit_changes_that_row_and_no_other(variant):
    p = problem(33, 200, heads=3)
    before = run(p, variant)[0]
    for row, column in ((32, 0), (5, 2), (20, 19), (3, 31)):
        flipped = p.mask.clone()
        flipped[row, 0] ^= 1 << column if column < 31 else -(2**31)
        after = run(dataclasses.replace(p, mask=flipped), variant)[0]
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
