"""Router drivers: a real sglang-router in front of tiny fake workers, and hooks.

The workers are fakes with just the two paths a router asks for: registration, share and draining are what is tested.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from phases.base.clock import SystemClock
from phases.base.errors import ServingError
from phases.engines.embedded.provision import cache_directory
from phases.engines.embedded.stand_in import router_launch
from phases.engines.ssh.errors import RouterError
from phases.engines.ssh.router import HookRouter, RoutedWorker, SglangRouter, drain, make_router, share
from phases.engines.ssh.settings import RouterKind, RouterSettings
from tests.engines.ssh.sshfleet import free_port


class FakeWorker:
    """Answers as an SGLang worker would to a router: health, info, and a generate that can be held."""

    def __init__(self) -> None:
        self.held = threading.Event()
        self.held.set()
        self.running = 0
        worker = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self, value: object) -> None:
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.answer(
                    {
                        "model_path": "fake",
                        "served_model_name": "fake",
                        "tp_size": 1,
                        "dp_size": 1,
                        "data": [{"id": "fake"}],
                    }
                )

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                worker.running += 1
                worker.held.wait(200)
                worker.running -= 1
                self.answer({"text": worker.url, "meta_info": {}})

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.held.set()
        self.server.shutdown()
        self.server.server_close()


def router_command() -> tuple[list[str], dict[str, str]]:
    """Argv and environment that start the real sglang-router, installed alone and pinned, as `phase demo` has it."""
    try:
        launch, variables = router_launch(cache_directory(), print)
    except ServingError as fault:
        pytest.skip(fault.message)
    return launch, {**os.environ, **variables}


@pytest.fixture(scope="module")
def router_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("router")
    port = free_port()
    launch, environment = router_command()
    argv = [*launch, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--policy", "round_robin", "--prometheus-port", str(free_port()), "--health-check-interval-secs", "1"]
    log = open(directory / "log", "wb")  # noqa: SIM115
    process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 180
    while True:
        try:
            requests.get(f"{url}/workers", timeout=2).raise_for_status()
            break
        except requests.RequestException:
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                pytest.fail(f"the router did not start: {(directory / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
    yield url
    os.killpg(process.pid, 9)  # asked to end, it would wait for its connections
    process.wait()
    log.close()


@pytest.fixture
def router(router_url: str) -> Iterator[SglangRouter]:
    made = SglangRouter(router_url, SystemClock(), timeout=90)
    yield made
    for worker in made.workers():
        made.remove(worker.url)


@pytest.fixture
def workers() -> Iterator[list[FakeWorker]]:
    made = [FakeWorker() for _ in range(3)]
    yield made
    for worker in made:
        worker.close()


def ask(url: str, count: int) -> Counter[str]:
    return Counter(
        requests.post(f"{url}/generate", json={"text": "a"}, timeout=120).json()["text"] for _ in range(count)
    )


@pytest.mark.slow
def test_add_share_remove_agree_with_where_requests_go(
    router: SglangRouter, workers: list[FakeWorker], router_url: str
) -> None:
    for worker in workers:
        router.add(worker.url + "/")
    router.add(workers[0].url)
    assert len(router.workers()) == 3, "adding what is there changes nothing"
    canary = workers[0].url
    assert share(router.workers(), [canary]) == pytest.approx(1 / 3)
    assert ask(router_url, 9)[canary] == 3
    router.remove(canary)
    router.remove(canary)
    assert share(router.workers(), [canary]) == 0
    assert canary not in ask(router_url, 8)


@pytest.mark.slow
def test_a_dead_worker_is_reported_and_does_not_slip_in_later(router_url: str, router: SglangRouter) -> None:
    impatient = SglangRouter(router_url, SystemClock(), timeout=2)
    dead = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RouterError, match=rf"did not take {dead} into service within 2 s.*it gets no requests"):
        impatient.add(dead)
    assert dead not in [worker.url for worker in router.workers()]


@pytest.mark.slow
def test_draining_is_seen_on_the_worker(router: SglangRouter, workers: list[FakeWorker], router_url: str) -> None:
    router.add(workers[0].url)
    router.add(workers[1].url)
    workers[0].held.clear()
    threads = [threading.Thread(target=ask, args=(router_url, 1)) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not workers[0].running:
        time.sleep(0.01)
    assert drain(router, workers[0].url, lambda: workers[0].running, SystemClock(), 0.5) is False
    workers[0].held.set()
    assert drain(router, workers[0].url, lambda: workers[0].running, SystemClock(), 120) is True
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_no_router_or_something_else_in_its_place(workers: list[FakeWorker]) -> None:
    with pytest.raises(RouterError, match=r"router: .* does not answer .*`url`"):
        SglangRouter(f"http://127.0.0.1:{free_port()}", SystemClock()).workers()
    with pytest.raises(RouterError, match="form not known here"):
        SglangRouter(workers[0].url, SystemClock()).workers()


@pytest.mark.parametrize("body", ["[1]", "null", '"workers"', '{"workers": 3}', '{"workers": [{}]}', "<html>"])
def test_an_answer_of_another_form_is_a_routers_fault_and_no_crash(body: str) -> None:
    answer = requests.Response()
    answer.status_code, answer._content = 200, body.encode()
    router = SglangRouter("http://router", SystemClock())
    router._session.request = lambda *more, **named: answer  # type: ignore[assignment]
    with pytest.raises(RouterError):
        router.workers()


def test_share_counts_healthy_workers_and_aliases() -> None:
    listed = [
        RoutedWorker("http://a", True),
        RoutedWorker("http://b", True),
        RoutedWorker("http://c", False),
        RoutedWorker("http://a/", True),
    ]
    assert share(listed, ["http://a/"]) == pytest.approx(2 / 3)
    assert share(listed, ["http://c"]) == 0
    with pytest.raises(RouterError, match="no worker behind the router is healthy"):
        share([RoutedWorker("http://a", False)], ["http://a"])


@pytest.fixture
def hooks(tmp_path: Path) -> HookRouter:
    """Hooks over a file, one URL a line."""
    table = tmp_path / "table"
    table.touch()
    add = ["sh", "-c", f'echo "$0" >> {table}', "{url}"]
    remove = ["sh", "-c", f'grep -vxF "$0" {table} > {table}.new; mv {table}.new {table}', "{url}"]
    return HookRouter(add, remove, ["cat", str(table)], SystemClock(), timeout=60)


def test_hooks_are_run_and_their_effect_is_observed(hooks: HookRouter, tmp_path: Path) -> None:
    hooks.add("http://a:1/")
    hooks.add("http://a:1")
    odd = f"http://b:1; touch {tmp_path}/never"
    hooks.add(odd)
    assert [worker.url for worker in hooks.workers()] == ["http://a:1", odd]
    assert not (tmp_path / "never").exists(), "an argument, never a command"
    hooks.remove("http://a:1")
    assert "http://a:1" not in [worker.url for worker in hooks.workers()]


def test_hooks_that_do_nothing_or_fail_are_found_out() -> None:
    idle = HookRouter(["true"], ["true"], ["true"], SystemClock(), timeout=0.3)
    with pytest.raises(RouterError, match="not in service 0.3 s after the add hook ran"):
        idle.add("http://a")
    failing = HookRouter(["true"], ["true"], ["sh", "-c", "echo no access >&2; exit 4"], SystemClock())
    with pytest.raises(RouterError, match="observe hook ended with status 4: no access"):
        failing.workers()
    with pytest.raises(RouterError, match="no `add` hook|no `observe` hook"):
        HookRouter((), (), (), SystemClock()).add("http://a")
    with pytest.raises(RouterError, match="cannot be run"):
        HookRouter(["true"], ["true"], ["/no/such/hook"], SystemClock()).workers()


def test_settings_make_the_right_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_KEY", "secret-key")
    made = make_router(RouterSettings(RouterKind.SGLANG, "http://r:1/", "ROUTER_KEY"), SystemClock())
    assert isinstance(made, SglangRouter) and made.url == "http://r:1"
    assert make_router(RouterSettings(), SystemClock()).name == "none"
