"""Statistics, log scan, architecture check, prompts, settings, activity, readiness."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import asdict

import numpy as np
import pytest

from phases.base.errors import PlaybookError, ServingError
from phases.base.results import Results
from phases.playbook.located import Mistakes, load_text
from phases.playbook.typed import read
from phases.serving import log_scan
from phases.serving.activity import inactive, read_metrics, summarize
from phases.serving.host import Server
from phases.serving.prompts import load_prompts, timing_prompt
from phases.serving.readiness import await_ready, evidence, why
from phases.serving.settings import IntegrationSettings
from phases.serving.statistics import bootstrap, clustered_mean, median_ratio
from phases.serving.target import wrong_architecture
from phases.sglang_integration.report import table

SERVER = Server("candidate", 1, "1", 1, "log", "facts", "http://127.0.0.1:1")


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class Host:
    """What readiness and activity ask of a host."""

    def __init__(self, lines=(), dies_at=None, code=1, facts=(), clock=None) -> None:
        self.lines, self.dies_at, self.code, self.facts, self.clock = list(lines), dies_at, code, list(facts), clock

    def alive(self, server) -> bool:
        return self.dies_at is None or self.clock.time < self.dies_at

    def exit_code(self, server):
        return self.code

    def log_lines(self, server):
        return self.lines

    def read_facts(self, server):
        return self.facts


class FakeClient:
    name = "the candidate"

    def __init__(self, healthy=True, refusal="", tokens=4, info=()) -> None:
        self.healthy, self.refusal, self.tokens, self.info, self.asked = healthy, refusal, tokens, list(info), 0

    def health(self) -> bool:
        return self.healthy

    def generate(self, prompt, tokens):
        self.asked += 1
        if self.refusal:
            raise ServingError(self.refusal)
        return type("Completion", (), {"tokens": (1,) * self.tokens})()

    def server_info(self):
        return {"internal_states": [{"verify_attn": self.info}]}


# ---- statistics


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    hits = 0
    for seed in range(60):
        random_ = np.random.default_rng(seed)
        effect = random_.normal(0, 1, 25)
        groups = [list(effect[i] + random_.normal(0, 0.3, 8)) for i in range(25)]  # values of a prompt go together
        found = clustered_mean(groups)
        hits += found.low <= 0 <= found.high
    assert hits >= 52  # 95 % of 60 is 57; fewer than 52 happens once in 200 times


def test_single_cluster_and_none():
    assert clustered_mean([[1.0, 3.0]]) == bootstrap(1, lambda chosen: 2.0)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap(0, lambda chosen: 0.0)


def test_median_ratio_is_within_pairs():
    draw = random.Random(5)
    slow = [draw.uniform(1, 50) for _ in range(30)]  # a machine that is slow at times slows both
    found = median_ratio([0.8 * value for value in slow], slow)
    assert (found.estimate, found.low, found.high) == pytest.approx((0.8, 0.8, 0.8))


# ---- log scan


def test_only_what_the_incumbent_does_not_log_counts():
    incumbent = ["[12:00] ERROR slow tokenizer at 0x7f", "Ignore import error when loading x: Error: y", "fine"]
    candidate = [
        "[13:37] ERROR slow tokenizer at 0x3a",
        "verify: logits hold NaN",
        "Traceback (most recent call last):",
    ]
    assert log_scan.new_errors(candidate, incumbent) == candidate[1:]
    assert log_scan.new_errors(incumbent, candidate[:1]) == []


# ---- architecture


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (["sm_80"], [8, 6], True),
        (["sm_90"], [9, 0], True),
        (["sm_90a"], [9, 0], True),
        (["sm_90a"], [10, 0], False),
        (["sm_80"], [9, 0], False),
        (["sm_120"], [12, 1], True),
        (["sm_120a"], [12, 1], False),
        (["x86-64-v3"], [9, 0], False),
        ([], [9, 0], False),
    ],
)
def test_objects_against_the_gpu(archs, capability, runs):
    assert (wrong_architecture(archs, capability, "x86_64") == "") is runs


def test_objects_against_the_processor():
    assert wrong_architecture(["x86-64-v3"], None, "x86_64") == ""
    assert "aarch64" in wrong_architecture(["x86-64-v3"], None, "aarch64")


# ---- prompts


def test_a_short_text_repeated_is_a_long_prompt(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text(
        '[{"name": "a", "kind": "long", "text": "ab", "repeat": 3}, {"name": "b", "kind": "short", "text": "ab"}]'
    )
    assert [prompt.text for prompt in load_prompts(path)] == ["ababab", "ab"]
    path.write_text('[{"name": "a", "kind": "long", "text": "ab", "repeat": 0}]')
    with pytest.raises(ServingError, match="empty text"):
        load_prompts(path)


@pytest.mark.parametrize(
    "repeat", ['"often"', '"3"', "2.5", "true", "Infinity", "NaN", "null", "1" + "0" * 12, "1" + "0" * 30]
)
def test_a_repeat_that_makes_no_sense_is_refused_before_any_memory_is_taken(tmp_path, repeat):
    path = tmp_path / "prompts.json"
    path.write_text(f'[{{"name": "a", "kind": "long", "text": "ab", "repeat": {repeat}}}]')
    with pytest.raises(ServingError, match="not a prompt set: ValueError repeat"):
        load_prompts(path)


def test_a_prompt_file_that_is_none_is_named(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ServingError, match="not a prompt set"):
        load_prompts(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ServingError, match="pipe is a named pipe, not a file"):
        load_prompts(tmp_path / "pipe")


def test_built_in_prompts_hold_every_kind():
    prompts = load_prompts(None)
    assert {"short", "long", "json", "language"} <= {prompt.kind for prompt in prompts}
    assert max(len(prompt.text) for prompt in prompts) > 800 and min(len(prompt.text) for prompt in prompts) < 10


@pytest.mark.parametrize("text", ["{", "[]", '[{"name": "a"}]', '[{"name": "a", "kind": "b", "text": ""}]'])
def test_bad_prompt_files_are_named(tmp_path, text):
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(ServingError, match="prompts.json"):
        load_prompts(path)
    with pytest.raises(ServingError, match="missing.json cannot be read"):
        load_prompts(tmp_path / "missing.json")


def test_timing_prompts_share_no_prefix():
    first, second = timing_prompt(0, 50), timing_prompt(1, 50)
    assert len(first) == 50 and first[0:3] != second[0:3] and timing_prompt(0, 50) == first


# ---- settings


def settings(text: str):
    mistakes = Mistakes()
    made = read(IntegrationSettings, load_text(text, "p.yaml", mistakes), mistakes)
    mistakes.raise_if_any("playbook")
    return made


def test_settings_with_defaults():
    made = settings("incumbent: {backend: triton}\nserver: {ready_within: 5m}\n")
    assert made.incumbent.backend == "triton" and made.server.ready_within == 300 and made.output.concurrency == (1, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: {device: cpu}\n", "p.yaml:1.*incumbent.backend"),
        ("incumbent: {backend: a}\ncandidate:\n  arguments: [--port, '1']\n", "p.yaml:3.*--port is set by the phase"),
        ("incumbent: {backend: a}\nserver:\n  python: /x/python\n", "p.yaml:[23].*'model' is missing"),
        ("incumbent: {backend: a}\nlatency: {pairs: 1}\n", "p.yaml:2"),
        ("incumbent: {backend: a}\noutputs: {}\n", "p.yaml:2.*output"),
        (
            "incumbent: {backend: a, port: 4000}\ncandidate: {port: 4000}\n",
            "p.yaml:2.*candidate.port is the incumbent's",
        ),
        ("incumbent: {backend: a}\ncandidate: {release: false}\n", "p.yaml:2.*candidate.release cannot be false"),
    ],
)
def test_settings_mistakes_have_their_line(text, message):
    with pytest.raises(PlaybookError, match=message):
        settings(text)


# ---- readiness


def test_ready_is_three_completions():
    clock, client = Clock(), FakeClient()
    found = await_ready(Host(clock=clock), SERVER, client, 60, clock)
    assert found.ready and client.asked == 3


def test_healthy_without_completions_is_not_ready():
    clock = Clock()
    found = await_ready(
        Host(["last line"], clock=clock), SERVER, FakeClient(refusal="no answer within 5 s."), 60, clock
    )
    assert not found.ready and "answers /health" in found.reason and "completes nothing: no answer" in found.reason
    assert found.evidence == ("last line",)


def test_empty_completions_are_not_ready():
    clock = Clock()
    assert "returned 0 tokens" in await_ready(Host(clock=clock), SERVER, FakeClient(tokens=0), 10, clock).reason


def test_a_dead_server_is_noticed_at_once_with_its_reason():
    clock = Clock()
    lines = ["loading", "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "Received sigquit"]
    found = await_ready(Host(lines, dies_at=3.0, code=-9, clock=clock), SERVER, FakeClient(healthy=False), 600, clock)
    assert not found.ready and clock.time < 10
    assert "ended while starting (signal 9)" in found.reason and "can't allocate memory" in found.reason


def test_never_healthy():
    clock = Clock()
    assert (
        "did not come up within 20 s"
        in await_ready(Host(clock=clock), SERVER, FakeClient(healthy=False), 20, clock).reason
    )


def test_reason_of_an_empty_log():
    assert why(Host(), SERVER) == "its log is empty"


def test_a_failed_plugin_is_the_reason_though_the_server_complains_of_something_else():
    lines = [
        "Failed to execute general plugin: verify_attn",
        "Traceback (most recent call last):",
        "RuntimeError: no such thing",
        "usage: launch_server.py [-h]",
        *["                    [--some-flag FLAG]"] * 400,
        "error: argument --attention-backend: invalid choice: 'verify_attn'",
    ]
    assert why(Host(lines), SERVER).startswith(
        "plugin verify_attn failed: RuntimeError: no such thing; then error: argument"
    )
    assert evidence(lines) == (*lines[:3], lines[-1])


# ---- activity

FACT = {
    "rank": 0,
    "ranks": 1,
    "backend": "verify_attn",
    "variant": "cpu",
    "build": "b",
    "release": "r1",
    "counters": {"verify_forwards": 5, "verify_calls": 15, "incumbent_calls": 0, "verify_seconds": 0.1},
}


def fact(**changes):
    counters = {key: changes.pop(key) for key in list(changes) if key in FACT["counters"]}
    return {**FACT, **changes, "counters": {**FACT["counters"], **counters}}


@pytest.mark.parametrize(
    ("files", "live", "reason"),
    [
        ([FACT], [FACT], ""),
        ([], [], "not active"),
        ([fact(backend="other")], [fact(backend="other")], "not active"),
        ([], [FACT], "wrote no fact file"),
        ([fact(ranks=2)], [fact(ranks=2)], "1 of 2 ranks"),
        ([fact(release="r0")], [FACT], "runs release r0, not r1"),
        ([FACT], [fact(verify_forwards=0)], "verified no tree"),
        ([FACT], [fact(verify_calls=0)], "none of them with the kernel"),
        (
            [FACT],
            [fact(incumbent_calls=3)],
            "rank 0 of candidate ran 3 of its verify layers with the incumbent's attention",
        ),
        ([fact(ranks=2), fact(rank=1, ranks=2, incumbent_calls=2)], [fact(ranks=2)], "rank 1 of candidate ran 2"),
    ],
)
def test_active_means_used(files, live, reason):
    found = inactive(Host(facts=files), SERVER, FakeClient(info=live), "verify_attn", "verify_attn", "r1")
    assert (reason in found) if reason else found == ""


def test_counts_say_how_many_ranks_counted():
    """Of a tensor-parallel group one rank answers /server_info; two groups of data parallelism answer both."""
    one = summarize([fact(ranks=2)])
    assert (one.counted, one.ranks, one.kernel_calls) == (1, 2, 15)
    two = summarize([fact(ranks=2), fact(ranks=2)])
    assert (two.counted, two.ranks, two.kernel_calls) == (2, 4, 30)
    text = table(Results("sglang-integration", "verify_attn", facts={"activity": asdict(one)}))
    assert "15 calls in 5 verify forwards, counted by 1 of 2 rank(s)" in text


def test_metrics_are_summed_and_a_missing_name_is_an_error():
    client = FakeClient()
    client.metrics = lambda: '# TYPE sglang:a counter\nsglang:a_total{rank="0"} 2.0\nsglang:a_total{rank="1"} 3.0\n'
    assert read_metrics(client, ("sglang:a_total",)) == {"sglang:a_total": 5.0}
    with pytest.raises(ServingError, match="exports no sglang:b_total"):
        read_metrics(client, ("sglang:a_total", "sglang:b_total"))


def test_an_abandoned_load_waits_for_nothing_and_sends_nothing_more():
    """A verdict is in: what is in flight on a slow canary, and what is due behind it, must not hold up going back."""
    from phases.serving.load import OpenLoopLoad, Prompt, RequestRecord

    hung, sent = threading.Event(), []

    def send(prompt: Prompt, due: float) -> RequestRecord:
        sent.append(due)
        hung.wait(30)
        return RequestRecord(prompt.name, due, due, None, due, 200)

    load = OpenLoopLoad(send, [Prompt("p", "text")], 500.0, max_in_flight=2).start()
    while len(sent) < 2 or load._due.qsize() < 5:
        hung.wait(0.01)
    load.abandon()
    assert not hung.is_set() and len(sent) == 2
    hung.set()
    for thread in load._threads:
        thread.join(30)
    assert len(sent) == 2
