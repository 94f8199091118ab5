"""A light fleet: stand-in workers (`standin_worker.py`) on real hosts, local and behind a real sshd, with the real sglang-router in front,
driven by the real `phase` command. What it is for: states of the toolkit in their hundreds, not latencies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from phases.demo.repository import empty_kernel
from phases.engines.embedded.stand_in import WORKER as STANDIN_WORKER
from phases.engines.ssh.deploy import first_release
from phases.engines.ssh.services import wait_ready
from phases.production.releases import fleet_releases
from phases.serving.environment import environment_facts
from phases.serving.load import HttpSender, LoadSummary, OpenLoopLoad, Prompt
from tests.engines.ssh.sshfleet import PYTHON, SshFleet, end_processes_of, free_port
from tests.engines.ssh.test_router import router_command
from tests.production.kill_sweep import Driven

PLAYBOOK = """\
schema: phasegate/playbook/v1
name: light
kernel: kernel.yaml
fleet:
  hosts:
{hosts}
  service: {{kind: process, ready: {ready:g}, drain: {drain:g}}}
  lease: {{arm: {arm:g}, bake: {lease:g}}}
  router: {{kind: sglang, url: "{router}", timeout: 60}}
  timeouts: {{connect: 30, channel: 30, command: 90}}
production:
  server: {{python: "{python}", model: none, arguments: {arguments}, request_timeout: 60}}
  incumbent: {{backend: light_incumbent}}
  candidate: {{backend: light_candidate, environment: {candidate}}}
  min_available: {{count: {floor}}}
  failure_budget: {{count: {budget}}}
  warm_up: {{requests: 3, agree: 2.0, sweeps: 4}}
  load: {{rate: {rate:g}}}
  agreement: {{prompts: 1, tokens: 4, every: 0}}
watch:
  judge: {judge}
  interval: 2
  roll_back: {roll_back}
phases:
  tp8-canary:
    review: none
    allow_yes: true
    canary: {{count: 1}}
    control: {{count: 1}}
    share_tolerance: 1
    judge: {judge}
  full-rollout:
    review: none
    allow_yes: true
    waves: [{{count: 2}}, {{percent: 100}}]
    soak: 2
    judge: {judge}
"""
JUDGE = "{{metrics: [{{metric: e2e, quantile: 0.5, margin: 1.5}}], alpha: 0.2, window: 0.5, bake: 1, deadline: {deadline:g}, min_samples: 5, settle: 0, probes: {probes:g}, error_tolerance: 0.2}}"


@dataclass
class LightFleet(Driven):
    """The fleet and its repository.

    Attributes:
        lease: seconds a canary waits for the toolkit. As all limits here it is long: only tests of what happens at its end make it short.
        ssh: how many of the four workers are behind sshd; the others are local.
    """

    directory: Path
    ssh: int = 2
    count: int = 4
    lease: float = 90.0
    router_arguments: tuple[str, ...] = ("--policy", "round_robin")
    server_arguments: tuple[str, ...] = ("--skip-tokenizer-init",)
    sshd: SshFleet | None = None
    router: subprocess.Popen[bytes] | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> LightFleet:
        """The repository with kernel and playbook, and the ports; no worker and no router yet."""
        self.repo.mkdir(parents=True)
        if self.ssh:
            self.sshd = SshFleet(self.directory / "ssh", 1)
        self.ports = [free_port() for _ in range(self.count)]
        self.router_port = free_port()
        self.python = self.directory / "python"
        self.python.write_text(f'#!/bin/sh\nshift 2\nexec {PYTHON} -E -s {STANDIN_WORKER} "$@"\n')
        self.python.chmod(0o755)
        for path, text in empty_kernel("light").items():
            (self.repo / path).write_text(text)
        self._git("init", "-q", "-b", "main")
        self._git("config", "user.name", "Ada")
        self._git("config", "user.email", "ada@example.org")
        self.configure()
        return self

    def up(self) -> LightFleet:
        """Everything started: sshd, router, each worker on the incumbent as its last-good release, all in service."""
        self.prepare()
        self.start_router()
        with self.production() as production:
            made = fleet_releases(
                production.settings, self.kernel, environment_facts(production.settings.server, print), print
            )
            self.digests = {side: bundle.digest for side, bundle in made.items()}
            production.push([made["incumbent"]], production.workers)
            for host in production.workers:
                session = production.fleet.session(host)
                first_release(
                    session,
                    production.take_lock(session),
                    production.driver(host),
                    made["incumbent"].digest,
                    production.ready(host),
                )
                production.put_in(host)
        return self

    def stop_router(self) -> None:
        """End it at once, as a crash would; `start_router` brings it back on the same port, knowing no worker."""
        assert self.router
        os.killpg(self.router.pid, signal.SIGKILL)
        self.router.wait(10)

    def close(self) -> None:
        for number in range(1, self.count + 1):
            end_processes_of(self.root(number))
        if self.router:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.router.pid, signal.SIGKILL)
            self.router.wait(10)
        if self.sshd:
            self.sshd.close()

    # -- what the playbook says ------------------------------------------------------------------------------------------

    def configure(
        self,
        *,
        candidate: dict[str, object] | None = None,
        deadline: float = 90.0,
        probes: float = 40.0,
        floor: int = 2,
        budget: int = 0,
        rate: float = 40.0,
        ready: float = 60.0,
        drain: float = 15.0,
        roll_back: bool = True,
        more: str = "",
        text: str = "",
    ) -> None:
        """Write and commit the playbook. `candidate`: faults of the candidate, as STANDIN_ variables without that prefix."""
        environment = json.dumps({f"STANDIN_{name}": str(value) for name, value in (candidate or {}).items()})
        judge = JUDGE.format(deadline=deadline, probes=probes)
        made = PLAYBOOK.format(
            hosts=self._hosts(),
            ready=ready,
            drain=drain,
            arm=ready + drain + 5,
            lease=self.lease,
            router=self.router_url,
            python=self.python,
            arguments=json.dumps(self.server_arguments),
            candidate=environment,
            floor=floor,
            budget=budget,
            rate=rate,
            judge=judge,
            roll_back=str(roll_back).lower(),
        )
        (self.repo / "playbook.yaml").write_text((text or made) + more)
        self._git("add", ".")
        self._git("commit", "-qm", "playbook", "--allow-empty")

    @property
    def repo(self) -> Path:
        return self.directory / "repo"

    @property
    def router_url(self) -> str:
        return f"http://127.0.0.1:{self.router_port}"

    @property
    def kernel(self) -> Any:
        from phases.harness import contract

        return contract.load(self.repo / "kernel.yaml")

    def root(self, number: int) -> Path:
        return self.directory / f"w{number}"

    def _hosts(self) -> str:
        rows = []
        for number, port in enumerate(self.ports, 1):
            row = f"    - {{name: w{number}, root: {self.root(number)}, port: {port}, python: {PYTHON}, "
            if number > self.count - self.ssh:
                assert self.sshd
                seen = self.sshd.host(0)
                login = f"{{user: {seen.ssh.user}, port: {seen.ssh.port}, key_files: [{seen.ssh.key_files[0]}], known_hosts: [{seen.ssh.known_hosts[0]}], agent: false, config_file: /dev/null}}"
                row += f"address: {seen.address}, ssh: {login}}}"
            else:
                row += "address: local}"
            rows.append(row)
        return "\n".join(rows)

    def fault(self, number: int, **faults: object) -> None:
        """Make one worker faulty (see `standin_worker.Faults`), or well again without any, by a restart of its service."""
        path = self.root(number) / "fault"
        path.write_text(json.dumps(faults)) if faults else path.unlink(missing_ok=True)
        if "only" in faults:
            return  # not what it runs now
        with self.production() as production:
            host = production.workers[number - 1]
            session = production.fleet.session(host)
            session.do(production.driver(host).restarting(host))
            if not faults:
                wait_ready(production.driver(host), session, int(host.values["port"]), timeout=90)
                production.put_in(host)

    # -- what is observed --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Back to all workers on the incumbent, whatever a test left; by the same means as a person has."""
        done = self.phase("rollback", "--yes", "--reason", "the next test wants a clean fleet")
        assert done.returncode == 0 and not self.not_converged(self.digests["incumbent"]), done.stdout

    def served_by(self) -> list[str]:
        """URLs in service as the router lists them."""
        listed = requests.get(f"{self.router_url}/workers", timeout=30).json()["workers"]
        return sorted(worker["url"] for worker in listed if worker["is_healthy"])

    @contextlib.contextmanager
    def users(self, rate: float = 20.0) -> Iterator[list[LoadSummary]]:
        """Other people's traffic through the router while the block runs; how it went for them is appended at the end."""
        summaries: list[LoadSummary] = []
        prompts: Sequence[Prompt] = [Prompt("user", "hello", 8)]
        with OpenLoopLoad(HttpSender(self.router_url, timeout=60.0), prompts, rate, max_in_flight=16, seed=1) as load:
            yield summaries
        summaries.append(load.summary())

    # -- pieces ----------------------------------------------------------------------------------------------------------------

    def start_router(self) -> None:
        launch, environment = router_command()
        argv = [
            *launch,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.router_port),
            "--prometheus-port",
            str(free_port()),
            "--worker-startup-check-interval",
            "1",
            "--health-check-interval-secs",
            "1",
            *self.router_arguments,
        ]
        log = open(self.directory / "router.log", "wb")  # noqa: SIM115
        self.router = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + 120
        while True:
            try:
                return requests.get(f"{self.router_url}/workers", timeout=2).raise_for_status()
            except requests.RequestException:
                assert self.router.poll() is None and time.monotonic() < until, (
                    self.directory / "router.log"
                ).read_text()[-2000:]
                time.sleep(0.2)

    def _git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.repo, check=True, capture_output=True)
