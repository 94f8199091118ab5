"""What is known of the MLA and verify kernels in the field: masks, page sizes, architectures, and where that is written.

`tree`, `pages` and `sms` are facts about the kernels, not about an installation; what is installed is observed by
`phases.harness.survey`. Kept by hand: a fact without a source does not belong here.
"""

from __future__ import annotations

from dataclasses import dataclass

_SGLANG = "https://docs.sglang.io/advanced_features/attention_backend.html"
_FLASHINFER = "https://docs.flashinfer.ai/api/mla.html"


@dataclass(frozen=True)
class Fact:
    """One kernel.

    Attributes:
        distributions: names on the package index that carry it, newest first.
        package: import package it lives in.
        markers: files inside the package, one of which must be there (globs).
        binaries: its compiled objects inside the package (globs); empty for kernels compiled on first use.
        tree: whether it takes a mask of draft-tree ancestors; `tree_why` says how or why not.
        pages: page sizes it takes; empty for any.
        sms: compute capabilities it is written for; empty for any from `least_sm` on.
    """

    name: str
    distributions: tuple[str, ...]
    package: str
    markers: tuple[str, ...]
    binaries: tuple[str, ...]
    tree: bool
    tree_why: str
    pages: tuple[int, ...]
    pages_why: str
    source: str
    sms: tuple[int, ...] = ()
    least_sm: int = 80
    cached: bool = (
        False  # compiled objects are kept in $<PACKAGE>_CACHE, else in <package> of the user's cache directory
    )


FACTS = (
    Fact(
        "SGLang Triton verify",
        ("sglang",),
        "sglang",
        ("srt/layers/attention/triton_ops/extend_attention.py", "kernels/ops/attention/extend_attention.py"),
        (),
        True,
        "custom_mask, of which it reads the draft columns; walks the prefix serially, once a head",
        (1,),
        "gathers one slot a key; with top-k > 1 SGLang allows page size 1 only",
        _SGLANG,
        least_sm=75,
    ),
    Fact(
        "FlashInfer MLA fa2",
        ("flashinfer-python",),
        "flashinfer",
        ("mla.py", "mla/*.py"),
        (),
        False,
        "BatchMLAPagedAttentionWrapper.plan takes causal, no mask",
        (),
        "any page size; SGLang runs it at 1",
        _FLASHINFER,
    ),
    Fact(
        "FlashInfer MLA fa3",
        ("flashinfer-python",),
        "flashinfer",
        ("mla.py", "mla/*.py"),
        (),
        False,
        "BatchMLAPagedAttentionWrapper.plan takes causal, no mask",
        (),
        "any page size; SGLang runs it at 1",
        _FLASHINFER,
        sms=(90,),
    ),
    Fact(
        "FlashInfer XQA MLA",
        ("flashinfer-python",),
        "flashinfer",
        ("xqa.py", "mla/*xqa*.py"),
        (),
        False,
        "xqa_mla has no mask argument; fp8 and 128 heads only",
        (16, 32, 64, 128),
        "pages of 16, 32, 64 or 128",
        "https://github.com/flashinfer-ai/flashinfer/issues/2745",
        sms=(120, 121),
    ),
    Fact(
        "TRT-LLM MLA (FlashInfer)",
        ("flashinfer-python",),
        "flashinfer",
        ("mla.py", "mla/*.py"),
        (),
        False,
        "trtllm_batch_decode_with_kv_cache_mla has no mask argument",
        (32, 64),
        "pages of 32 or 64",
        _SGLANG,
        sms=(100, 103),
    ),
    Fact(
        "FlashMLA",
        ("flash-mla", "flash_mla"),
        "flash_mla",
        ("flash_mla_interface.py",),
        ("../flash_mla_cuda*.so", "cuda*.so"),
        False,
        "flash_mla_with_kvcache takes causal, no mask",
        (64,),
        "block size 64 only",
        "https://github.com/deepseek-ai/FlashMLA",
        sms=(90, 100),
    ),
    Fact(
        "FlashMLA (in sgl-kernel)",
        ("sglang-kernel", "sgl-kernel"),
        "sgl_kernel",
        ("flash_mla.py",),
        ("flashmla_ops*.so",),
        False,
        "flash_mla_with_kvcache takes causal, no mask",
        (64,),
        "block size 64 only",
        _SGLANG,
        sms=(90, 100),
    ),
    Fact(
        "cutlass-MLA",
        ("sglang-kernel", "sgl-kernel"),
        "sgl_kernel",
        ("attention.py",),
        ("sm100/common_ops*.so", "common_ops*.so"),
        False,
        "cutlass_mla_decode attends to whole sequences, no mask",
        (128,),
        "SGLang runs it at its native page size of 128",
        _SGLANG,
        sms=(100, 103),
    ),
    Fact(
        "FA3 cascade (in sgl-kernel)",
        ("sglang-kernel", "sgl-kernel"),
        "sgl_kernel",
        ("flash_attn.py",),
        ("flash_ops*.so",),
        True,
        "two passes and a merge: unmasked prefix, then each token's ancestors as its own sequence",
        (1,),
        "with top-k > 1 SGLang allows page size 1 only",
        _SGLANG,
        sms=(90,),
    ),
    Fact(
        "FlashAttention 3",
        ("flash-attn-3", "flash_attn_3"),
        "flash_attn_3",
        ("*.so", "*.py"),
        ("*.so",),
        False,
        "causal or local windows, no mask",
        (),
        "any page size",
        "https://github.com/Dao-AILab/flash-attention",
        sms=(90,),
    ),
    Fact(
        "verify_attn",
        ("verify_attn", "verify-attn"),
        "verify_attn",
        ("__init__.py",),
        ("*.so", "_build/*.so"),
        True,
        "q x q bits, bool or uint8, or SGLang's full layout",
        (),
        "any page size",
        "kernels/verify_attn/README.md",
        cached=True,
    ),
)
