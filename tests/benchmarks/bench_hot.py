"""The hot fallback on real SGLang servers under load: how long it takes, whether anything is lost or garbled, what it costs.

    python tests/benchmarks/bench_hot.py forward            # the per-forward look at the control byte; seconds
    python tests/benchmarks/bench_hot.py switch             # a real fleet behind sshd: one worker of one rank, one of two; about 4 minutes
    python tests/benchmarks/bench_hot.py shadow             # what the shadow costs at 0, 1, 10 and 100 %; about 4 minutes
    python tests/benchmarks/bench_hot.py shadow --steps     # the same for the backend alone, a minute

`switch` runs `phase rollback --hot` itself, again and again, while requests stream in, and `--undo` in between. Its times are: from the
command's start to the last rank's acknowledgement, by that rank's own clock (this machine's), which is when traffic is safe; of it
from the order; and the whole command to its exit, the checkpoint in the ledger included. Every answer is compared with the answers of
an idle server on either kernel. With `--priority -10` toolkit and sshd (not the servers) go first on a machine where all share the
cores; on real hosts they have cores of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[2]
sys.path[:0] = [str(TOP), str(TOP / "kernels" / "verify_attn")]

from phases.base.clock import SystemClock  # noqa: E402
from phases.run.session import adhoc_run  # noqa: E402
from phases.engines.ssh.deploy import first_release, push  # noqa: E402
from phases.engines.ssh.session import op  # noqa: E402
from phases.playbook import loader  # noqa: E402
from phases.production import hot  # noqa: E402
from phases.fleet.live import open_production  # noqa: E402
from phases.production.production import Production  # noqa: E402
from phases.production.releases import fleet_releases  # noqa: E402
from phases.serving.client import Client  # noqa: E402
from phases.serving.environment import environment_facts  # noqa: E402
from phases.serving.prompts import timing_prompt  # noqa: E402
from tests.engines.ssh.sshfleet import PYTHON, SshFleet, end_processes_of, free_port  # noqa: E402

TOKENS = 24
PLAYBOOK = """\
schema: phasegate/playbook/v1
name: hot
kernel: {kernel}
fleet:
  hosts:
{hosts}
  service: {{kind: process, ready: 300, drain: 10}}
  lease: {{arm: 400, bake: 120}}
production:
  server: {{python: embedded}}
  incumbent: {{backend: verify_attn_torch}}
  candidate: {{backend: verify_attn, environment: {environment}}}
phases:
  tp8-canary:
    judge: {{metrics: [{{metric: e2e}}]}}
"""


# ---- forward


def forward() -> None:
    """Nanoseconds of one `Control.decide`, the fastest of many batches; and of an empty call, to subtract."""
    from verify_attn.sglang.control import Control

    with tempfile.NamedTemporaryFile() as file:
        file.write(b"c")
        file.flush()
        control = Control(file.name)
        rows = {"an empty method": _nanoseconds(_Empty().decide), "no control file": _nanoseconds(Control(None).decide),
                "control file, steady": _nanoseconds(control.decide)}  # fmt: skip
    for name, value in rows.items():
        print(f"{name:24} {value:8.0f} ns a forward")


class _Empty:
    def decide(self, forward: int) -> bool:
        return True


def _nanoseconds(call: Any, calls: int = 100_000, batches: int = 30) -> float:
    best = float("inf")
    for _ in range(batches):
        started = time.perf_counter()
        for _ in range(calls):
            call(7)
        best = min(best, time.perf_counter() - started)
    return best / calls * 1e9


# ---- servers


@dataclass
class Servers:
    """Real SGLang workers on real hosts behind one sshd, on the candidate, with the incumbent as what a rollback goes to."""

    directory: Path
    ranks: tuple[int, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def up(self) -> Iterator[Production]:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.sshd = SshFleet(self.directory / "ssh", 1)
        self.roots = [self.directory / f"w{number}" for number, _ in enumerate(self.ranks, 1)]
        try:
            self._write_playbook()
            clock = SystemClock()
            with open_production(adhoc_run(loader.load(self.playbook), "bench", clock), "bench", clock, print) as production:
                self._start(production)
                yield production
        finally:
            for root in self.roots:
                end_processes_of(root)
            self.sshd.close()

    @property
    def playbook(self) -> Path:
        return self.directory / "repo" / "playbook.yaml"

    def _write_playbook(self) -> None:
        seen, rows, cores = self.sshd.host(0), [], sorted(os.sched_getaffinity(0))
        login = f"{{user: {seen.ssh.user}, port: {seen.ssh.port}, key_files: [{seen.ssh.key_files[0]}], known_hosts: [{seen.ssh.known_hosts[0]}], agent: false, config_file: /dev/null}}"
        for root, ranks in zip(self.roots, self.ranks, strict=True):
            bind = "all" if ranks == 1 else "|".join(str(cores[rank * len(cores) // ranks]) for rank in range(ranks))
            given = f"{{tp: '{ranks}', mem: '{0.1 if ranks == 1 else 0.5}', bind: '{bind}'}}"
            rows.append(f"    - {{name: {root.name}, root: {root}, port: {free_port()}, python: {PYTHON}, address: {seen.address}, labels: {{tp: '{ranks}'}}, vars: {given}, ssh: {login}}}")
        self.playbook.parent.mkdir(exist_ok=True)
        self.playbook.write_text(PLAYBOOK.format(kernel=TOP / "kernels/verify_attn/kernel.yaml", hosts="\n".join(rows), environment=json.dumps(self.environment)))
        for argv in (["init", "-q"], ["config", "user.name", "Ada"], ["config", "user.email", "ada@example.org"], ["add", "."], ["commit", "-qm", "bench"]):
            subprocess.run(["git", *argv], cwd=self.playbook.parent, check=True)

    def _start(self, production: Production) -> None:
        from phases.harness import contract

        settings = production.settings
        made = fleet_releases(settings, contract.load(TOP / "kernels/verify_attn"), environment_facts(settings.server, lambda line: None), lambda line: None)

        def start(host: Any) -> None:
            session = production.fleet.session(host)
            lock = production.take_lock(session)
            for bundle in made.values():
                push(session, lock, bundle)
            first_release(session, lock, production.driver(host), made["candidate"].digest, production.ready(host))
            session.do(op("release.good", digest=made["incumbent"].digest, token=lock.token))  # so that the host has strayed
            production.warm_up(host)

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            list(pool.map(start, production.workers))
        for root in self.roots:  # they have inherited sshd's priority, which is this process's
            os.setpriority(os.PRIO_PGRP, json.loads((root / "run/service.json").read_text())["group"], 0)

    def phase(self, *arguments: str) -> tuple[float, float, dict[str, Any]]:
        """Seconds of one whole `phase` command, CPU seconds of it and its children, and what it printed as JSON."""
        environment = {**os.environ, "PYTHONPATH": str(TOP), "PYTHONDONTWRITEBYTECODE": ""}  # byte code is kept, as where it is installed
        started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "phases.cli.main", *arguments, "-p", str(self.playbook), "--json"], cwd=self.playbook.parent,
                              env=environment, capture_output=True, text=True, check=False)  # fmt: skip
        seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stdout + done.stderr
        return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, json.loads(done.stdout)


PROMPTS = [timing_prompt(10 + n, length) for n, length in enumerate((12, 60, 150, 300, 40, 90))]


@dataclass
class Load:
    """A closed loop of streams to every worker; every answer is held against the reference."""

    clients: list[Client]
    reference: dict[int, tuple[int, ...]]
    streams: int = 3
    answered: int = 0
    lost: list[str] = field(default_factory=list)
    garbled: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[Load]:
        stop, lock = threading.Event(), threading.Lock()

        def work(client: Client, start: int) -> None:
            for number in itertools.count(start):
                if stop.is_set():
                    return
                prompt = number % len(PROMPTS)
                try:
                    answer = client.generate(PROMPTS[prompt], TOKENS, stream=True)
                except Exception as fault:  # noqa: BLE001 - whatever it is, a request was lost
                    with lock:
                        self.lost.append(str(fault))
                    continue
                with lock:
                    self.answered += 1
                    if answer.tokens != self.reference[prompt]:
                        self.garbled.append(prompt)

        threads = [threading.Thread(target=work, args=(Client(c.url, c.name), s), daemon=True) for c in self.clients for s in range(self.streams)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)


def answers(client: Client) -> dict[int, tuple[int, ...]]:
    return {number: client.generate(prompt, TOKENS).tokens for number, prompt in enumerate(PROMPTS)}


def switch(directory: Path, rounds: int, repeats: int) -> None:
    servers = Servers(directory, (1, 2))
    with servers.up() as production:
        clients = [production.client(host) for host in production.workers]
        before = [answers(client) for client in clients]
        hot.fall_back(production)
        back = [answers(client) for client in clients]
        hot.go_forward(production, production.workers)
        assert all(found == before[0] for found in (*before, *back)), "the kernels do not agree on an idle server: no reference"
        print(f"reference: {len(PROMPTS)} greedy answers of {TOKENS} tokens, the same from both kernels on 3 ranks, idle")
        load = Load(clients, before[0])
        with load.running():
            time.sleep(3)
            steady = _steady(production, repeats)
            production.fleet.close()  # frees the hosts' locks for the commands
            servers.phase("status")  # so that the command's byte code is there
            safe, whole, cpu, acknowledged, on_host = [], [], [], [], []
            for _ in range(rounds):
                started = time.time()
                seconds, burnt, told = servers.phase("rollback", "--hot", "--yes", "--reason", "bench")
                assert told["rollback"]["state"] == "safe", told
                safe.append(max(rank["at"] for answer in told["rollback"]["hot"]["hosts"] for rank in answer["ranks"]) - started)
                whole.append(seconds)
                cpu.append(burnt)
                acknowledged.append(told["rollback"]["hot"]["seconds"])
                on_host.append(max(answer["on_host"] for answer in told["rollback"]["hot"]["hosts"]))
                servers.phase("rollback", "--hot", "--undo", "--yes")
            time.sleep(2)
        after = [answers(client) for client in clients]
        assert all(found == before[0] for found in after)
        facts = [entry for host in production.workers for entry in production.rank_facts(host)]
    _line("order to last acknowledging rank, sessions open", steady)
    _line("start of `phase rollback --hot` to last acknowledging rank", safe)
    _line("  of it from the order: logging in, byte, answers", acknowledged)
    _line("  of it on the slower host: byte to acknowledgement", on_host)
    _line("the whole command `phase rollback --hot`", whole)
    _line("  CPU time of it", cpu)
    print(f"load average: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, the servers' own load and other work among it")
    print(f"under load: {load.answered} answers, {len(load.lost)} lost, {len(load.garbled)} garbled; {len(steady) + 2 * rounds} switches or more")
    print(f"ranks: {[(f['rank'], f['ranks'], f['counters']['verify_calls'], f['counters']['incumbent_calls']) for f in facts]} (rank, of, layers by either kernel)")
    for fault in load.lost[:3]:
        print("lost:", fault)


def _steady(production: Production, repeats: int) -> list[float]:
    seconds = []
    for number in range(repeats):
        done = hot.fall_back(production) if number % 2 == 0 else hot.go_forward(production, production.workers)
        assert done.safe, done.missing
        seconds.append(done.seconds)
        time.sleep(0.2)
    return seconds


def _line(name: str, seconds: list[float]) -> None:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    print(f"{name:58} median {middle:6.3f} s, {low:.3f} to {high:.3f}, n {len(seconds)}")


# ---- shadow


def shadow(directory: Path, requests: int) -> None:
    """One server a rate, started one after the other; the same requests, one at a time."""
    print(f"{'rate':>6} {'steps compared':>15} {'attention a verify step':>24} {'a request':>12} {'largest error':>14}")
    for rate in ("0", "0.01", "0.1", "1"):
        servers = Servers(directory / f"rate-{rate}", (1,), {"VERIFY_ATTN_SHADOW": rate})
        with servers.up() as production:
            client = production.client(production.workers[0])
            answers(client)
            first = _counters(client)
            seconds = [client.generate(PROMPTS[number % len(PROMPTS)], TOKENS).seconds for number in range(requests)]
            last = _counters(client)
        steps = last["verify_forwards"] - first["verify_forwards"]
        attention = (last["verify_seconds"] - first["verify_seconds"]) / steps
        print(f"{float(rate):6.0%} {last['steps'] - first['steps']:7} of {steps:5} {attention * 1e3:21.3f} ms {statistics.median(seconds) * 1e3:9.1f} ms {last['worst']:14.2g}")


def shadow_steps() -> None:
    """The backend alone: verify steps with and without the comparison, in bfloat16 with 16 heads of DeepSeek's size and 4 layers."""
    from phases.engines.embedded.provision import ensure

    python = ensure(progress=lambda line: None).python
    environment = {**os.environ, "PYTHONPATH": str(TOP / "kernels/verify_attn"), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(python), str(Path(__file__).with_name("hot_shadow_steps.py"))], env=environment, capture_output=True, text=True, check=True)
    for row in json.loads(done.stdout.splitlines()[-1]):
        print(row)


def _counters(client: Client) -> dict[str, float]:
    facts = next(entry for state in client.server_info()["internal_states"] for entry in state["verify_attn"])
    assert facts["shadow"]["tripped"] is None, facts["shadow"]
    return {**facts["counters"], **{name: facts["shadow"][name] for name in ("steps", "worst")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("forward", "switch", "shadow"))
    parser.add_argument("--rounds", type=int, default=10, help="of the whole command (switch)")
    parser.add_argument("--repeats", type=int, default=60, help="switches over open sessions (switch)")
    parser.add_argument("--requests", type=int, default=60, help="for each rate (shadow)")
    parser.add_argument("--directory", type=Path, help="where hosts and repository are made; default: a temporary one")
    parser.add_argument("--steps", action="store_true", help="the backend alone, without servers (shadow); a minute")
    parser.add_argument("--priority", type=int, default=0, help="nice value of toolkit, sshd and load; below 0 needs root (switch)")
    given = parser.parse_args()
    os.setpriority(os.PRIO_PROCESS, 0, given.priority)
    directory = given.directory or Path(tempfile.mkdtemp(prefix="hot-"))
    try:
        if given.what == "forward":
            forward()
        elif given.what == "switch":
            switch(directory, given.rounds, given.repeats)
        elif given.steps:
            shadow_steps()
        else:
            shadow(directory, given.requests)
    finally:
        if not given.directory:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
