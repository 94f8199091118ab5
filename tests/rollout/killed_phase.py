"""`phase`, killed with SIGKILL at one boundary of its journal: `killed_phase.py EVENT STEP MOMENT ARGUMENT...`.

EVENT and STEP name a record (`step-finished` `bake`), MOMENT is before or after it is on disk. With `-` for EVENT nothing is killed.
"""

from __future__ import annotations

import functools
import os
import signal
import sys

from phases.cli import main
from phases.engine import session


def run(event: str, step: str, moment: str, arguments: list[str]) -> None:
    def on_record(when: str, record: object) -> None:
        if (when, record.event, record.step) == (moment, event, step):  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

    session.run_phase = functools.partial(session.run_phase, on_record=on_record)  # type: ignore[assignment]
    main.run_and_exit(main.cli, arguments)


if __name__ == "__main__":
    run(*sys.argv[1:4], sys.argv[4:])
