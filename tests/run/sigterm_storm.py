"""SIGTERM at random moments of a whole `phase run`, each in a process of its own; no step may begin after the signal.

    python -m tests.run.sigterm_storm --shots 200 --seed 1

The phase is `plotting_phase`: real lock, journal, gate, page with plots, ledger; only the measuring is not. Every shot must
end by itself, leave no traceback, and a run that it cut off must resume to one verified checkpoint. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from phases.ledger.verify import verify_ledger
from phases.run.closing import ledger_of
from tests.run.conftest import Repository

PROGRAM = """
import dataclasses, sys
script = sys.argv.pop(1)
from phases.playbook import phase_kinds
kind = phase_kinds.PHASES["build-parity"]
phase_kinds.PHASES["build-parity"] = dataclasses.replace(kind, script=script)
from phases.cli.main import main
main()
"""
ROOT = Path(__file__).parents[2]
GRACE = 0.1  # seconds between sending the signal and Python running its handler, while another step may still begin
PATIENCE = 250.0  # seconds a shot may take to end, on a busy machine


@dataclass(frozen=True)
class Shot:
    """One signal and what came of it."""

    delay: float
    code: int
    step: str  # that was running when the signal was sent
    fault: str  # empty when all is well


def start(directory: Path, *arguments: str, phase: str = "plotting_phase") -> subprocess.Popen[str]:
    """`phase run build-parity`, with a phase of `light_phase` in the place of the real one."""
    command = [sys.executable, "-c", PROGRAM, f"tests.run.light_phase:{phase}", "run", "build-parity", *arguments]
    return subprocess.Popen(
        command, cwd=directory, env=_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def shoot(directory: Path, delay: float) -> Shot:
    """Run in `directory`, send SIGTERM after so many seconds, and look at what is left."""
    process = start(directory)
    try:
        process.wait(timeout=delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    sent = time.time()  # read when it has been sent: a busy machine may let this process wait in between
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Shot(delay, -9, "?", "did not end")
    records = journal(directory)
    running = next(
        (row["data"]["step"] for row in reversed(records) if row["event"] == "step-started" and row["at"] <= sent), ""
    )
    return Shot(delay, process.returncode, running, _fault(process.returncode, err, sent, records))


def _fault(code: int, err: str, sent: float, records: list[dict]) -> str:
    if "Traceback" in err:
        return f"a traceback: {err[-2000:]}"
    if code not in (1, 3, -signal.SIGTERM):
        return f"exit {code}: {err[-500:]}"
    late = [row["data"]["step"] for row in records if row["event"] == "step-started" and row["at"] > sent + GRACE]
    return f"the signal was lost: {', '.join(late)} began after it\n{err[-2000:]}" if late else ""


def journal(directory: Path) -> list[dict]:
    """Records of the newest attempt; a torn last line is left out."""
    found = sorted((directory / ".phase" / "runs").glob("*/journal.jsonl"))
    rows = []
    for line in found[-1].read_text().splitlines() if found else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def resumes(repository: Repository) -> str:
    """Why the run does not end in one verified checkpoint when given again, or ""."""
    started = list((repository.path / ".phase" / "runs").glob("*/run.json"))
    process = start(repository.path, *(["--resume"] if started else []))
    _, err = process.communicate(timeout=PATIENCE)
    ledger = ledger_of(repository.playbook)
    if process.returncode != 3 or len(ledger.checkpoints()) != 1 or verify_ledger(ledger):
        return f"exit {process.returncode} on resume, {len(ledger.checkpoints())} checkpoints: {err[-500:]}"
    return ""


def storm(shots: int, seed: int, folder: Path, *, resume_every: int = 10, say=lambda line: None) -> list[Shot]:
    """So many shots at times spread evenly over the run's own length."""
    chooser, found = random.Random(seed), []
    template = Repository(folder / "template")
    begun = time.monotonic()
    whole = shutil.copytree(template.path, folder / "whole")
    start(whole).communicate(timeout=PATIENCE)
    length = time.monotonic() - begun
    say(f"an undisturbed run takes {length:.2f} s")
    for number in range(shots):
        repository = object.__new__(Repository)
        repository.path = shutil.copytree(template.path, folder / f"shot-{number}")
        shot = shoot(repository.path, chooser.uniform(0.0, length))
        if not shot.fault and number % resume_every == 0:
            shot = Shot(shot.delay, shot.code, shot.step, resumes(repository))
        found.append(shot)
        if shot.fault:
            say(f"shot {number} after {shot.delay:.3f} s in {shot.step or 'no step'}: {shot.fault}")
        shutil.rmtree(repository.path)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shots", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = storm(options.shots, options.seed, Path(folder), say=print)
    for (step, code), count in sorted(Counter((shot.step, shot.code) for shot in found).items()):
        print(f"{count:5}  exit {code:3}  {step or '(no step)'}")
    faults = sum(bool(shot.fault) for shot in found)
    print(f"{len(found)} shots, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
