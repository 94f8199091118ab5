"""Delivery: a thread for each target, so that one that hangs keeps neither the others nor production waiting.

`send` only puts a message into queues. It returns at once and raises nothing, whatever state the targets are in: a rollback must not
wait for a chat server. `close` gives what is under way a bounded time and then lets go.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phases.notify.message import Event, Message
from phases.notify.targets import THREADS, DeliveryError, Target

QUEUE = 64  # messages a target that does not answer may owe; later ones are dropped
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between attempts: 1, 2, 4 … 30
QUIET_SECONDS = 1.0  # waiting longer than this at the end is said


@dataclass(frozen=True)
class Delivery:
    """How one message ended at one target."""

    target: str
    event: str
    delivered: bool
    attempts: int
    reason: str = ""


class Notifier:
    """Sends messages to targets until closed. Use as a context manager.

    Args:
        warn: told of a message that did not arrive, in one line without secrets; from other threads.
        flush: seconds `close` waits at the most.
        pause: seconds before the second attempt; doubled after each.
    """

    def __init__(
        self, targets: Sequence[Target], *, warn: Callable[[str], None], flush: float = 20.0, pause: float = FIRST_PAUSE
    ) -> None:
        self.warn, self.flush, self.pause = warn, flush, pause
        self.deliveries: list[Delivery] = []
        self._lines = [_Line(target, self, number) for number, target in enumerate(targets)]

    def send(self, message: Message) -> None:
        """Queue a message for every target that wants its event. Never blocks, never raises."""
        for line in self._lines:
            line.put(message)

    def close(self) -> None:
        """Wait for what is under way, at most `flush` seconds; what is left then is given up, with a warning.

        Ctrl-C ends the waiting and is not passed on: how the command ends was settled before.
        """
        begun = time.monotonic()
        for line in self._lines:
            line.end()
        try:
            self._wait(begun + min(QUIET_SECONDS, self.flush))
            late = [line.target.name for line in self._lines if line.busy]
            if late and self.flush > QUIET_SECONDS:
                self.say(f"waiting at most {self.flush:g} s until {', '.join(late)} is told; Ctrl-C does not wait")
                self._wait(begun + self.flush)
        except KeyboardInterrupt:
            pass
        for line in self._lines:
            line.give_up(time.monotonic() - begun)

    def _wait(self, until: float) -> None:
        for line in self._lines:
            line.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Notifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ended(self, delivery: Delivery) -> None:
        """Keep how a delivery ended and say so if it failed."""
        self.deliveries.append(delivery)
        if not delivery.delivered:
            times = f" after {delivery.attempts} attempts" if delivery.attempts > 1 else ""
            self.say(f"{delivery.target} was not told of {delivery.event}{times}: {delivery.reason}")

    def say(self, line: str) -> None:
        """Warn; never raises, whatever becomes of who listens."""
        try:
            self.warn(line)
        except Exception:  # noqa: BLE001 - whoever listens is none of a notification's business
            pass


class _Line:
    """The queue and the thread of one target. The thread starts with its first message and never keeps the process alive."""

    def __init__(self, target: Target, owner: Notifier, number: int) -> None:
        self.target, self.owner = target, owner
        self._queue: queue.Queue[Message | None] = queue.Queue(QUEUE)
        self._thread = threading.Thread(target=self._work, name=f"{THREADS}-{number}", daemon=True)
        self._given_up = threading.Event()
        self._current: Message | None = None

    def put(self, message: Message) -> None:
        if self.target.events and message.event not in (*self.target.events, Event.TEST):
            return
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self.owner.ended(
                Delivery(self.target.name, message.event.value, False, 0, "too many messages are waiting for it")
            )
            return
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError:  # no more threads to be had: a rollback matters more
                self.owner.ended(
                    Delivery(self.target.name, message.event.value, False, 0, "no thread could be started")
                )

    def end(self) -> None:
        if self._thread.ident is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                pass  # `join` gives it up then

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def give_up(self, seconds: float) -> None:
        """End what is still under way; every message that did not arrive is told of."""
        if not self.busy:
            return
        self._given_up.set()
        self.target.abandon()
        self._thread.join(0.5)
        waited = f"given up at the end of the command, after {seconds:.0f} s"
        if self._thread.is_alive() and self._current:
            self.owner.ended(Delivery(self.target.name, self._current.event.value, False, 1, waited))
        for message in self._left():
            self.owner.ended(Delivery(self.target.name, message.event.value, False, 0, waited))

    def _left(self) -> list[Message]:
        """What nobody has begun with."""
        left = []
        while True:
            try:
                message = self._queue.get_nowait()
            except queue.Empty:
                return left
            if message is not None:
                left.append(message)

    def _work(self) -> None:
        while not self._given_up.is_set() and (message := self._queue.get()) is not None:
            self._current = message
            self.owner.ended(self._deliver(message))
            self._current = None

    def _deliver(self, message: Message) -> Delivery:
        """Attempts until one succeeds, none may help, or the time is up."""
        name, event, pause = self.target.name, message.event.value, self.owner.pause
        for attempt in range(1, self.target.retries + 2):
            try:
                self.target.deliver(message)
                return Delivery(name, event, True, attempt)
            except DeliveryError as fault:
                reason, again, wait = f"{fault.message} {fault.hint}".strip(), fault.again, max(pause, fault.after)
            except Exception as fault:  # noqa: BLE001 - its text may hold a secret: only its kind is told
                reason, again, wait = f"an unexpected {type(fault).__name__}.", False, 0.0
            if not again or attempt > self.target.retries or self._given_up.wait(wait):
                break
            pause = min(2 * pause, LONGEST_PAUSE)
        if self._given_up.is_set():
            reason = f"given up at the end of the command; the last attempt: {reason}"
        return Delivery(name, event, False, attempt, reason)
