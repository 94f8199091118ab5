"""The own load's account: what failed in which step, and what the router says it repeated."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from phases.base.results import Results
from phases.fleet.report import table
from phases.fleet.traffic import Traffic, kept, measured
from phases.production.settings import LoadSettings


class Answering(http.server.BaseHTTPRequestHandler):
    """A router that refuses on demand, with metrics of its own."""

    refuses, retries = False, 0

    def do_GET(self) -> None:
        self._answer(
            200,
            f'# TYPE smg_worker_retries_total counter\nsmg_worker_retries_total{{route="/generate"}} {type(self).retries}\n'.encode(),
        )

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if type(self).refuses:
            self._answer(503, b"no worker is left")
        else:
            self._answer(
                200,
                b'data: {"meta_info": {"completion_tokens": 4, "finish_reason": {"type": "length"}}}\n\ndata: [DONE]\n\n',
            )

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def router() -> Iterator[tuple[str, type[Answering]]]:
    handler = type("Handler", (Answering,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def production(url: str, *, metrics: str, rate: float = 200.0, said: list[str] | None = None) -> Any:
    settings = SimpleNamespace(
        load=LoadSettings(rate=rate, url=url, tokens=4), server=SimpleNamespace(request_timeout=60.0)
    )
    progress = (said if said is not None else []).append
    return SimpleNamespace(
        settings=settings,
        router=None,
        fleet_settings=SimpleNamespace(router=SimpleNamespace(metrics=metrics)),
        progress=progress,
    )


def _enough(traffic: Traffic, more: int = 20) -> None:
    wanted = traffic._summary().sent + more
    until = time.monotonic() + 120
    while traffic._summary().sent < wanted:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_failures_and_repeats_are_counted_in_the_step_in_which_they_happen(router: tuple[str, type[Answering]]) -> None:
    url, handler = router
    traffic = Traffic(None, production(url, metrics=url))  # type: ignore[arg-type]
    with traffic.during("restart the control") as well:
        _enough(traffic)
    with traffic.during("bake") as ill:
        handler.refuses, handler.retries = True, 3
        _enough(traffic)
    traffic.stop()
    shares = kept([*well, *ill])
    assert shares[0]["sent"] >= 20 and (shares[0]["failed"], shares[0]["retried"], shares[0]["failures"]) == (0, 0, ())
    assert shares[1]["failed"] >= 10 and shares[1]["retried"] == 3
    assert shares[1]["failures"][0]["status"] == 503 and "no worker is left" in shares[1]["failures"][0]["error"]
    failed, repeated = measured(shares)
    assert (
        failed.estimate == shares[1]["failed"]
        and failed.n == shares[0]["sent"] + shares[1]["sent"]
        and repeated.estimate == 3
    )
    shown = table(Results("tp8-canary", "k", facts={"load": shares}))
    assert "restart the control" in shown and "no worker is left" in shown


def test_a_router_without_metrics_leaves_the_repeats_unknown_and_no_rate_means_no_load(
    router: tuple[str, type[Answering]],
) -> None:
    url, _ = router
    said: list[str] = []
    traffic = Traffic(None, production(url, metrics="http://127.0.0.1:9", said=said))  # type: ignore[arg-type]
    with traffic.during("bake") as shares:
        _enough(traffic)
    traffic.stop()
    assert said == [
        "what the router repeats is not counted: http://127.0.0.1:9/metrics cannot be read: ConnectionError."
    ]
    assert shares[0].retried is None and [row.metric for row in measured(kept(shares))] == ["failed_requests"]
    idle = Traffic(None, production(url, metrics=url, rate=0.0))  # type: ignore[arg-type]
    with idle.during("bake") as nothing:
        pass
    assert nothing == [] and measured(kept(nothing)) == ()
