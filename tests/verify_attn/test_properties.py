"""Whatever the shapes, the kernel agrees with float64; special values go where they belong."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from verify_attn import cpu

from tests.verify_attn.helpers import TOLERANCE, error, problem, run

SHAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 400)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shapes=SHAPES, heads=st.integers(1, 20), dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    page=st.sampled_from([1, 2, 3, 16, 64, 256]), mask=st.sampled_from(["bits", "bool", "full", "none"]),
    draft=st.sampled_from(["pool", "beside"]), index=st.sampled_from([32, 64]), tree=st.sampled_from(["random", "chain", "star", "blind"]),
    dims=st.sampled_from([(512, 64), (64, 16), (1, 0), (33, 5), (128, 1)]), chunk=st.sampled_from([0, 0, 1, 100, 128]),
    splits=st.integers(0, 9), threads=st.integers(1, 4), seed=st.integers(0, 1000),
)  # fmt: skip
def test_agrees_with_float64(shapes, heads, dtype, page, mask, draft, index, tree, dims, chunk, splits, threads, seed):
    q, prefix = [s[0] for s in shapes], [s[1] for s in shapes]
    p = problem(q, prefix, heads=heads, dtype=dtype, page=page, mask=mask, draft=draft, index=index, tree=tree, latent=dims[0],
                rope=dims[1], chunk=chunk, seed=seed)
    run(p, num_splits=splits, threads=threads)
    assert error(p) <= TOLERANCE[p.q.dtype]


def test_exponential_error_and_ends():
    x = -torch.cat([torch.linspace(0, 126, 2_000_001), torch.rand(1_000_000)])
    want = torch.exp2(x.double())
    assert float(((cpu.exp2(x).double() - want) / want).abs().max()) < 3e-7
    ends = cpu.exp2(torch.tensor([0.0, -0.0, -126.5, -1e30, -math.inf, math.nan]))
    assert ends[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0] and math.isnan(ends[5])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("column", [0, 511, 575])
@pytest.mark.parametrize("variant", ["cpu", "naive", "torch_gemm"])
def test_a_broken_draft_row_breaks_those_who_see_it_and_nobody_else(bad, dtype, column, variant):
    p = problem(17, 300, dtype=dtype, tree="star")
    clean = run(p, variant)[0]
    pool = p.kv_pool.clone()
    pool[int(p.draft_slots[5]), column] = bad  # a leaf: only its own row sees it
    out, lse = run(dataclasses.replace(p, kv_pool=pool), variant)
    assert out[5].isnan().all() and lse[5].isnan().all()
    others = [t for t in range(17) if t != 5]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("variant", ["cpu", "naive", "torch_gemm"])
def test_nan_in_the_prefix_reaches_every_row(variant):
    p = problem(9, 300)
    pool = p.kv_pool.clone()
    pool[int(p.kv_indices[7]), 3] = math.nan
    out, lse = run(dataclasses.replace(p, kv_pool=pool), variant)
    assert out.isnan().all() and lse.isnan().all()


def test_nan_in_a_query_stays_in_its_head():
    p = problem(9, 300)
    q = p.q.clone()
    q[4, 2, 10] = math.nan
    clean = run(p)[0]
    out = run(dataclasses.replace(p, q=q))[0]
    assert out[4, 2].isnan().all()
    out[4, 2] = clean[4, 2]
    assert torch.equal(out, clean)


def test_logits_beyond_any_exponent():
    p = problem(9, 300, logits="large")
    run(dataclasses.replace(p, q=p.q * 1e4))
    assert torch.isfinite(p.out).all() and torch.isfinite(p.lse).all()
