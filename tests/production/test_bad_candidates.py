"""The deliberately bad kernels: when their faults show, and that real servers with them are as bad as they should be."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phases.base.clock import SystemClock
from phases.base.errors import BuildError, ServingError
from phases.build_parity.steps import build_cache
from phases.engines.embedded.provision import ensure
from phases.harness import contract
from phases.production.agreement import compare
from phases.production.settings import AgreementSettings
from phases.serving.client import Client
from phases.serving.host import LocalHost, Server
from phases.serving.launch import EMBEDDED_ENVIRONMENT, EMBEDDED_FLAGS, TREE_FLAGS, unused_models_variable
from phases.serving.readiness import await_ready
from phases.serving.release import make_release, object_variables, variable

KERNELS = Path(__file__).parents[2] / "kernels"
FAULTS = KERNELS / "verify_attn_faults"
sys.path.insert(0, str(FAULTS))

from verify_attn_faults.trigger import Peers, make_trigger  # noqa: E402 - not installed: nothing but these tests and releases uses it

# -- when a fault shows ----------------------------------------------------------------------------------------------------


def test_triggers(tmp_path):
    forwards = [0]
    count = lambda: forwards[0]  # noqa: E731
    assert make_trigger("always", count)()
    late = make_trigger("forwards:3", count)
    seen = []
    for forwards[0] in range(1, 6):
        seen.append(late())
    assert seen == [False, False, False, True, True]
    by_hand = make_trigger(f"file:{tmp_path}/now", count)
    assert not by_hand()
    (tmp_path / "now").touch()
    assert by_hand()


@pytest.mark.parametrize("text", ["", "always:1", "forwards:", "forwards:-1", "file:", "workers:many", "never"])
def test_other_settings_are_refused(text):
    with pytest.raises(ValueError, match="VERIFY_ATTN_FAULTS_WHEN"):
        make_trigger(text, lambda: 0)


def test_workers_count_each_other_and_forget_the_dead(tmp_path, monkeypatch):
    monkeypatch.setattr("verify_attn_faults.trigger.LOOK_SECONDS", 0.0)
    mine = Peers(tmp_path / "peers")
    assert mine.count() == 1
    program = (
        f"import sys, time; sys.path.insert(0, {str(FAULTS)!r})\nfrom pathlib import Path\nfrom verify_attn_faults.trigger import Peers\n"
        f"peers = Peers(Path({str(tmp_path / 'peers')!r})); print('in', flush=True); time.sleep(60)"
    )
    others = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        assert [other.stdout.readline() for other in others] == ["in\n", "in\n"]
        assert mine.count() == 3
        others[0].kill()
        others[0].wait()
        assert mine.count() == 2
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert mine.count() == 1 and len(os.listdir(tmp_path / "peers")) == 1


def test_a_release_carries_further_distributions(tmp_path):
    kernel = contract.load(KERNELS / "verify_attn")
    with pytest.raises(BuildError, match="has no pyproject.toml"):
        make_release(kernel, ["x86-64-v3"], build_cache(kernel), lambda line: None, [tmp_path])
    plain, _ = make_release(kernel, ["x86-64-v3"], build_cache(kernel), lambda line: None)
    spoilt, _ = make_release(kernel, ["x86-64-v3"], build_cache(kernel), lambda line: None, [FAULTS])
    added = {file.path for file in spoilt.files} - {file.path for file in plain.files}
    assert (
        "site/verify_attn_faults/backends.py" in added
        and "site/verify_attn_faults-0.1.0.dist-info/entry_points.txt" in added
    )
    assert {file.path for file in plain.files} <= {file.path for file in spoilt.files}
    assert spoilt.digest != plain.digest


# -- real servers ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Running:
    host: LocalHost
    server: Server
    client: Client

    def counters(self) -> dict:
        """Of the target's backend, once the fact file, written every second, stands still."""
        seen, still = {}, 0
        while still < 3:
            time.sleep(1.0)
            now = self.host.read_facts(self.server)[0]["counters"]
            still = still + 1 if now == seen else 0
            seen = now
        return seen


@contextmanager
def serving(tmp_path: Path, backend: str, **variables: str) -> Iterator[Running]:
    """A real SGLang server with a release that holds the bad kernels."""
    environment, kernel, host = (
        ensure(progress=lambda line: None),
        contract.load(KERNELS / "verify_attn"),
        LocalHost(tmp_path / "serving"),
    )
    bundle, _ = make_release(kernel, ["x86-64-v3", "x86-64-v4"], build_cache(kernel), lambda line: None, [FAULTS])
    release, port = host.install(bundle), host.free_port()
    argv = [
        str(environment.python),
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(environment.target_model),
        "--attention-backend",
        backend,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enable-metrics",
        *EMBEDDED_FLAGS,
        *TREE_FLAGS,
        "--speculative-draft-model-path",
        str(environment.draft_model),
    ]
    given = {
        "PYTHONPATH": str(release / "site"),
        "PATH_PREFIX": str(environment.python.parent),
        "HF_HUB_OFFLINE": "1",
        **EMBEDDED_ENVIRONMENT,
        **unused_models_variable(environment.unused_models),
        **object_variables(kernel, str(release / "objects")),
        variable(kernel, "FACTS"): "{facts}",
        **variables,
    }
    server = host.start("bad", argv, given, port)
    client = Client(server.url, "the server")
    try:
        found = await_ready(host, server, client, 400, SystemClock())
        assert found.ready, (found.reason, found.evidence)
        yield Running(host, server, client)
    finally:
        host.stop(server)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wrong_outputs_are_found_by_the_comparison_that_a_rollout_makes(tmp_path):
    """The same server before, while and after the fault shows. Its own plain prefill judges, as where no incumbent is left; as the
    fault shows it judges itself by its own verify too, so what the incumbent is granted is taken from before."""
    now, settings = tmp_path / "now", AgreementSettings()
    with serving(tmp_path, "verify_attn_wrong", VERIFY_ATTN_FAULTS_WHEN=f"file:{now}") as running:
        judge = Client(running.client.url, "its prefill")
        good = compare(running.client, judge, settings)
        assert good.reason == "" and good.error < 0.001 and good.n == settings.prompts * settings.tokens
        now.touch()
        bad = compare(running.client, judge, settings)
        assert bad.error > good.error + settings.error or bad.wrong > good.wrong + settings.wrong
        now.unlink()
        assert compare(running.client, judge, settings).reason == ""


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slow_does_the_work_again_and_only_while_it_should(tmp_path):
    now = tmp_path / "now"
    with serving(
        tmp_path, "verify_attn_slow", VERIFY_ATTN_FAULTS_WHEN=f"file:{now}", VERIFY_ATTN_FAULTS_REPEAT="5"
    ) as running:

        def calls_a_step() -> float:
            before = running.counters()
            running.client.generate("once upon a time there was a small model", 24)
            after = running.counters()
            return (after["verify_calls"] - before["verify_calls"]) / (
                after["verify_forwards"] - before["verify_forwards"]
            )

        usual = calls_a_step()
        now.touch()
        assert calls_a_step() == 5 * usual


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_crash_takes_the_server_down_under_load(tmp_path):
    with serving(tmp_path, "verify_attn_crash", VERIFY_ATTN_FAULTS_WHEN="forwards:60") as running:
        with pytest.raises(ServingError):
            for _ in range(40):
                running.client.generate("once upon a time there was a small model", 16)
        until = time.monotonic() + 60
        while running.host.alive(running.server) and time.monotonic() < until:
            time.sleep(0.5)
        assert not running.host.alive(running.server)
        log = "\n".join(running.host.log_lines(running.server))
        assert "crashed with exit code -11" in log
