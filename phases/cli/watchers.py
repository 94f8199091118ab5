"""What people see while a run works: a live list in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from phases.engine.runner import Interrupted, Watcher
from phases.engine.steps import Facts, Step
from phases.errors import Exit


def watcher(as_json: bool) -> Watcher:
    """The watcher for this process's output: live on a terminal, lines on stderr with --json, lines on stdout otherwise."""
    from phases.cli.common import is_terminal

    if as_json:
        return Lines(sys.stderr)
    return Live() if is_terminal() else Lines(sys.stdout)


class Lines:
    """One line for each thing that happens."""

    def __init__(self, out: Any) -> None:
        self.out, self.total = out, 0

    def _print(self, line: str) -> None:
        """Whoever read along may have gone (`| head`), or the log's disk be full; the run goes on without them."""
        with contextlib.suppress(OSError, ValueError):
            print(line, file=self.out, flush=True)

    def run_started(self, run_id: str, steps: Sequence[Step]) -> None:
        self.total = len(steps)
        self._print(f"run {run_id}: {len(steps)} steps")

    def step_started(self, step: Step, number: int) -> None:
        self._print(f"[{number}/{self.total}] {step.name}: {step.summary}")

    def step_progress(self, step: Step, line: str) -> None:
        self._print(f"      {line}")

    def step_finished(self, step: Step, facts: Facts, seconds: float, kept: bool) -> None:
        self._print("      already done" if kept else f"      done in {seconds:.1f} s")

    def step_failed(self, step: Step, fault: BaseException) -> None:
        self._print(f"      {step.name} {_end_of(fault)}")

    def run_finished(self, run_id: str, code: Exit) -> None:
        self._print(f"run {run_id} ended: {code.name.lower().replace('_', ' ')} (exit {int(code)})")


class Live:
    """Finished steps as lines, the running one with a spinner, its last message and the time it has taken."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False)
        self.status: Any = None
        self.total, self.label = 0, ""
        self.running = _Running("", "")

    def run_started(self, run_id: str, steps: Sequence[Step]) -> None:
        self.total = len(steps)
        self.console.print(f"[bold]{run_id}[/bold]  {len(steps)} steps")

    def step_started(self, step: Step, number: int) -> None:
        self.label = f"[{number}/{self.total}] {step.name}"
        self.running = _Running(self.label, step.summary)
        self.status = self.console.status(self.running)
        self.status.start()

    def step_progress(self, step: Step, line: str) -> None:
        self.running.message = line

    def step_finished(self, step: Step, facts: Facts, seconds: float, kept: bool) -> None:
        self._end("[green]✓[/green]", "already done" if kept else f"{seconds:.1f} s")

    def step_failed(self, step: Step, fault: BaseException) -> None:
        self._end("[red]✗[/red]", _end_of(fault))

    def run_finished(self, run_id: str, code: Exit) -> None:
        colour = "green" if code in (Exit.PASSED, Exit.WAITING_FOR_REVIEW) else "red"
        self.console.print(f"[bold]{run_id}[/bold]  [{colour}]{code.name.lower().replace('_', ' ')}[/{colour}] (exit {int(code)})")

    def _end(self, mark: str, text: str) -> None:
        from rich.markup import escape

        if self.status:
            self.status.stop()
            self.status = None
        self.console.print(f"{mark} {escape(self.label)}  [dim]{text}[/dim]")


class _Running:
    """The line of a running step, drawn anew with every turn of the spinner: its clock goes on while nothing is said."""

    def __init__(self, label: str, message: str) -> None:
        self.label, self.message, self.begun = label, message, time.monotonic()

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(f"{self.label} ({time.monotonic() - self.begun:.0f} s): {self.message}", no_wrap=True, overflow="ellipsis")


def _end_of(fault: BaseException) -> str:
    return "interrupted" if isinstance(fault, Interrupted) else "failed"
