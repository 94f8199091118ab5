"""What answers under /metrics is read no further than a limit, and whoever reads it says so. The servers are stand-ins: a real one does not go on for ever."""

from __future__ import annotations

import gzip
import http.server
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import requests

from phases.analysis import sources
from phases.base import scraping
from phases.base.clock import SystemClock
from phases.base.errors import PhaseError
from phases.serving.client import Client
from phases.trial.bake import Bake
from phases.trial.metrics import read_metrics
from phases.trial.settings import JudgeSettings, MetricSettings

LINE = b'sglang:a_total{rank="\xc3\xa4"} 1.0\n'
TOLD = r"/metrics is longer than 16 MiB and was read no further"


class Page(http.server.BaseHTTPRequestHandler):
    """/metrics of so many bytes; without an end where `size` is None, until whoever reads it goes away."""

    size: int | None = None
    body = b""
    encoding = "identity"
    trickles = False
    ended: threading.Event

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")  # as without a character set, which requests takes for Latin-1
        self.send_header("Content-Encoding", self.encoding)
        if self.body or self.size is not None:
            self.send_header("Content-Length", str(self.size or len(self.body)))
        self.end_headers()
        if self.body:
            self.wfile.write(self.body)
            return
        block = LINE * (1 << 12)
        try:
            for _ in range(3000 if self.trickles else 0):
                self.wfile.write(b"x")
                time.sleep(0.01)
            while self.size is None:
                self.wfile.write(block)
            self.wfile.write((block * (self.size // len(block) + 1))[: self.size])
        except OSError:
            self.ended.set()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def page() -> Iterator[tuple[str, type[Page]]]:
    handler = type("Handler", (Page,), {"ended": threading.Event()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


READERS: dict[str, Callable[[str], object]] = {
    "a rollout's": read_metrics,
    "phase analyze's": lambda url: next(sources.live([f"canary={url}/metrics"], every=1, until=None)),
    "Phase 2's": lambda url: Client(url, "candidate").metrics(),
}


@pytest.mark.parametrize("reader", list(READERS))
def test_a_page_without_an_end_is_left(page: tuple[str, type[Page]], reader: str) -> None:
    url, handler = page
    with pytest.raises(PhaseError, match=f"{url}{TOLD}") as told:
        READERS[reader](url)
    assert "label" in told.value.hint and handler.ended.wait(200), "its connection is closed"


def test_a_page_up_to_the_limit_is_read_whole(page: tuple[str, type[Page]]) -> None:
    url, handler = page
    handler.size = scraping.MOST
    text = read_metrics(url)
    assert len(text.encode()) == scraping.MOST and text.startswith(LINE.decode())
    handler.size = scraping.MOST + 1
    with pytest.raises(PhaseError, match=TOLD):
        read_metrics(url)


def test_a_page_that_trickles_is_left(page: tuple[str, type[Page]]) -> None:
    url, handler = page
    handler.trickles = True  # each byte comes well within the limit on a part
    with pytest.raises(requests.ReadTimeout, match="/metrics was not there whole within 0.02 s"):
        scraping.get_text(f"{url}/metrics", 20.0, patience=0.001)
    assert handler.ended.wait(200), "its connection is closed"


@pytest.mark.parametrize("compressed", [False, True])
def test_a_page_cut_short_is_none(page: tuple[str, type[Page]], compressed: bool) -> None:
    url, handler = page
    handler.body = gzip.compress(LINE * 100, 6) if compressed else LINE * 100
    handler.encoding = "gzip" if compressed else "identity"
    assert read_metrics(url) == (LINE * 100).decode()
    handler.size = len(handler.body) + 1
    with pytest.raises(PhaseError, match="cannot be read: ConnectionError"):
        read_metrics(url)


def test_records_behind_an_address_may_be_longer(page: tuple[str, type[Page]]) -> None:
    url, handler = page
    handler.size = scraping.MOST + 1
    assert len(sources._text(f"{url}/records").encode()) >= handler.size


def test_a_bake_says_that_of_the_worker_it_is(page: tuple[str, type[Page]]) -> None:
    judge = JudgeSettings((MetricSettings("e2e", 0.5, 0.5),), window=0.05, bake=0.1, deadline=10_000, min_samples=10)
    verdict = Bake(judge, {"w1": page[0]}, {"w2": page[0]}, SystemClock(), lambda: None).run()
    assert (
        verdict.fault
        and verdict.fault.worker == "w1"
        and "its metrics cannot be read: " in verdict.reason
        and TOLD in verdict.reason
    )
