"""The plugin's parts that need no SGLang: what it refuses, its fact file, whose objects it may use."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from verify_attn.errors import KernelBuildError
from verify_attn.sglang.facts import Counters, FactFile, counters_json
from verify_attn.sglang.objects import from_release
from verify_attn.sglang.requirements import Configuration, UnsupportedError, require, unsupported

DEEPSEEK = Configuration("cuda", True, "bfloat16", "bfloat16", 1, 16, 512, 64, architecture="DeepseekV3ForCausalLM")
CUDA, CPU = ("bfloat16", "float16"), ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])
def test_deepseek_and_kimi_shapes_are_served(page_size):
    for heads in (8, 16, 64, 128):  # Kimi K2 has 64 heads in all, DeepSeek V3 128
        assert unsupported(replace(DEEPSEEK, page_size=page_size, heads=heads), CUDA) == ""


def test_the_cpu_takes_other_head_sizes():
    assert (
        unsupported(
            replace(DEEPSEEK, device="cpu", dtype="float32", kv_dtype="float32", latent_dim=64, rope_dim=16), CPU
        )
        == ""
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_mla": False, "architecture": "LlamaForCausalLM"}, "LlamaForCausalLM has no multi-head latent attention"),
        ({"kv_dtype": "float8_e4m3fn"}, "KV cache is float8_e4m3fn.*--kv-cache-dtype"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "KV cache is float32"),
        ({"dtype": "float16"}, "model is float16 but its KV cache bfloat16"),
        ({"latent_dim": 64}, "latent 64 and rope 64"),
        ({"page_size": 48}, "page size 48.*--page-size"),
        ({"page_size": 512}, "page size 512"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"logit_cap": 30.0}, "capped at 30"),
        ({"deterministic": True}, "enable-deterministic-inference"),
        ({"context_parallel": 2}, "context parallelism of 2"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(change, reason):
    with pytest.raises(UnsupportedError, match=f"verify_attn cannot serve this: .*{reason}"):
        require(replace(DEEPSEEK, **change), CUDA)


def test_fact_file_is_whole_at_every_moment_and_current(tmp_path):
    counters = Counters()
    file = FactFile(
        str(tmp_path / "facts"), {"rank": 3, "ranks": 8, "release": "r"}, lambda: {"counters": counters_json(counters)}
    )
    first = json.loads(file.path.read_text())
    assert (first["schema"], first["rank"], first["pid"], first["counters"]["verify_calls"]) == (
        "verify_attn/facts/v1",
        3,
        os.getpid(),
        0,
    )
    until = time.monotonic() + 120
    while time.monotonic() < until:
        counters.verify_calls += 1
        seen = json.loads(file.path.read_text())  # never half a file
        if seen["counters"]["verify_calls"] > 0:
            break
    else:
        pytest.fail("the file was not brought up to date")
    assert [path.name for path in file.path.parent.iterdir() if path.suffix == ".json"] == ["rank-3.json"]


def test_facts_without_a_directory_stay_in_memory():
    file = FactFile(None, {"rank": 0}, lambda: {"variant": "cpu"})
    file.write()
    assert file.path is None and file.snapshot()["variant"] == "cpu"


def test_a_release_serves_its_own_objects_only(tmp_path, monkeypatch):
    built = SimpleNamespace(path=str(tmp_path / "cache" / "libcpu.so"), library="cpu", archs=("x86-64-v3",))
    monkeypatch.delenv("VERIFY_ATTN_PREBUILT", raising=False)
    assert from_release(built) is built
    monkeypatch.setenv("VERIFY_ATTN_PREBUILT", str(tmp_path / "cache"))
    assert from_release(built) is built
    monkeypatch.setenv("VERIFY_ATTN_PREBUILT", str(tmp_path / "release"))
    with pytest.raises(KernelBuildError, match="hold none of cpu.*build the release for it"):
        from_release(built)
