"""The hot fallback and the shadow in one real SGLang server: answers before, during and after are the same, and a kernel that goes wrong
is caught before anybody sees it.

The candidate is a copy of the kernel that can be broken while it serves: with a file `wrong` beside its facts its outputs are off by 1 %.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from phases.base.clock import SystemClock
from phases.build_parity.steps import build_cache
from phases.harness import contract
from phases.serving.activity import read_activity
from phases.serving.client import Client
from phases.serving.host import LocalHost
from phases.serving.launch import EMBEDDED_ENVIRONMENT, EMBEDDED_FLAGS, TREE_FLAGS, unused_models_variable
from phases.serving.prompts import timing_prompt
from phases.serving.readiness import await_ready
from phases.serving.release import make_release, object_variables, variable
from tests.sglang.conftest import KERNEL, replace

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [timing_prompt(40 + n, length) for n, length in enumerate((9, 50, 140, 260))]
TOKENS = 20


@pytest.fixture(scope="module")
def running(tmp_path_factory, serving_environment):
    folder = tmp_path_factory.mktemp("hot")
    copy = folder / "candidate"
    shutil.copytree(KERNEL, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "*.so"))
    replace(
        copy,
        "sglang/cpu_backend.py",
        '        self.kernel_inputs["check_values"] = False',
        '        import os\n        if os.path.exists(os.path.join(os.environ["VERIFY_ATTN_FACTS"], "wrong")):\n            out.mul_(1.01)\n'
        '        self.kernel_inputs["check_values"] = False',
    )
    host, kernel = LocalHost(folder / "serving"), contract.load(copy)
    bundle, _ = make_release(kernel, ["x86-64-v3", "x86-64-v4"], build_cache(kernel), lambda line: None)
    release, port, control = host.install(bundle), host.free_port(), folder / "control"
    control.write_bytes(b"c")
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
        *TREE_FLAGS,
        "--speculative-draft-model-path",
        str(serving_environment.draft_model),
    ]
    variables = {
        "PYTHONPATH": str(release / "site"),
        "PATH_PREFIX": str(serving_environment.python.parent),
        "HF_HUB_OFFLINE": "1",
        **EMBEDDED_ENVIRONMENT,
        **unused_models_variable(serving_environment.unused_models),
        **object_variables(kernel, str(release / "objects")),
        variable(kernel, "FACTS"): "{facts}",
        variable(kernel, "CONTROL"): str(control),
        variable(kernel, "SHADOW"): "1",
    }
    server = host.start("hot", argv, variables, port)
    client = Client(server.url, "hot")
    try:
        found = await_ready(host, server, client, 300, SystemClock())
        assert found.ready, (found.reason, "\n".join(found.evidence))
        yield client, control, Path(server.facts), host, server
    finally:
        host.stop(server)


def put(control: Path, byte: bytes) -> None:
    handle = os.open(control, os.O_WRONLY)
    os.pwrite(handle, byte, 0)
    os.close(handle)


def answers(client: Client) -> list[tuple[int, ...]]:
    return [client.generate(prompt, TOKENS).tokens for prompt in PROMPTS]


def test_answers_stay_the_same_through_switches_under_load_and_a_kernel_that_goes_wrong(running):
    client, control, facts, host, server = running
    reference = answers(client)
    seen = _facts(client)
    assert seen["hot"]["able"] and seen["counters"]["incumbent_calls"] == 0
    assert (
        seen["shadow"]["steps"] == seen["counters"]["verify_forwards"] and seen["shadow"]["tripped"] is None
    )  # both kernels agree

    wrong: list[int] = []
    stop = threading.Event()

    def user(start: int) -> None:
        own = Client(client.url, "user")
        for number in itertools.count(start):
            if stop.is_set():
                return
            if (
                own.generate(PROMPTS[number % len(PROMPTS)], TOKENS, stream=True).tokens
                != reference[number % len(PROMPTS)]
            ):
                wrong.append(number)

    users = [threading.Thread(target=user, args=(start,)) for start in range(3)]
    for thread in users:
        thread.start()
    try:
        for byte, choice in [(b"i", "incumbent"), (b"c", "candidate")] * 3:
            put(control, byte)
            _eventually(
                lambda choice=choice: (
                    (hot := host.read_facts(server)[0]["hot"])["choice"] == choice and hot["confirmed"] is not None
                )
            )
        assert _facts(client)["counters"]["incumbent_calls"] > 0
        (facts / "wrong").touch()  # from here on the candidate's outputs are off
        _eventually(lambda: host.read_facts(server)[0]["shadow"]["tripped"])
        _eventually(
            lambda: _stands_still(lambda: _facts(client)["counters"]["verify_calls"])
        )  # our kernel does not run any more
    finally:
        stop.set()
        for thread in users:
            thread.join(120)
    assert not wrong and answers(client) == reference  # the step that tripped went on with the incumbent's output

    told = host.read_facts(server)[0]
    evidence = told["shadow"]["tripped"]
    found = f"shadow: layer {evidence['layer']}"  # the first that came after it went wrong, which may be in the middle of a forward
    assert control.read_bytes() == b"i" and told["hot"]["choice"] == "incumbent" and found in told["hot"]["tripped"]
    assert (
        evidence["frobenius"] == pytest.approx(0.01, rel=0.1)
        and evidence["layer"] >= 0
        and len(evidence["prefix_lengths"]) >= 1
    )
    assert any(found in line for line in host.log_lines(server))


def _facts(client: Client) -> dict:
    return read_activity(client, "verify_attn")[0]


def _stands_still(read) -> bool:
    """Over a second under load; what is read may itself be a second old at first."""
    before = read()
    time.sleep(1)
    return read() == before


def _eventually(true) -> None:
    until = time.monotonic() + 120
    while not true():
        assert time.monotonic() < until, "it never came to hold"
        time.sleep(0.02)
