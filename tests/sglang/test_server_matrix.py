"""The plugin in real servers of other kinds: tensor parallel, n-gram trees, page size 64, chunked prefill, short requests.

Each answer that went through tree verify is checked against the same server's own plain prefill of the same tokens.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from phases.base.clock import SystemClock
from phases.build_parity.steps import build_cache
from phases.harness import contract
from phases.serving.activity import read_activity, summarize
from phases.serving.client import Client
from phases.serving.host import LocalHost
from phases.serving.launch import EMBEDDED_ENVIRONMENT, EMBEDDED_FLAGS, unused_models_variable
from phases.serving.prompts import timing_prompt
from phases.serving.readiness import await_ready
from phases.serving.release import make_release, object_variables, variable
from tests.sglang.conftest import KERNEL

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

NGRAM = (
    "--speculative-algorithm",
    "NGRAM",
    "--speculative-num-draft-tokens",
    "8",
    "--speculative-ngram-max-bfs-breadth",
    "4",
    "--speculative-ngram-min-bfs-breadth",
    "2",
)
CHAIN = (
    "--speculative-algorithm",
    "STANDALONE",
    "--speculative-num-steps",
    "3",
    "--speculative-eagle-topk",
    "1",
    "--speculative-num-draft-tokens",
    "4",
)


@dataclass(frozen=True)
class Kind:
    name: str
    flags: tuple[str, ...]
    ranks: int = 1
    environment: tuple[tuple[str, str], ...] = ()


KINDS = (
    Kind(
        "tp2 ngram chunked",
        (*NGRAM, "--tp", "2", "--mem-fraction-static", "0.5", "--chunked-prefill-size", "128"),
        2,
        (("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),),
    ),
    Kind("page 64 chain", (*CHAIN, "--page-size", "64")),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    host = LocalHost(tmp_path_factory.mktemp("serving"))
    kernel = contract.load(KERNEL)
    bundle, _ = make_release(kernel, ["x86-64-v3", "x86-64-v4"], build_cache(kernel), lambda line: None)
    yield host, kernel, host.install(bundle), bundle.digest
    for server in host.left_running():
        host.stop(server)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def running(request, installed, serving_environment):
    host, kernel, release, digest = installed
    kind, port = request.param, host.free_port()
    argv = [
        str(serving_environment.python),
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(serving_environment.target_model),
        "--attention-backend",
        "verify_attn",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enable-metrics",
        *EMBEDDED_FLAGS,
        *kind.flags,
    ]
    if "STANDALONE" in argv:
        argv += ["--speculative-draft-model-path", str(serving_environment.draft_model)]
    variables = {
        "PYTHONPATH": str(release / "site"),
        "PATH_PREFIX": str(serving_environment.python.parent),
        "HF_HUB_OFFLINE": "1",
        **EMBEDDED_ENVIRONMENT,
        **unused_models_variable(serving_environment.unused_models),
        **object_variables(kernel, str(release / "objects")),
        variable(kernel, "RELEASE"): digest,
        variable(kernel, "FACTS"): "{facts}",
        **dict(kind.environment),
    }
    server = host.start(kind.name.replace(" ", "-"), argv, variables, port)
    client = Client(server.url, kind.name)
    found = await_ready(host, server, client, 300, SystemClock())
    assert found.ready, (found.reason, "\n".join(found.evidence))
    yield kind, host, server, client
    host.stop(server)


def worst_error(client: Client, prompt: list[int], completion) -> float:
    scored = client.score(prompt, completion.tokens)
    return max(abs(own - teacher) for own, teacher in zip(completion.logprobs, scored.logprobs))


def test_every_rank_runs_the_kernel(running):
    kind, host, server, client = running
    client.generate("once upon a time there was", 12)
    used = summarize(read_activity(client, "verify_attn"))
    assert used.kernel_calls > 0 and used.incumbent_calls == 0
    files = host.read_facts(server)
    assert sorted(entry["rank"] for entry in files) == list(range(kind.ranks))
    assert {entry["ranks"] for entry in files} == {kind.ranks} and len({entry["build"] for entry in files}) == 1
    text = client.metrics()
    assert "verify_attn_info{" in text and "verify_attn_calls_total{" in text


def test_long_prompts_prefix_cache_and_mixed_batches(running):
    """Long prompts arrive while others decode; half of them share a cached prefix; lengths end in the middle of trees."""
    _, _, _, client = running
    draw = random.Random(3)
    shared = timing_prompt(1, 300)
    requests = [(timing_prompt(10 + i, draw.randrange(3, 500)), draw.randrange(1, 24)) for i in range(5)]
    requests += [(shared + timing_prompt(20 + i, draw.randrange(1, 90)), draw.randrange(1, 24)) for i in range(5)]
    draw.shuffle(requests)
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: client.generate(*request), requests))
    for (prompt, tokens), answer in zip(requests, answers):
        assert len(answer.tokens) == tokens
        assert worst_error(client, prompt, answer) < 1e-3


def test_repetition_is_accepted_in_trees(running):
    """A repeated phrase: drafts are right often, so that whole branches are accepted, and the numbers stay right."""
    _, _, _, client = running
    prompt = timing_prompt(2, 20) * 8
    answer = client.generate(prompt, 40)
    assert answer.verify_steps > 0 and answer.accept_length >= 1
    assert worst_error(client, prompt, answer) < 1e-3
    assert client.generate(prompt, 40).tokens == answer.tokens


def test_the_last_token_of_the_vocabulary_is_scored(running):
    """SGLang calls it 0 in the rows it returns (`x if x < vocab_size - 1 else 0`); its log-probability is the right one all the same."""
    _, _, _, client = running
    vocabulary = json.loads((Path(client.server_info()["model_path"]) / "config.json").read_text())["vocab_size"]
    last, prompt = vocabulary - 1, timing_prompt(3, 30)
    given = (7, last, 8, last)
    found = client.score(prompt, given)
    everything = client._prompt_rows(
        client._body([*prompt, *given], 1) | {"logprob_start_len": len(prompt) - 1, "top_logprobs_num": vocabulary}
    )
    for token, scored, row in zip(given, found.logprobs, everything["input_top_logprobs"][-len(given) :], strict=True):
        assert scored == pytest.approx(next(value for value, other, _ in row if other == token), abs=1e-4)
    if all(row[1] != 0 for row in everything["input_token_logprobs"]):
        pytest.fail("SGLang now names the last token: drop the exception in phases/serving/client.py")
