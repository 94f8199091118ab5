"""Phase 2 against real SGLang servers: a good kernel passes, each bad case fails with its reason."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from phases.base.clock import SystemClock
from phases.base.errors import Exit
from phases.base.verdict import Verdict
from tests.sglang.conftest import Run, processes_of, replace

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]


def require_failed(run: Run, *words: str) -> None:
    """A FAIL checkpoint that says why, with log lines, and no server left."""
    assert run.outcome.verdict is Verdict.FAIL
    assert run.outcome.code is Exit.GATE_FAILED
    assert run.measured("candidate_ready").estimate == 0
    for word in words:
        assert word in run.failures
    assert processes_of(run) == []
    assert not list((run.work / "serving" / "servers").glob("*/server.json"))


def test_good_kernel_passes(phase_two):
    run = phase_two()
    assert run.outcome.verdict is Verdict.PASS, run.gate
    activity = run.results.facts["activity"]
    assert activity["kernel_calls"] > 0 and activity["incumbent_calls"] == 0 and activity["ranks"] == 1
    assert run.measured("token_equality").detail["deterministic_prompts"] == 6
    assert run.measured("accept_length").estimate > 1.2  # trees are really accepted from
    for metric in (
        "e2e_latency_ratio",
        "verify_step_ratio",
        "verify_attention_ratio",
    ):  # how fast is for a quiet machine to say
        assert run.measured(metric).n == 4 and run.measured(metric).estimate > 0
    answers = json.loads((run.work / "serving" / "answers.json").read_text())
    assert {side: {row["prompt"] for row in answers[side]} for side in answers} == dict.fromkeys(
        ("candidate", "incumbent"), {f"p{i}" for i in range(6)}
    )
    assert processes_of(run) == []


def test_kernel_that_ignores_the_tree_mask_fails(phase_two):
    def causal(kernel: Path) -> None:
        replace(kernel, "sglang/cpu_backend.py", "if mask is not None:", "if False:")

    run = phase_two(causal)
    assert run.outcome.verdict is Verdict.FAIL
    assert run.rule("logprob_error")["verdict"] == "FAIL"
    assert run.rule("candidate_ready")["verdict"] == "PASS"
    assert processes_of(run) == []


def test_kernel_with_slightly_wrong_numbers_fails(phase_two):
    def two_percent(kernel: Path) -> None:
        replace(kernel, "sglang/cpu_backend.py", "scale=layer.scaling,", "scale=layer.scaling * 1.02,")

    run = phase_two(two_percent)
    assert run.outcome.verdict is Verdict.FAIL
    assert run.rule("logprob_error")["verdict"] == "FAIL"


def test_missing_plugin_fails(phase_two):
    run = phase_two(candidate="environment: {SGLANG_PLUGINS: another}")
    require_failed(run, "invalid choice", "verify_attn")


def test_plugin_that_raises_at_load_fails(phase_two):
    def raising(kernel: Path) -> None:
        replace(kernel, "sglang/__init__.py", "    import torch\n", "    raise RuntimeError('sabotaged plugin')\n")

    run = phase_two(raising)
    require_failed(run, "invalid choice", "sabotaged plugin")


def test_object_with_an_unknown_torch_symbol_fails_before_a_server_starts(phase_two):
    def wrong_abi(kernel: Path) -> None:
        source = kernel / "csrc" / "cpu" / "entry.cpp"
        wanted = "void _ZN3c106detail14torchAbiIsGoneEv();"
        source.write_text(
            source.read_text() + f'\nextern "C" {wanted}\nextern "C" __attribute__((visibility("default"))) '
            "void verify_attn_abi_probe() { _ZN3c106detail14torchAbiIsGoneEv(); }\n"
        )

    run = phase_two(wrong_abi)
    require_failed(run, "undefined symbol", "torchAbiIsGone")
    assert not (run.work / "serving" / "servers" / "candidate" / "server.log").exists()


def test_server_killed_while_loading_fails(phase_two):
    def killed(kernel: Path) -> None:
        replace(
            kernel,
            "sglang/create.py",
            "    return CpuBackend(runner, NAME)",
            "    import os\n\n    os.kill(os.getpid(), 9)",
        )

    require_failed(phase_two(killed), "ended while starting")


def test_server_that_is_healthy_but_completes_nothing_fails(phase_two, tmp_path):
    stalled = tmp_path / "stalled"

    class Hurried(SystemClock):
        """From the first request that stalls on, the time for getting ready is over: nobody needs to wait for it."""

        def monotonic(self) -> float:
            return super().monotonic() + (10_000 if stalled.exists() else 0)

    hook = f"""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    async def stalled(original, manager, request, *rest, **options):
        import asyncio

        if not str(getattr(request, "rid", "")).startswith("HEALTH_CHECK"):
            open({str(stalled)!r}, "w").close()
            await asyncio.sleep(3600)
        async for part in original(manager, request, *rest, **options):
            yield part

    HookRegistry.register("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", stalled, HookType.AROUND)
"""

    def stalling(kernel: Path) -> None:
        replace(kernel, "sglang/__init__.py", "    import torch\n", f"    import torch\n{hook}\n")

    run = phase_two(
        stalling,
        server="request_timeout: 10s",
        candidate="arguments: [--skip-server-warmup], ready_within: 300s",
        clock=Hurried(),
    )
    require_failed(run, "answers /health", "completes nothing")


def test_taken_port_fails(phase_two):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = phase_two(candidate=f"port: {port}")
    require_failed(run, f"port {port} of the candidate is taken")


def test_out_of_memory_at_start_fails(phase_two):
    def small_machine(kernel: Path) -> None:
        limit = "    import resource\n\n    resource.setrlimit(resource.RLIMIT_AS, (7 << 30, 7 << 30))\n"
        replace(kernel, "sglang/__init__.py", "    import torch\n", f"    import torch\n{limit}")

    run = phase_two(small_machine, candidate="arguments: [--max-total-tokens, '1200000', --mem-fraction-static, '0.9']")
    require_failed(run, "ended while starting", "allocate memory")


def test_unsupported_configuration_is_refused_with_the_reason(phase_two):
    chain = (
        "arguments: [--speculative-algorithm, STANDALONE, --speculative-num-steps, '3', --speculative-eagle-topk, '1', "
        "--speculative-num-draft-tokens, '4']"
    )
    run = phase_two(server=chain, candidate="arguments: [--page-size, '512']")
    require_failed(run, "verify_attn cannot serve this: page size 512")
