"""kill -9 or suspension of `phase` at the boundaries of its journal: what is left, and whether `--resume`, `phase rollback` or the lease bring
it to one release.

    python tests/benchmarks/bench_kill_sweep.py                          stand-in workers, every instant of both phases, resumed
    python tests/benchmarks/bench_kill_sweep.py --then rollback          the same, rolled back by hand after each kill
    python tests/benchmarks/bench_kill_sweep.py --fleet embedded --few --steps switch,bake --phases tp8-canary --then resume,lease
                                                                         real SGLang workers (two, on this machine's CPU), some instants;
                                                                         then the toolkit dead for good: the host brings the canary back
    python tests/benchmarks/bench_kill_sweep.py --few --then asleep,overslept
                                                                         suspended at each instant; a rollback by hand, or the end of all
                                                                         leases, happens meanwhile; then it wakes up and goes on
    python tests/benchmarks/bench_kill_sweep.py --few --then broken      killed at each instant, rolled back while the incumbent cannot start:
                                                                         the floor is kept and a person called, or all are on one release

Other people's requests run through the router all the while and are counted. Needs git and sshd; for the embedded fleet the serving
environment (`phase doctor`), about 5 GB of memory and ten minutes of two cores for a handful of instants.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from phases.run.closing import ledger_of  # noqa: E402
from phases.ledger.checkpoint import RESULTS  # noqa: E402
from phases.tp8_canary import steps as canary  # noqa: E402
from phases.serving.load import HttpSender, OpenLoopLoad, Prompt, RequestRecord  # noqa: E402
from tests.production.kill_sweep import Boundary, Driven, boundaries, chain  # noqa: E402

TOP = Path(__file__).parents[2]
PLAYBOOK = f"""\
schema: phasegate/playbook/v1
name: sweep
kernel: {TOP}/kernels/verify_attn/kernel.yaml
embedded_fleet: {{workers: [{{count: 2}}], lease: 60}}
production:
  incumbent: {{backend: verify_attn_torch}}
  candidate: {{backend: verify_attn}}
  min_available: {{count: 1}}
  warm_up: {{requests: 2, agree: 2.0, sweeps: 4}}
  agreement: {{prompts: 1, tokens: 4, every: 0}}
phases:
  tp8-canary:
    review: none
    allow_yes: true
    share_tolerance: 1
    judge: &judge {{metrics: [{{metric: e2e, quantile: 0.5, margin: 4}}], alpha: 0.2, probes: 3, window: 3, bake: 6, deadline: 240, min_samples: 10, error_tolerance: 0.5}}
  full-rollout:
    review: none
    allow_yes: true
    waves: [{{count: 1}}, {{percent: 100}}]
    soak: 3
    judge: *judge
"""


class EmbeddedFleet(Driven):
    """Two real SGLang workers and sglang-router, in a repository of their own."""

    def __init__(self, directory: Path) -> None:
        self.repo, self.digests = directory / "repo", {"incumbent": "", "candidate": ""}

    def up(self) -> EmbeddedFleet:
        """Bring the fleet up by a run that is killed as soon as it has looked at it."""
        self.repo.mkdir()
        (self.repo / "playbook.yaml").write_text(PLAYBOOK)
        for argv in (["init", "-q"], ["config", "user.name", "Bench"], ["config", "user.email", "bench@example.org"], ["add", "-A"], ["commit", "-qm", "playbook"]):
            subprocess.run(["git", "-C", str(self.repo), *argv], check=True)
        done = self.phase("run", "tp8-canary", "--yes", kill=("step-finished", "look at the fleet", "after"), timeout=900.0)
        assert done.returncode == -9, done.stdout
        journal = next((self.repo / ".phase" / "runs").glob("*/journal.jsonl"))
        found = [row["data"]["facts"]["digests"] for row in map(json.loads, journal.read_text().splitlines()) if "digests" in row["data"].get("facts", {})]
        assert found, done.stdout
        self.digests = found[-1]
        return self

    @property
    def router_url(self) -> str:
        with self.production() as production:
            return str(getattr(production.router, "url", ""))

    def close(self) -> None:
        self.phase("fleet", "down", "--purge", timeout=300.0)


@contextmanager
def users(url: str, rate: float) -> Iterator[Callable[[], str]]:
    """Other people's traffic; the result says how it went so far. What fails is printed when it does, between the lines of the sweep."""

    def told(record: RequestRecord) -> None:
        if not record.ok:
            at = datetime.fromtimestamp(record.finished, UTC).strftime("%H:%M:%S.%f")[:-3]
            print(f"    a user's request failed at {at}, sent {record.finished - record.sent:.2f} s before: {record.status} {record.error}", flush=True)

    with OpenLoopLoad(HttpSender(url, timeout=60.0), [Prompt("user", "hello", 8)], rate, max_in_flight=16, seed=1, on_record=told) as load:
        yield lambda: f"{load.summary().failed} of {load.summary().sent} requests failed"


def sweep(fleet: Driven, digests: dict[str, str], phase: str, where: Sequence[Boundary], then: str, timeout: float) -> bool:
    """One phase, killed at each boundary; prints a line each and returns whether all ended as they must."""
    goal = digests["candidate" if phase == "full-rollout" else "incumbent"]
    print(f"{phase}: killed at {len(where)} instants, then {'--resume' if then == 'resume' else 'phase ' + then}", flush=True)
    well = True

    def seen(boundary: Boundary) -> None:
        nonlocal well
        mixed = fleet.mixed()
        runs = ", ".join(f"{s.host.name} {_side(s.current, digests)}{' (lease)' if s.lease and s.lease.active else ''}" for s in fleet.states())
        well &= not mixed
        print(f"  {boundary[0]:14} {boundary[1]:22} {boundary[2]:6}  {runs}{'  MIXED: ' + '; '.join(mixed) if mixed else ''}", flush=True)

    if then == "resume":
        begun = time.monotonic()
        done = chain(fleet, phase, where, seen, timeout=timeout)
        back = done.returncode == 7  # a lease may run out between a kill and what follows it: then the run goes back, and says so
        left = fleet.not_converged(digests["incumbent"] if back else goal)
        ended = f"all on the {'incumbent' if back or goal == digests['incumbent'] else 'candidate'}" if not left else str(left)
        print(f"  ended with exit {done.returncode} after {time.monotonic() - begun:.0f} s: {ended}", flush=True)
        if back:
            print(f"    it went back: {_why(fleet, phase)}", flush=True)
        return well and done.returncode in (0, 7) and not left
    for boundary in where:
        killed = fleet.phase("run", phase, "--yes", kill=boundary, timeout=timeout)
        assert killed.returncode == -9, killed.stdout
        seen(boundary)
        begun = time.monotonic()
        back = fleet.phase("rollback", "--yes", timeout=timeout)
        left = fleet.not_converged(digests["incumbent"])
        both = left and fleet.not_converged(digests["candidate"])  # once it is last-good everywhere, and not recorded, staying is right
        print(f"    rolled back in {time.monotonic() - begun:.1f} s, exit {back.returncode}: {'all on one release' if not (left and both) else left}", flush=True)
        well &= back.returncode == 0 and not (left and both)
        if left and not both:
            return well  # the candidate is production now; there is nothing left to roll out
    return well


def asleep(fleet: Driven, digests: dict[str, str], phase: str, where: Sequence[Boundary], then: str, timeout: float) -> bool:
    """A run suspended at each boundary, and what happened while it slept: a rollback by hand (`asleep`), or its leases ran out (`overslept`).

    It must end on one release that is last-good everywhere, and the ledger's last word must be what is observed.
    """
    print(f"{phase}: suspended at {len(where)} instants; meanwhile {'a rollback by hand' if then == 'asleep' else 'its leases run out'}", flush=True)
    well, ends = True, Counter[int]()
    for boundary in where:
        with fleet.suspended("run", phase, "--yes", at=boundary, timeout=timeout) as process:
            if then == "asleep":
                back = fleet.phase("rollback", "--yes", timeout=timeout)
                assert back.returncode == 0, back.stdout
            else:
                until = time.monotonic() + timeout
                while any(s.lease and s.lease.active for s in fleet.states()) and time.monotonic() < until:
                    time.sleep(0.5)
        ends[process.returncode] += 1
        side, left = _settled(fleet, digests)
        word = _last_word(fleet)
        agrees = word == side
        print(f"  {boundary[0]:14} {boundary[1]:22} {boundary[2]:6}  exit {process.returncode}, all on the {side}, the ledger says {word}{'' if not left else f'  {left}'}{'' if agrees else '  DISAGREES'}", flush=True)
        well &= not left and agrees and process.returncode in (0, 7)
        if side == "candidate":  # so that the next one has something to roll out again
            back = fleet.phase("rollback", "--yes", timeout=timeout)
            well &= back.returncode == 0 and not fleet.not_converged(digests["incumbent"])
    print(f"  {sum(ends.values())} states; exit codes: {', '.join(f'{code} {count} times' for code, count in sorted(ends.items()))}", flush=True)
    return well


def broken(fleet: Driven, digests: dict[str, str], phase: str, where: Sequence[Boundary], timeout: float) -> bool:
    """A run killed at each boundary and rolled back while the incumbent cannot start anywhere: the floor, and a person called."""
    print(f"{phase}: killed at {len(where)} instants, rolled back while the incumbent does not start", flush=True)
    well, codes = True, Counter[int]()
    with fleet.production() as production:
        floor = production.settings.min_available.of(len(production.workers))
    for boundary in where:
        killed = fleet.phase("run", phase, "--yes", kill=boundary, timeout=timeout)
        assert killed.returncode == -9, killed.stdout
        with _faulty_incumbent(fleet):
            back = fleet.phase("rollback", "--yes", timeout=timeout)
            serving = sum(s.serving and s.in_service for s in fleet.states())
            codes[back.returncode] += 1
        held = serving >= floor and (back.returncode == 8 or not fleet.not_converged(digests["incumbent"]))
        mended = fleet.phase("rollback", "--yes", "--below-floor", timeout=timeout)
        left = fleet.not_converged(digests["incumbent"])
        both = left and fleet.not_converged(digests["candidate"])
        print(f"  {boundary[0]:14} {boundary[1]:22} {boundary[2]:6}  exit {back.returncode}, {serving} in service (floor {floor}); mended: exit {mended.returncode}{'' if not both else f'  {left}'}", flush=True)
        well &= held and mended.returncode == 0 and not both
        if left and not both:
            break  # the candidate is production now; there is nothing left to roll out
    print(f"  {sum(codes.values())} states; exit codes: {', '.join(f'{code} {count} times' for code, count in sorted(codes.items()))}", flush=True)
    return well


@contextmanager
def _faulty_incumbent(fleet: Driven) -> Iterator[None]:
    """Stand-in workers whose incumbent crashes as it starts, while the block runs."""
    numbers = range(1, fleet.count + 1)  # type: ignore[attr-defined]
    for number in numbers:
        fleet.fault(number, only="light_incumbent", CRASH=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for number in numbers:
            fleet.root(number).joinpath("fault").unlink(missing_ok=True)  # type: ignore[attr-defined]


def _settled(fleet: Driven, digests: dict[str, str]) -> tuple[str, list[str]]:
    """Which side the whole fleet is on, and what keeps it from being so."""
    left = {side: fleet.not_converged(digest) for side, digest in digests.items()}
    side = min(left, key=lambda name: len(left[name]))
    return side, left[side]


def _last_word(fleet: Driven) -> str:
    """Where production is by the ledger's last checkpoint that changed it."""
    for checkpoint in reversed(ledger_of(fleet.playbook).checkpoints()):
        if checkpoint.phase == "full-rollout" and checkpoint.verdict.advances:
            return "candidate"
        if checkpoint.phase in ("rollback", "tp8-canary", "full-rollout"):
            return "incumbent"
    return "incumbent"


def lease(fleet: Driven, digests: dict[str, str], timeout: float) -> bool:
    """The toolkit dies while its canary serves and never comes back."""
    fleet.phase("run", "tp8-canary", "--yes", kill=("step-finished", canary.CANARY, "after"), timeout=timeout)
    begun = time.monotonic()
    moved = [s.host.name for s in fleet.states() if s.current == digests["candidate"]]
    while left := fleet.not_converged(digests["incumbent"]):
        if time.monotonic() - begun > timeout:
            print(f"  still not back: {left}")
            return False
        time.sleep(0.5)
    print(f"lease: {', '.join(moved)} back on the incumbent, serving and in service, {time.monotonic() - begun:.1f} s after phase was killed for good", flush=True)
    return bool(moved)


def _why(fleet: Driven, phase: str) -> str:
    """Why the latest run of a phase went back, as its checkpoint says."""
    ledger = ledger_of(fleet.playbook)
    latest = [checkpoint for checkpoint in ledger.checkpoints() if checkpoint.phase == phase][-1]
    facts = json.loads(ledger.files(latest)[RESULTS])["facts"]
    return str(facts.get("stopped") or facts.get("bake", {}).get("reason"))


def _side(digest: str, digests: dict[str, str]) -> str:
    return next((side for side, known in digests.items() if known == digest), digest[:8])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", choices=("light", "embedded"), default="light")
    parser.add_argument("--phases", default="tp8-canary,full-rollout", help="which, in this order")
    parser.add_argument("--then", default="resume", help="resume, rollback, lease, asleep, overslept or broken; several after one another, a comma between")
    parser.add_argument("--few", action="store_true", help="not every instant, but each state once: the end of a step, before and after it is on disk")
    parser.add_argument("--steps", default="", help="only boundaries of steps whose names hold one of these words, after a comma each")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the fleet is brought down all the same
    words = [word for word in options.steps.split(",") if word]
    with tempfile.TemporaryDirectory(prefix="kill-sweep-") as directory:
        if options.fleet == "light":
            from tests.production.light_fleet import LightFleet

            fleet: Driven = LightFleet(Path(directory) / "light", lease=8.0 if "overslept" in options.then else 90.0)
        else:
            fleet = EmbeddedFleet(Path(directory))
        try:
            fleet.up()  # type: ignore[attr-defined]
            return run(fleet, options, words)
        finally:
            fleet.close()  # type: ignore[attr-defined]


def run(fleet: Driven, options: argparse.Namespace, words: Sequence[str]) -> int:
    digests, timeout = fleet.digests, 120.0 if options.fleet == "light" else 600.0  # type: ignore[attr-defined]
    well = True
    with users(fleet.router_url, 20.0 if options.fleet == "light" else 2.0) as went:  # type: ignore[attr-defined]
        for then in options.then.split(","):
            if then == "lease":
                well &= lease(fleet, digests, timeout)
                continue
            for phase in options.phases.split(","):
                if then in ("asleep", "overslept", "broken") and phase == "full-rollout":
                    opened = fleet.phase("run", "tp8-canary", "--yes", timeout=timeout)
                    assert opened.returncode == 0, opened.stdout
                where = [b for b in boundaries(phase, every=not options.few) if not words or any(word in b[1] for word in words)]
                if then in ("asleep", "overslept"):
                    well &= asleep(fleet, digests, phase, where, then, timeout)
                elif then == "broken":
                    well &= broken(fleet, digests, phase, where, timeout)
                else:
                    well &= sweep(fleet, digests, phase, where, then, timeout)
        print(f"users: {went()}")
    print("converged, nothing mixed" if well else "NOT CONVERGED")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
