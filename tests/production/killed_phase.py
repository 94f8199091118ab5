"""`phase`, killed with SIGKILL at one boundary of its journal: `killed_phase.py EVENT STEP MOMENT ARGUMENT...`.

EVENT and STEP name a record (`step-finished` `bake`), MOMENT is before or after it is on disk; EVENT `decided` is the moment a verdict
is on disk and not acted on yet (STEP: `judged`, `going-back`). With `-` for EVENT nothing is killed.
AT_BOUNDARY=SIGSTOP suspends it there instead: a laptop that is closed, a machine that is paused.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path

from phases.base.results import Results
from phases.cli import main
from phases.full_rollout import steps as waves
from phases.production import decided
from phases.run import session
from phases.tp8_canary import steps as canary


def run(event: str, step: str, moment: str, arguments: list[str]) -> None:
    def on_record(when: str, record: object) -> None:
        if (when, record.event, record.step) == (moment, event, step):  # type: ignore[attr-defined]
            os.kill(os.getpid(), getattr(signal, os.environ.get("AT_BOUNDARY", "SIGKILL")))

    if event == "decided":
        for module in (canary, waves):
            module.decide = functools.partial(_decide_and_die, step)  # type: ignore[assignment]
    session.run_phase = functools.partial(session.run_phase, on_record=on_record)  # type: ignore[assignment]
    main.run_and_exit(main.cli, arguments)


def _decide_and_die(step: str, work: Path, what: str, results: Results) -> Results:
    decided.decide(work, what, results)
    if what == step:
        os.kill(os.getpid(), signal.SIGKILL)
    return results


if __name__ == "__main__":
    run(*sys.argv[1:4], sys.argv[4:])
