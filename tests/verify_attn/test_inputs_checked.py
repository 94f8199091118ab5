"""Wrong arguments: one error that names the tensor and says what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from verify_attn import InputError, verify_attention

GOOD_ROWS, TOKENS, SLOTS = 24, 5, 40


def arguments(**changed: Any) -> dict[str, Any]:
    """A good call of two streams (2 and 3 queries, prefixes 6 and 3, page size 2), with some arguments replaced."""
    made: dict[str, Any] = dict(
        q=torch.randn(TOKENS, 2, GOOD_ROWS), kv_pool=torch.randn(SLOTS, GOOD_ROWS), qo_indptr=torch.tensor([0, 2, 5]),
        kv_indptr=torch.tensor([0, 3, 5]), kv_indices=torch.tensor([4, 0, 7, 9, 2]), prefix_lens=torch.tensor([6, 3]),
        page_size=2, draft_slots=torch.tensor([30, 31, 32, 33, 34]), mask=torch.ones(5, 1, dtype=torch.int32), scale=0.1,
        latent_dim=16, variant="torch_gemm")  # fmt: skip
    made.update(changed)
    return made


def test_the_good_call_is_good():
    out, lse = verify_attention(**arguments())
    assert out.shape == (5, 2, 16) and lse.shape == (5, 2) and torch.isfinite(out).all()


BAD = [
    ({"q": torch.randn(5, 48)}, r"q has shape \(5, 48\); give \[tokens, heads, latent \+ rope\]"),
    ({"q": torch.randn(5, 2, 24).double()}, "q is torch.float64; give float32, bfloat16 or float16"),
    ({"q": torch.randn(2, 5, 24).transpose(0, 1)}, r"q is not contiguous; call q.contiguous\(\)"),
    ({"kv_pool": torch.randn(40, 25)}, "kv_pool has shape .*; rows must have q's 24 elements"),
    ({"kv_pool": torch.randn(40, 24).half()}, "kv_pool is torch.float16 but q is torch.float32; convert one"),
    ({"kv_pool": torch.randn(40, 2, 24)}, "kv_pool has 2 KV heads; MLA has one"),
    ({"kv_pool": torch.randn(24, 40).T}, "the elements of a row must be adjacent"),
    ({"kv_pool": torch.randn(40, 24, device="meta")}, "kv_pool is on meta but q on cpu; move one"),
    ({"page_size": 0}, "page_size is 0; it must be at least 1"),
    ({"latent_dim": 25}, r"latent_dim is 25 for KV rows of 24; give 1\.\.24"),
    ({"qo_indptr": torch.tensor([0, 2])}, "qo_indptr has 2 elements, prefix_lens 2; qo_indptr needs 3"),
    ({"qo_indptr": torch.tensor([0.0, 2, 5])}, "qo_indptr is torch.float32; give int32 or int64"),
    ({"kv_indices": torch.zeros(5, 1, dtype=torch.int32)}, "kv_indices has shape .* one dimension"),
    ({"kv_indices": torch.arange(10)[::2]}, "kv_indices is not contiguous"),
    ({"draft_kv": torch.randn(5, 24)}, "give exactly one of draft_kv .* and draft_slots"),
    ({"draft_slots": None}, "give exactly one of draft_kv"),
    ({"draft_slots": torch.tensor([1, 2])}, "draft_slots has 2 elements, q 5 rows"),
    ({"draft_slots": None, "draft_kv": torch.randn(4, 24)}, "draft_kv has 4 rows, q 5"),
    ({"mask": torch.ones(5, 1)}, "mask is torch.float32; give bool or uint8, or int32 words of bits"),
    ({"mask": torch.ones(4, 1, dtype=torch.int32)}, r"as bits it must be \[5, words\]"),
    ({"mask": torch.ones(5, 5, dtype=torch.bool)}, r"mask has shape \(5, 5\); as q×q it must be \[2, q, q\], padded"),
    ({"mask": torch.ones(5, 5, dtype=torch.uint8), "mask_layout": "qlen"}, r"mask has shape \(5, 5\); as q×q"),
    ({"mask": torch.ones(3, 3, 3, dtype=torch.bool)}, r"mask has shape \(3, 3, 3\); as q×q it must be \[2, q, q\]"),
    ({"mask": torch.ones(2, 3, 4, dtype=torch.bool), "mask_layout": "qlen"}, r"mask has shape \(2, 3, 4\); as q×q"),
    ({"mask": torch.ones(2, 2, 2, dtype=torch.bool), "check_values": False}, r"but a stream has up to 3 queries; give \[2, 3, 3\]"),
    ({"mask": torch.ones(2, 3, 3, dtype=torch.bool), "mask_indptr": torch.tensor([0, 9, 18])}, "belong to a flat mask: flatten it"),
    ({"mask": torch.ones(2, 3, 3, dtype=torch.bool), "mask_layout": "full"}, "belong to a flat mask: flatten it"),
    ({"mask": torch.ones(13, dtype=torch.bool)}, "a flat mask of 13 can be read in several ways; say mask_layout='qlen'"),
    ({"mask": torch.ones(13, dtype=torch.bool), "mask_indptr": torch.tensor([0, 4, 13])}, "a flat mask of 13 can be read in several ways"),
    ({"mask": torch.ones(13, dtype=torch.bool), "mask_layout": "qlen"}, "QLEN layout needs mask_indptr"),
    ({"mask": torch.ones(18, dtype=torch.bool), "mask_layout": "qlen", "mask_indptr": torch.tensor([0, 9, 18])}, "stream 0 needs 4 mask elements"),
    ({"mask_indptr": torch.tensor([0, 4, 13])}, "mask is int32 bits, which need no mask_indptr"),
    ({"mask": torch.ones(13, dtype=torch.bool), "mask_layout": "full"}, "FULL layout needs mask_indptr"),
    ({"mask": torch.ones(13, dtype=torch.bool), "mask_layout": "bits"}, "mask_layout says bits; give int32 words"),
    ({"mask": torch.ones(13, dtype=torch.bool), "mask_indptr": torch.tensor([0, 4]), "mask_layout": "qlen"}, "mask_indptr has 2 elements; it needs 3"),
    ({"mask": None, "mask_layout": "qlen"}, "mask is missing though mask_layout or mask_indptr is given"),
    ({"mask_layout": "quadratic"}, "mask_layout is 'quadratic'; give one of auto, bits, qlen, full"),
    ({"mask": torch.ones(5, 0, dtype=torch.int32)}, "mask has 0 words a row, enough for 0 draft rows, but a stream has 3"),
    ({"out": torch.empty(5, 2, 15)}, "latent_dim|out is"),
    ({"out": torch.empty(5, 2, 16).half()}, "out is torch.float16 .* give torch.float32"),
    ({"lse": torch.empty(2, 5).T}, "lse is not contiguous"),
    ({"chunk": -1}, "chunk is -1; give 0"),
    ({"max_q": 2}, "stream 1 has 3 queries, over max_q=2; raise max_q"),
    ({"max_prefix": 4}, r"prefix_lens\[0\] is 6, over max_prefix=4; raise"),
    ({"chunk": 1 << 32}, "chunk is 4294967296; give 0"),
    ({"max_q": -1}, "max_q is -1; it must not be negative"),
    ({"max_prefix": 1 << 31}, "max_prefix is 2147483648; it must not be negative nor 2.31 or more"),
    ({"qo_indptr": torch.tensor([9, 5, 0]), "check_values": False}, "max_q is -4; .*: check the index tensors"),  # as on a GPU: nobody looks
    ({"variant": "hopper"}, "variant 'hopper' does not run on cpu; there: naive, torch_gemm, cpu, or auto"),
    # values
    ({"qo_indptr": torch.tensor([0, 3, 2])}, "qo_indptr falls from 3 to 2 at stream 1"),
    ({"qo_indptr": torch.tensor([0, 2, 6])}, "qo_indptr runs from 0 to 6, but q has 5 rows"),
    ({"prefix_lens": torch.tensor([6, -1])}, r"prefix_lens\[1\] is -1; an empty prefix is 0"),
    ({"prefix_lens": torch.tensor([7, 3])}, "stream 0 needs 4 pages of 2 for its prefix of 7, but kv_indptr gives it 0..3"),
    ({"kv_indices": torch.tensor([4, 0, 20, 9, 2])}, r"kv_indices of stream 0 run from 0 to 20, but kv_pool has 40 rows, pages 0\.\.19 of 2"),
    ({"kv_indices": torch.tensor([4, 0, 7, -1, 2])}, "kv_indices of stream 1 run from -1"),
    ({"draft_slots": torch.tensor([30, 31, 32, 33, 40])}, "draft_slots run from 30 to 40, but kv_pool has 40 rows"),
    ({"mask": torch.ones(12, dtype=torch.bool), "mask_indptr": torch.tensor([0, 4, 12]), "mask_layout": "qlen"},
     r"stream 1 needs 9 mask elements \(QLEN layout\), but mask_indptr gives 4\.\.12 of 12"),
    ({"mask": torch.ones(13, dtype=torch.bool), "mask_indptr": torch.tensor([0, 4, 13]), "mask_layout": "full"},
     "stream 0 needs 16 mask elements"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_arguments(changed, message):
    with pytest.raises(InputError, match=message):
        verify_attention(**arguments(**changed))


def test_entries_that_are_not_read_may_be_anything():
    """As in SGLang: index buffers are longer than what is used, padding rows hold leftovers."""
    expected, _ = verify_attention(**arguments())
    longer = dict(kv_indices=torch.tensor([4, 0, 7, 9, 2, 10**6]), draft_slots=torch.tensor([30, 31, 32, 33, 34, -7]),
                  q=torch.cat([arguments()["q"], torch.full((1, 2, 24), float("nan"))]), mask=torch.ones(6, 1, dtype=torch.int32))
    first = arguments()
    call = {**first, **longer, "q": torch.cat([first["q"], longer["q"][-1:]])}
    for variant in ("torch_gemm", "cpu"):
        again = verify_attention(**{**first, "variant": variant})[0]
        padded = verify_attention(**{**call, "variant": variant})[0]
        assert torch.equal(padded[:5], again) and not padded[5].any()
    assert expected.shape == (5, 2, 16)


def test_mixed_index_widths_and_strided_pool():
    first = arguments(variant="cpu")
    wide = torch.zeros(SLOTS, 50)
    wide[:, 3:27] = first["kv_pool"]
    mixed = {**first, "kv_pool": wide[:, 3:27].unsqueeze(1), "kv_indices": first["kv_indices"].int(), "qo_indptr": first["qo_indptr"].int()}
    assert torch.equal(verify_attention(**first)[0], verify_attention(**mixed)[0])


def test_outputs_are_written_in_place_and_padding_keeps_its_values():
    first = arguments(variant="cpu", qo_indptr=torch.tensor([0, 2, 4]), prefix_lens=torch.tensor([6, 3]))
    out, lse = torch.full((5, 2, 16), 7.0), torch.full((5, 2), 7.0)
    returned = verify_attention(**first, out=out, lse=lse)
    assert returned[0] is out and returned[1] is lse
    assert (out[4] == 7).all() and (lse[4] == 7).all() and not (out[:4] == 7).any()


def test_value_checks_can_be_left_out():
    """The caller's promise then; nothing is read twice for it."""
    bad = arguments(prefix_lens=torch.tensor([6, 3]), max_prefix=4, check_values=False)
    assert verify_attention(**bad)[0].shape == (5, 2, 16)
