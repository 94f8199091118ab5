"""What people see while a run works: a live list in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from phases.base.clock import age
from phases.base.errors import Exit
from phases.cli.common import harmless, is_terminal
from phases.cli.live_view import RunningStep
from phases.run.expected import left
from phases.run.runner import Interrupted, Watcher
from phases.run.steps import Facts, Step

# A step that takes longer says where it is after so many seconds, and so often again.
FIRST_WORD, NEXT_WORD = 15.0, 60.0
# Lines that are never left out: a verdict that does not pass, a machine that spoils timings.
_LOUD = ("FAIL", "INCONCLUSIVE", "ERROR", "ABORTED", "BUSY", "undecided")


def watcher(
    as_json: bool, approves: bool = False, *, verbose: bool = False, expected: Mapping[str, float] | None = None
) -> Watcher:
    """The watcher for this process's output: live on a terminal, a line a step elsewhere; on stderr with --json.

    Args:
        approves: --yes approves what passes, so that nobody is waited for.
        verbose: every line of every step, also on a terminal.
        expected: seconds by step name, as `phases.run.expected` gives them.
    """
    out = sys.stderr if as_json else sys.stdout
    if verbose:
        return Lines(out, approves)
    return Live(approves, expected) if is_terminal() and not as_json else Brief(out, approves, expected)


@contextlib.contextmanager
def _to_whoever_looks() -> Iterator[None]:
    """The terminal may be gone while the run goes on (started with nohup, or its ssh connection broke): what was to be seen is lost then."""
    try:
        yield
    except (OSError, ValueError, SystemExit):  # SystemExit is how rich answers a broken pipe
        pass


class Lines:
    """One line for each thing that happens."""

    def __init__(self, out: Any, approves: bool = False) -> None:
        self.out, self.approves, self.total = out, approves, 0

    def _print(self, line: str) -> None:
        """Whoever read along may have gone (`| head`), or the log's disk be full; the run goes on without them."""
        with contextlib.suppress(OSError, ValueError):
            print(harmless(line), file=self.out, flush=True)

    def run_started(self, run_id: str, steps: Sequence[Step]) -> None:
        self.total = len(steps)
        self._print(f"run {run_id}: {len(steps)} steps")

    def step_started(self, step: Step, number: int) -> None:
        self._print(f"[{number}/{self.total}] {step.name}: {step.summary}")

    def step_progress(self, step: Step, line: str) -> None:
        self._print(f"      {line}")

    def step_look(self, step: Step, facts: Facts) -> None:
        """Its line was said as progress already."""

    def step_finished(self, step: Step, facts: Facts, seconds: float, kept: bool) -> None:
        self._print("      already done" if kept else f"      done in {seconds:.1f} s")

    def step_failed(self, step: Step, fault: BaseException) -> None:
        self._print(f"      {step.name} {_end_of(fault)}")

    def run_finished(self, run_id: str, code: Exit) -> None:
        self._print(f"run {run_id} ended: {_how(code, self.approves)}")


class Brief(Lines):
    """One line a step, for a log: what it said last and how long it took; a long one also says where it is."""

    def __init__(
        self,
        out: Any,
        approves: bool = False,
        expected: Mapping[str, float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(out, approves)
        self.expected, self.monotonic = expected or {}, monotonic
        self.steps: Sequence[Step] = ()
        self.number, self.said, self.begun, self.due = 0, "", 0.0, 0.0

    def run_started(self, run_id: str, steps: Sequence[Step]) -> None:
        self.total, self.steps = len(steps), steps
        self._print(f"run {run_id}: {len(steps)} steps{_about(left(self.expected, steps), ' as the last one here')}")

    def step_started(self, step: Step, number: int) -> None:
        self.number, self.said, self.begun = number, "", self.monotonic()
        self.due = self.begun + FIRST_WORD

    def step_progress(self, step: Step, line: str) -> None:
        if line.startswith(_LOUD):
            self._print(f"      {line}")
            return
        self.said, now = line, self.monotonic()
        if now >= self.due:
            rest = _about(left(self.expected, self.steps[self.number :]), " after this step")
            self._print(f"[{self.number}/{self.total}] {step.name}, {now - self.begun:.0f} s{rest}: {line}")
            self.due = now + NEXT_WORD

    def step_finished(self, step: Step, facts: Facts, seconds: float, kept: bool) -> None:
        rest = _about(left(self.expected, self.steps[self.number :]), " left")
        took = "already done" if kept else f"{seconds:.1f} s"
        self._print(f"[{self.number}/{self.total}] {step.name}: {self.said or step.summary} ({took}{rest})")

    def step_failed(self, step: Step, fault: BaseException) -> None:
        self._print(f"[{self.number}/{self.total}] {step.name} {_end_of(fault)}{f': {self.said}' if self.said else ''}")


class Live:
    """Finished steps as lines; below them the running one with its clock, last messages and, while a canary bakes, its intervals."""

    def __init__(self, approves: bool = False, expected: Mapping[str, float] | None = None) -> None:
        from rich.console import Console

        self.approves, self.expected = approves, expected or {}
        self.console = Console(highlight=False)
        self.display: Any = None
        self.total, self.label = 0, ""
        self.running: RunningStep | None = None

    @_to_whoever_looks()
    def run_started(self, run_id: str, steps: Sequence[Step]) -> None:
        self.total = len(steps)
        about = _about(left(self.expected, steps), " as the last one here")
        self.console.print(f"[bold]{run_id}[/bold]  {len(steps)} steps{about}")

    @_to_whoever_looks()
    def step_started(self, step: Step, number: int) -> None:
        from rich.live import Live as Display

        self.label = f"[{number}/{self.total}] {step.name}"
        self.running = RunningStep(self.label, step.summary, self.expected.get(step.name))
        self.display = Display(self.running, console=self.console, transient=True, refresh_per_second=8)
        self.display.start()

    def step_progress(self, step: Step, line: str) -> None:
        if self.running:
            self.running.say(line)

    def step_look(self, step: Step, facts: Facts) -> None:
        if self.running:
            self.running.look = facts

    @_to_whoever_looks()
    def step_finished(self, step: Step, facts: Facts, seconds: float, kept: bool) -> None:
        self._end("[green]✓[/green]", "already done" if kept else f"{seconds:.1f} s", self._last_word())

    @_to_whoever_looks()
    def step_failed(self, step: Step, fault: BaseException) -> None:
        self._end("[red]✗[/red]", _end_of(fault), "")

    @_to_whoever_looks()
    def run_finished(self, run_id: str, code: Exit) -> None:
        colour = "green" if code in (Exit.PASSED, Exit.WAITING_FOR_REVIEW) else "red"
        self.console.print(f"[bold]{run_id}[/bold]  [{colour}]{_how(code, self.approves)}[/{colour}]")

    def _last_word(self) -> str:
        """What a step said last, where that is more than its summary."""
        lines = list(self.running.lines) if self.running else []
        return lines[-1] if len(lines) > 1 else ""

    def _end(self, mark: str, text: str, said: str) -> None:
        from rich.table import Table
        from rich.text import Text

        if self.display:
            self.display.stop()
            self.display = None
        line = Text(self.label)
        line.append(f"  {text}", style="dim")
        line.append(f"  {' '.join(said.split())}" if said else "", style="dim")
        row = Table.grid(
            padding=(0, 1, 0, 0)
        )  # what does not fit goes on below, indented: a verdict's reason is never cut
        row.add_row(Text.from_markup(mark), line)
        self.console.print(row)


def _about(seconds: float | None, what: str) -> str:
    return "" if seconds is None else f", about {age(seconds)}{what}"


def _how(code: Exit, approves: bool) -> str:
    """How a run ended, and its exit code unless --yes is about to make it another one."""
    if code is Exit.WAITING_FOR_REVIEW and approves:
        return "passed; --yes approves it"
    return f"{code.name.lower().replace('_', ' ')} (exit {int(code)})"


def _end_of(fault: BaseException) -> str:
    return "interrupted" if isinstance(fault, Interrupted) else "failed"
