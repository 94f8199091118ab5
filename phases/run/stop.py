"""Stopping from outside: SIGINT, SIGTERM and SIGHUP become a KeyboardInterrupt that cannot get lost.

Python runs a signal's handler wherever the main thread happens to be. Inside a weak reference's callback or a `__del__`
(matplotlib's drawing is full of them) nobody can catch what the handler raises: Python prints "Exception ignored" and goes
on. Such an interrupt is raised again a moment later, outside. One that other code swallowed is noticed between steps.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

AGAIN_SECONDS = 0.01
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_asked = False


def install() -> None:
    """From here on these signals stop the program as Ctrl-C does, so that a run stays resumable and cleans up."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, or in a script's background, it goes on
            signal.signal(number, _stop)
    signal.signal(signal.SIGALRM, _stop)
    sys.unraisablehook = _raise_again_after(sys.unraisablehook)


def uninstall() -> None:
    """Near the end: nothing is left to be cleaned up, a further signal ends the process at once."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for number in (*_SIGNALS, signal.SIGALRM):
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGALRM else signal.SIG_DFL)


def raise_if_asked() -> None:
    """Raises KeyboardInterrupt when a signal asked for an end and whoever was interrupted swallowed that."""
    if _asked:
        raise KeyboardInterrupt


def _stop(number: int, frame: object) -> None:
    global _asked
    _asked = True
    raise KeyboardInterrupt


def _raise_again_after(before: Callable[[Any], Any]) -> Callable[[Any], None]:
    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)  # not here: what this hook raises is ignored as well
        else:
            before(unraisable)

    return hook
