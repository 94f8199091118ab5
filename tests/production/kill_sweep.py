"""kill -9 of `phase` at journal boundaries of the production phases, and what is left: shared by the test and the benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from phases.base.clock import SystemClock
from phases.engines.ssh.locks import show_lock
from phases.fleet.live import open_production
from phases.fleet.shared_steps import FLEET, LEAVE, PUSH, REPORT
from phases.full_rollout import steps as waves
from phases.playbook import loader
from phases.playbook.schema import Playbook
from phases.production.production import Production, WorkerState
from phases.run.closing import JUDGE, RECORD
from phases.run.session import adhoc_run
from phases.tp8_canary import steps as canary

HERE = Path(__file__).parent
TOP = HERE.parents[1]

Boundary = tuple[str, str, str]  # event, step, moment
NEVER: Boundary = ("-", "-", "-")

STEPS = {
    "tp8-canary": (FLEET, PUSH, canary.CONTROL, canary.CANARY, canary.BAKE, canary.END, REPORT, LEAVE, JUDGE, RECORD),
    "full-rollout": (
        FLEET,
        PUSH,
        waves.wave_name(1),
        waves.wave_name(2),
        waves.SOAK,
        waves.FINISH,
        REPORT,
        LEAVE,
        JUDGE,
        RECORD,
    ),
}


QUIET = (FLEET, PUSH, REPORT, LEAVE, JUDGE)


class Driven:
    """A repository with a playbook, `phase` on it, and what is observed of its fleet."""

    repo: Path

    @property
    def playbook(self) -> Playbook:
        return loader.load(self.repo / "playbook.yaml")

    def phase(
        self, *arguments: str, kill: Boundary = NEVER, timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """`phase ARGUMENT...` in a process of its own, killed at a boundary (event, step, moment) if one is given."""
        with self.start(*arguments, kill=kill) as process:
            try:
                out, _ = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, "")

    def start(self, *arguments: str, kill: Boundary = NEVER, how: str = "SIGKILL") -> subprocess.Popen[str]:
        """As `phase`, without waiting. `how`: the signal at the boundary."""
        argv = [sys.executable, str(HERE / "killed_phase.py"), *kill, *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (TOP, TOP / "kernels" / "verify_attn"))),
            "PHASE_PLAYBOOK": str(self.repo / "playbook.yaml"),
            "AT_BOUNDARY": how,
        }
        return subprocess.Popen(
            argv,
            cwd=self.repo,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    @contextlib.contextmanager
    def suspended(self, *arguments: str, at: Boundary, timeout: float = 300.0) -> Iterator[subprocess.Popen[str]]:
        """`phase ARGUMENT...`, suspended at a boundary while the block runs; afterwards it goes on to its end."""
        process = self.start(*arguments, kill=at, how="SIGSTOP")
        try:
            until = time.monotonic() + timeout
            while (state := Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
                assert process.poll() is None and state != "Z", process.communicate()[0]
                assert time.monotonic() < until, f"it never came to {at}"
                time.sleep(0.05)
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            try:
                process.said = process.communicate(timeout=timeout)[0]  # type: ignore[attr-defined]
            except BaseException:
                process.kill()
                raise

    @contextlib.contextmanager
    def production(self) -> Iterator[Production]:
        """Production as this process sees it; it takes no lock, so that looking disturbs nobody."""
        clock = SystemClock()
        with open_production(adhoc_run(self.playbook, "test", clock), "test", clock, lambda line: None) as production:
            yield production

    def states(self) -> list[WorkerState]:
        with self.production() as production:
            return production.observe()

    def mixed(self) -> list[str]:
        """Workers whose ranks do not all report the release that is current on their host."""
        with self.production() as production:
            return [
                reason
                for state in production.observe()
                if state.serving and (reason := production.mixed(state.host, state.current))
            ]

    def not_converged(self, digest: str) -> list[str]:
        """What keeps the whole fleet from being on one release, recorded as good, in service, with no lease, no lock and no lost rank."""
        found = []
        with self.production() as production:
            for state in production.observe():
                name = state.host.name
                if state.error or not (state.serving and state.in_service):
                    found.append(f"{name}: {state.error or 'not serving in service'}")
                if (state.current, state.last_good) != (digest, digest):
                    found.append(f"{name} runs {state.current[:8]}, last good {state.last_good[:8]}, not {digest[:8]}")
                if state.lease and state.lease.active:
                    found.append(f"{name} has a lease, {state.lease.state}")
                if not state.error and (reason := production.mixed(state.host, digest)):
                    found.append(reason)
                if not state.error and (held := show_lock(production.fleet.session(state.host))):
                    found.append(f"{name} is locked by {held.owner} ({held.purpose})")
        return found


def boundaries(phase: str, *, every: bool) -> list[Boundary]:
    """Where to kill, in the order in which a run comes by.

    Around each record there are two instants, before and after it is on disk. What lies between the end of one step and the
    beginning of the next is one state in three instants; without `every` it is taken once, and of steps that change nothing out
    there only the end of their work.
    """
    found: list[Boundary] = [("run-started", "", "after")] if every else []
    for step in STEPS[phase]:
        if every:
            found += [("step-started", step, "before"), ("step-started", step, "after")]
        found.append(("step-finished", step, "before"))
        if every or step not in QUIET:
            found.append(("step-finished", step, "after"))
    return found + (
        [("run-finished", "", "before"), ("run-finished", "", "after")] if every else [("run-finished", "", "before")]
    )


def chain(
    fleet: Driven, phase: str, where: Sequence[Boundary], killed: Callable[[Boundary], None], *, timeout: float = 300.0
) -> Any:
    """One run, killed at each boundary in turn and resumed from there; `killed` looks at what is left each time.

    Returns the process that brought the run to its end. A boundary the run never came to is an AssertionError.
    """
    arguments = ["run", phase, "--yes"]
    for boundary in where:
        done = fleet.phase(*arguments, kill=boundary, timeout=timeout)
        assert done.returncode == -signal.SIGKILL, f"not killed at {boundary}: exit {done.returncode}\n{done.stdout}"
        if "--resume" not in arguments:
            arguments.append("--resume")
        killed(boundary)
    return fleet.phase(*arguments, timeout=timeout)
