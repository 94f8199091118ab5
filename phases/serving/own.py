"""Our own requests, told apart from users' at the source: a header says whose they are, and what each worker answered them is counted."""

from __future__ import annotations

import threading
from collections import Counter

HEADER = {"x-phasegate": "own"}  # on every request we send ourselves; for routers, proxies and logs


class OwnRequests:
    """Answers to our own generating requests by worker and HTTP status, counted when a worker has answered: as its own counters do.

    Only what goes straight to a worker is counted here. Own load through the router stands for users: it takes their way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answered: dict[str, Counter[int]] = {}

    def answered(self, url: str, status: int) -> None:
        """A worker has answered a generating request of ours."""
        with self._lock:
            self._answered.setdefault(url, Counter())[status] += 1

    def of(self, url: str) -> dict[int, int]:
        """Answers so far by status."""
        with self._lock:
            return dict(self._answered.get(url, {}))
