"""What a run, a rollback and the watch say, in words: the one place where messages are worded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from phases.base.clock import Clock, SystemClock
from phases.base.errors import Exit, PhaseError
from phases.ledger.repository import repository_of
from phases.notify.message import Event, Message, gate_event
from phases.notify.notifier import Notifier
from phases.notify.settings import NotifySettings
from phases.notify.targets import targets_of
from phases.playbook.schema import Playbook
from phases.run.steps import Facts

SHOWN_REASONS = 8

_ENDS = {
    Exit.PASSED: "passed",
    Exit.WAITING_FOR_REVIEW: "passed and waits for review",
    Exit.GATE_FAILED: "failed; production is untouched",
    Exit.INCONCLUSIVE: "is inconclusive and held",
    Exit.ROLLED_BACK: "failed and was rolled back, verified",
    Exit.ROLLBACK_INCOMPLETE: "failed, and the rollback is INCOMPLETE: a person is needed",
}


@dataclass
class Teller:
    """Words messages about one playbook and phase and hands them to the notifier. No method raises or waits."""

    notifier: Notifier
    playbook: str = ""
    kernel: str = ""
    phase: str = ""
    option: str = ""  # the -p that a command in a message needs
    clock: Clock = field(default_factory=SystemClock)

    def gate(self, verdict: str, code: Exit, checkpoint: Facts, reasons: Sequence[str]) -> None:
        """A run ended at its gate."""
        name, digest = str(checkpoint.get("name", "")), str(checkpoint.get("digest", ""))[:16]
        end = _ENDS.get(code, "ended with an operational error")
        self._tell(
            gate_event(code, verdict),
            f"{self.phase} of {self.kernel} {end}: {name} ({digest})",
            reasons,
            f"phase gate review {checkpoint.get('number', '')}",
            verdict=verdict,
            checkpoint=name,
            digest=digest,
            exit=int(code),
        )

    def stopped(self, step: str, fault: BaseException) -> None:
        """An error ended a run before its gate. What is no error of the toolkit's own is told by its kind only."""
        reason = str(fault) if isinstance(fault, PhaseError) else f"internal error {type(fault).__name__}"
        code = fault.exit_code if isinstance(fault, PhaseError) else Exit.OPERATIONAL
        self._tell(
            Event.RUN_STOPPED,
            f"{self.phase} of {self.kernel} stopped in step '{step}'",
            (reason,),
            f"phase run {self.phase} --resume",
            step=step,
            exit=int(code),
        )

    def rollback_started(self, reason: str) -> None:
        self._tell(Event.ROLLBACK_STARTED, f"rolling {self.kernel} back ({self.phase})", (reason,), "phase status")

    def rollback_ended(
        self, reason: str, moved: Sequence[str], left: dict[str, str], seconds: float, *, only_safe: bool = False
    ) -> None:
        """`only_safe`: a hot fallback made traffic safe and was not meant to restore."""
        if only_safe:
            headline = f"traffic of {self.kernel} is safe by hot fallback; {len(left)} workers are NOT restored yet: `phase rollback` does"
        elif left:
            headline = f"rollback of {self.kernel} is INCOMPLETE, a person is needed: {len(left)} workers not restored"
        else:
            headline = (
                f"rollback of {self.kernel} is done: {len(moved)} workers restored and verified in {seconds:.0f} s"
            )
        why = (reason, *(f"{name}: {text}" for name, text in left.items()))
        self._tell(
            Event.ROLLBACK_ENDED,
            headline,
            why,
            "phase status",
            workers=list(moved),
            not_restored=sorted(left),
            verified=not left,
            only_safe=only_safe,
            seconds=round(seconds, 1),
        )

    def regression(self, reason: str, *, rolls_back: bool) -> None:
        then = "it is rolled back now" if rolls_back else "the playbook only reports it"
        self._tell(
            Event.REGRESSION,
            f"regression of {self.kernel} in production; {then}",
            (reason,),
            "phase status",
            rolls_back=rolls_back,
        )

    def close(self) -> None:
        self.notifier.close()

    def __enter__(self) -> Teller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, event: Event, headline: str, reasons: Sequence[str], command: str, **fields: Any) -> None:
        try:
            shown = tuple(reasons[:SHOWN_REASONS]) + (
                (f"and {len(reasons) - SHOWN_REASONS} more",) if len(reasons) > SHOWN_REASONS else ()
            )
            command = f"{command}{self.option}" if command else ""
            self.notifier.send(
                Message(
                    event, self.playbook, self.kernel, self.phase, headline, self.clock.now(), shown, command, fields
                )
            )
        except Exception as fault:  # noqa: BLE001 - whatever is wrong here must not reach the rollback that speaks
            self.notifier.say(f"a notification could not be made: {type(fault).__name__}")


def silent() -> Teller:
    """Tells nobody."""
    return Teller(Notifier((), warn=lambda line: None))


def teller_of(playbook: Playbook, kernel: str, phase: str, warn: Callable[[str], None]) -> Teller:
    """The teller a playbook asks for; silent where it has no `notify` section. Targets that lack something are warned of at once."""
    settings: NotifySettings | None = playbook.sections.get("notify")
    if settings is None:
        return silent()
    targets = targets_of(settings, playbook.path.parent)
    for target in targets:
        try:
            target.ready()
        except PhaseError as fault:
            warn(f"{target.name} will not be told of anything: {fault.message}")
    return Teller(Notifier(targets, warn=warn, flush=settings.flush), playbook.name, kernel, phase, _option(playbook))


def test_message(playbook: Playbook, kernel: str, at: float) -> Message:
    """What `phase notify test` sends."""
    return Message(
        Event.TEST,
        playbook.name,
        kernel,
        "",
        f"this is a test of the notifications of playbook {playbook.name!r}; nothing has happened",
        at,
    )


def _option(playbook: Playbook) -> str:
    """-p with the playbook's path from the top of its repository, where the reader's clone has it too."""
    top = repository_of(playbook.path).resolve()
    path = playbook.path.relative_to(top).as_posix() if playbook.path.is_relative_to(top) else str(playbook.path)
    return "" if path in ("playbook.yaml", "playbooks/local.yaml") else f" -p {path}"
