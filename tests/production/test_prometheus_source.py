"""A real Prometheus server that scrapes stand-in workers (`standin_worker.py`), read by PromQL; and what is not one."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from phases.analysis.histograms import HistogramWindows
from phases.analysis.scrape import Scrape
from phases.base.clock import SystemClock
from phases.base.verdict import Verdict
from phases.engines.embedded.stand_in import WORKER as STANDIN_WORKER
from phases.engines.ssh.host import Host
from phases.serving.load import HttpSender, OpenLoopLoad, Prompt
from phases.trial.bake import Bake
from phases.trial.prometheus_source import PrometheusSource, SourceError
from phases.trial.settings import JudgeSettings, MetricSettings
from tests.engines.ssh.sshfleet import PYTHON, free_port

PROMETHEUS = shutil.which("prometheus")
HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.fleet]


class Scraped:
    """Two workers and the Prometheus server that scrapes the first of them, and a target that is down."""

    def __init__(self, directory: Path) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ports = [free_port(), free_port()]
        for port in self.ports:
            self.start([PYTHON, str(STANDIN_WORKER), "--port", str(port), "--attention-backend", "none"])
        self.down, self.slow = free_port(), free_port()
        self.start(
            [PYTHON, str(STANDIN_WORKER), "--port", str(self.slow), "--attention-backend", "none"], STANDIN_SLOW="20"
        )
        self.url = f"http://127.0.0.1:{(listen := free_port())}"
        targets = [f"127.0.0.1:{self.ports[0]}", f"127.0.0.1:{self.down}", f"127.0.0.1:{self.slow}"]
        jobs = [
            {"job_name": "sglang", "static_configs": [{"targets": targets}]},
            {
                "job_name": "renamed",
                "static_configs": [{"targets": [f"127.0.0.1:{self.ports[1]}"], "labels": {"instance": "node-2"}}],
                "metric_relabel_configs": [
                    {
                        "source_labels": ["__name__"],
                        "regex": "sglang:(.*)",
                        "target_label": "__name__",
                        "replacement": "sglang_$1",
                    }
                ],
            },
            {
                "job_name": "again",
                "static_configs": [{"targets": [f"127.0.0.1:{self.ports[1]}"], "labels": {"instance": "twice"}}],
            },
            {
                "job_name": "and again",
                "static_configs": [{"targets": [f"127.0.0.1:{self.ports[1]}"], "labels": {"instance": "twice"}}],
            },
            {
                "job_name": "bare",
                "static_configs": [{"targets": [f"127.0.0.1:{self.ports[1]}"], "labels": {"instance": "bare"}}],
                "metric_relabel_configs": [{"source_labels": ["__name__"], "regex": "sglang:.*", "action": "drop"}],
            },
        ]
        (directory / "prometheus.yml").write_text(
            json.dumps({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs})
        )
        assert PROMETHEUS
        self.prometheus = self.start(
            [
                PROMETHEUS,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{listen}",
                "--log.level=error",
            ]
        )

    def start(self, argv: list[str], **environment: str) -> subprocess.Popen[bytes]:
        self.processes.append(
            subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL, env={**os.environ, **environment})
        )
        return self.processes[-1]

    def source(self, **changes: float) -> PrometheusSource:
        hosts = [
            Host("w1", "local", "/srv/w1", url=f"http://127.0.0.1:{self.ports[0]}"),
            Host("w2", "local", "/srv/w2", url=f"http://127.0.0.1:{self.ports[1]}", labels={"instance": "node-2"}),
        ]
        return PrometheusSource(self.url, hosts, **changes)  # type: ignore[arg-type]

    def generate(self, worker: int, count: int) -> None:
        for _ in range(count):
            requests.post(
                f"http://127.0.0.1:{self.ports[worker]}/generate",
                json={"sampling_params": {"max_new_tokens": 4}},
                timeout=60,
            ).raise_for_status()

    def close(self) -> None:
        for process in self.processes:
            os.killpg(process.pid, signal.SIGCONT)
            process.kill()
            process.wait(10)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    if not PROMETHEUS:
        pytest.skip("prometheus is not installed (package prometheus)")
    made = Scraped(tmp_path_factory.mktemp("prometheus"))
    try:
        _until(lambda: made.source().require() is None)
        yield made
    finally:
        made.close()


def _until(true, seconds: float = 150.0) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + seconds
    while True:
        try:
            if true():
                return
        except SourceError:
            if time.monotonic() > until:
                raise
        assert time.monotonic() < until
        time.sleep(0.2)


def _read(source: PrometheusSource, url: str) -> Scrape:
    """What Prometheus has, once it has something: a busy machine may let a scrape of it come too late."""
    found: list[Scrape] = []
    _until(lambda: found.append(source(url)) is None)
    return found[0]


def _until_said(source: PrometheusSource, said: str, seconds: float = 150.0) -> None:
    """Until it is refused with these words: before its first scrape of a target Prometheus says something else."""
    until = time.monotonic() + seconds
    while True:
        with pytest.raises(SourceError) as told:
            source.require()
        if re.search(said, str(told.value)):
            return
        assert time.monotonic() < until, str(told.value)
        time.sleep(0.2)


@pytest.mark.parametrize(("worker", "prefix"), [(0, "sglang:"), (1, "sglang_")])  # many relabel the colon away
def test_the_same_counts_as_from_the_worker_itself(scraped: Scraped, worker: int, prefix: str) -> None:
    url = f"http://127.0.0.1:{scraped.ports[worker]}"
    scraped.generate(worker, 7)

    def the_same() -> bool:
        own = Scrape.parse(requests.get(f"{url}/metrics", timeout=60).text, t=time.time(), source="own")
        seen = scraped.source()(url)
        names = "http_responses_total", "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_count"
        assert (
            abs(seen.t - time.time()) < 60
            and sum(own.samples["sglang:e2e_request_latency_seconds_count"].values()) >= 7
        )
        return all(seen.samples.get(prefix + name) == own.samples[f"sglang:{name}"] for name in names)

    _until(the_same)


def test_increases_between_scrapes_are_what_was_served(scraped: Scraped) -> None:
    source, url = scraped.source(), f"http://127.0.0.1:{scraped.ports[0]}"
    windows, served = HistogramWindows("ttft"), 0.0
    windows.add(_read(source, url))
    again, _ = windows.add(_read(source, url))
    scraped.generate(0, 11)

    def all_of_them() -> bool:
        nonlocal served
        buckets, restarted = windows.add(source(url))
        served += buckets.total if buckets else 0.0
        return served == 11 and not restarted

    assert again is None or again.total == 0
    _until(all_of_them)


@pytest.mark.parametrize(
    ("instance", "said"),
    [
        ("127.0.0.1:1", "no target with instance='127.0.0.1:1'.*It knows .*give the worker a label"),
        ("twice", "scrapes twice in 2 jobs"),
        ("bare", "no metrics of SGLang for bare"),
        ("DOWN", "cannot scrape"),
        ('"} or vector(1) #', "no target with instance="),  # not PromQL of somebody's making
    ],
)
def test_what_prometheus_lacks_is_named(scraped: Scraped, instance: str, said: str) -> None:
    instance = instance.replace("DOWN", f"127.0.0.1:{scraped.down}")
    source = PrometheusSource(
        scraped.url, [Host("w", "local", "/srv/w", url="http://w", labels={"instance": instance})]
    )
    _until_said(source, said)


def test_what_was_scraped_long_ago_is_no_news(scraped: Scraped) -> None:
    _until_said(scraped.source(stale=-1.0), r"last scraped .* ago")


def test_a_server_that_stops_answering_is_said(scraped: Scraped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phases.trial.prometheus_source.QUERY_SECONDS", 1.0)
    os.killpg(scraped.prometheus.pid, signal.SIGSTOP)
    try:
        with pytest.raises(SourceError, match=r"does not answer \(ReadTimeout\)"):
            scraped.source().require()
    finally:
        os.killpg(scraped.prometheus.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, b"<html>", "answers 200 and no vector"),
        (200, b'{"status": "success", "data": {"resultType": "matrix", "result": []}}', "no vector"),
        (400, b'{"status": "error", "errorType": "bad_data", "error": "parse error"}', "refuses .*parse error"),
        (401, b"", r"refuses us \(401\)"),
        (503, b"", "answers 503"),
    ],
)
def test_answers_of_something_else(status: int, body: bytes, said: str) -> None:
    """A tiny HTTP server in the place of Prometheus, since a real one gives none of these answers on demand."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://ada:secret@127.0.0.1:{server.server_port}"
        with pytest.raises(SourceError, match=said) as told:
            PrometheusSource(url, [])("http://10.0.0.1:30000")
        server.shutdown()
    assert "secret" not in str(told.value)


def test_a_slow_canary_fails_by_what_prometheus_says(scraped: Scraped) -> None:
    """A whole bake on histograms that Prometheus scraped: a third worker is twenty times slower than the first."""
    port = scraped.slow
    urls = {"control": f"http://127.0.0.1:{scraped.ports[0]}", "canary": f"http://127.0.0.1:{port}"}
    metric = MetricSettings("e2e", 0.5, 0.25)
    judge = JudgeSettings((metric,), alpha=0.05, window=2.0, bake=4.0, deadline=200.0, min_samples=20, settle=0.0)
    loads = [
        OpenLoopLoad(HttpSender(url, timeout=60.0), [Prompt("p", "x", 8)], 20.0, max_in_flight=8, seed=n)
        for n, url in enumerate(urls.values())
    ]
    source = scraped.source()
    with loads[0], loads[1]:
        _until(lambda: all(source(url).resolve(["http_responses_total"]) for url in urls.values()))
        verdict = Bake(
            judge, {"slow": urls["canary"]}, {"w1": urls["control"]}, SystemClock(), lambda: None, read=source
        ).run()
    assert verdict.verdict is Verdict.FAIL and "e2e" in verdict.reason, verdict
    assert verdict.requests["canary"] > 20 and verdict.reference[0].metric == "e2e"


def test_nobody_there() -> None:
    with pytest.raises(SourceError, match=r"127.0.0.1:\d+ does not answer \(ConnectionError\)"):
        PrometheusSource(f"http://127.0.0.1:{free_port()}", [])("http://10.0.0.1:30000")
