"""Which implementation serves tree verify right now: a file decides, at every forward.

The file (VERIFY_ATTN_CONTROL) holds one word, `candidate` or `incumbent`; without a file it is the candidate. Anything
else counts as `incumbent`: a damaged file must lead to what is known to work. Reading it costs one stat a forward.
"""

from __future__ import annotations

import logging
import os

CANDIDATE, INCUMBENT = "candidate", "incumbent"
log = logging.getLogger(__name__)


class Control:
    """Follows the control file."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.choice = CANDIDATE
        self._seen: tuple[int, int, int] | None = None

    @classmethod
    def from_environment(cls) -> Control:
        return cls(os.environ.get("VERIFY_ATTN_CONTROL"))

    @property
    def use_candidate(self) -> bool:
        """Whether the next forward runs our kernel."""
        if self.path:
            self._follow()
        return self.choice == CANDIDATE

    def _follow(self) -> None:
        try:
            status = os.stat(self.path)
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
            if seen == self._seen:
                return
            with open(self.path, encoding="utf-8", errors="replace") as file:
                word = file.read(64).strip()
        except FileNotFoundError:
            seen, word = None, CANDIDATE
        except OSError as fault:
            seen, word = None, f"unreadable: {fault.strerror}"
        self._seen = seen
        choice = word if word in (CANDIDATE, INCUMBENT) else INCUMBENT
        if choice != self.choice:
            log.warning("verify_attn: control file says %r: tree verify now runs the %s", word, choice)
            self.choice = choice
