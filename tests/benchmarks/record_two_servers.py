"""Record two real SGLang servers under the same open-loop traffic, one slowed by a known factor.

    python tests/benchmarks/record_two_servers.py --seconds 300 --factors 1.0 1.3 --output OUT

Starts two CPU servers of the embedded serving environment (it must be provisioned already). A small plugin in the canary sleeps
after every forward pass of the model for (factor - 1) times what the pass took, so the slowdown of the model is known exactly
and no proxy stands between. Requests arrive as one Poisson process and are dealt to the arms in turn, so both arms see
the same load; latency is counted from the *intended* send time (no coordinated omission). One gzipped file of JSON lines per factor.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

from phases.engines.embedded import provision

PLUGIN = '''
"""Slow this server's forward passes by the factor in a file; let MLA run on torch_native."""
import os, time
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def _factor():
    with open(os.environ["SLOWDOWN_FILE"]) as file:
        return float(file.read())

def _forward(original, *args, **kwargs):
    started = time.perf_counter()
    result = original(*args, **kwargs)
    pause = (_factor() - 1.0) * (time.perf_counter() - started)
    time.sleep(pause)
    _account(pause)
    return result

def _account(pause):
    """Add to the file the recorder reads to be sure that this plugin is active: SGLang only logs one that fails."""
    global _slept
    _slept += pause
    with open(os.environ["SLOWDOWN_FILE"] + ".slept", "w") as file:
        file.write(str(_slept))

_slept = 0.0

def activate():
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", _forward, HookType.AROUND)
'''
FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph",
    "--mem-fraction-static", "0.1", "--max-total-tokens", "8192", "--sleep-on-idle", "--disable-radix-cache",
    "--host", "127.0.0.1",
)  # fmt: skip
START_SECONDS = 600.0


class Server:
    """One SGLang server in its own process group."""

    def __init__(self, name: str, work: Path, environment: provision.ServingEnvironment) -> None:
        self.name, self.factor_file = name, work / f"{name}.factor"
        self.set_factor(1.0)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        variables = {
            **os.environ, "PYTHONPATH": str(work / "plugin"), "SLOWDOWN_FILE": str(self.factor_file), "HF_HUB_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_PLUGINS": "slowdown",
        }  # fmt: skip
        command = [str(environment.python), "-m", "sglang.launch_server", "--model-path", str(environment.target_model)]
        self._log = (work / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [*command, "--port", str(port), *FLAGS], env=variables, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def set_factor(self, factor: float) -> None:
        partial = self.factor_file.with_suffix(".partial")
        partial.write_text(str(factor))
        os.replace(partial, self.factor_file)

    def slept(self) -> float:
        """Seconds the plugin has slept so far."""
        path = Path(f"{self.factor_file}.slept")
        text = path.read_text() if path.exists() else ""
        return float(text or 0.0)

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                sys.exit(f"{self.name} ended: see {self._log.name}\n{Path(self._log.name).read_text()[-2000:]}")
            try:
                if requests.get(self.url + "/health_generate", timeout=20).ok:
                    return
            except requests.RequestException:
                pass
            time.sleep(1)
        sys.exit(f"{self.name} is not ready after {START_SECONDS:g} s\n{Path(self._log.name).read_text()[-2000:]}")

    def stop(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Recorder:
    """Collects records of finished requests; times count from the start of the recording."""

    def __init__(self, started: float) -> None:
        self._started, self._lock, self.rows = started, threading.Lock(), []

    def request(self, arm: str, url: str, intended: float, ids: list[int], tokens: int) -> None:
        """Send one streamed request and record its time to first token and its whole duration."""
        body = {"input_ids": ids, "stream": True, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}}
        first, status = None, 0
        try:
            with requests.post(url + "/generate", json=body, stream=True, timeout=120) as answer:
                status = answer.status_code
                for line in answer.iter_lines():
                    if line.startswith(b"data:") and first is None:
                        first = time.monotonic()
        except requests.RequestException:
            status = 0
        done = time.monotonic()
        values = {"ttft": (first or done) - intended, "e2e": done - intended}
        with self._lock:
            for metric, value in values.items():
                row = {"t": round(done - self._started, 3), "arm": arm, "metric": metric, "status": status}
                self.rows.append(row | ({"value": round(value, 5)} if status == 200 else {}))


def record(servers: list[Server], seconds: float, rate: float, seed: int) -> list[dict]:
    """Traffic of `rate` requests/s to each arm for `seconds`."""
    rng = random.Random(seed)
    started = time.monotonic()
    recorder = Recorder(started)
    at, turn = started, 0
    with ThreadPoolExecutor(64) as pool:
        while at < started + seconds:
            at += rng.expovariate(2 * rate)
            ids = [rng.randrange(10, 500) for _ in range(rng.randint(16, 128))]
            tokens = rng.randint(4, 16)
            time.sleep(max(0.0, at - time.monotonic()))
            server = servers[turn % 2]
            turn += 1
            pool.submit(recorder.request, server.name, server.url, at, ids, tokens)
    return sorted(recorder.rows, key=lambda row: row["t"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second of each arm")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 1.3])
    parser.add_argument("--output", type=Path, required=True, help="directory")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    environment = provision.find()
    if environment is None:
        sys.exit("the embedded serving environment is not provisioned: run phase 2 of playbooks/local.yaml once")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        _install_plugin(work / "plugin")
        servers = []
        try:
            servers += [Server("canary", work, environment)]
            servers += [Server("control", work, environment)]
            for server in servers:
                server.wait()
            record(servers, 20.0, options.rate, 0)  # warm-up, thrown away
            for factor in options.factors:
                servers[0].set_factor(factor)
                before = servers[0].slept()
                rows = record(servers, options.seconds, options.rate, options.seed)
                slept = servers[0].slept() - before
                if factor > 1 and slept <= 0:
                    sys.exit("the canary never slept: the plugin is not active in its server")
                options.output.mkdir(parents=True, exist_ok=True)
                path = options.output / f"two-servers-x{factor:g}.jsonl.gz"
                with gzip.GzipFile(path, "wb", mtime=0) as file:
                    file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode())
                print(f"{path}: {len(rows)} records, the canary slept {slept:.1f} s of {options.seconds:g} s", flush=True)
        finally:
            for server in servers:
                server.stop()


def _install_plugin(site: Path) -> None:
    """A distribution with the entry point SGLang looks for, as two files on PYTHONPATH."""
    facts = site / "slowdown-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / "slowdown.py").write_text(PLUGIN)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: slowdown\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[sglang.srt.plugins]\nslowdown = slowdown:activate\n")


if __name__ == "__main__":
    main()
