"""Router drivers: a real sglang-router in front of tiny fake workers, and hooks.

The workers are fakes with just the two paths a router asks for: registration, share and draining are what is tested.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
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
from phases.engines.ssh.placing import AddressBook, RoutedWorker
from phases.engines.ssh.router import HookRouter, SglangRouter, drain, make_router, share
from phases.engines.ssh.settings import RouterKind, RouterSettings
from phases.serving.address import Names
from phases.serving.client import Client
from phases.serving.in_flight import InFlight, in_flight
from tests.engines.ssh.sshfleet import free_port


class FakeWorker:
    """Answers as an SGLang worker would to a router: health, info, and a generate that can be held."""

    def __init__(self, ranks: int = 1) -> None:
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
                        "dp_size": ranks,
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


@contextlib.contextmanager
def running_router(directory: Path, *arguments: str) -> Iterator[str]:
    """The address of a real router, while the block runs."""
    port = free_port()
    launch, environment = router_command()
    argv = [*launch, "--host", "127.0.0.1", "--port", str(port), *arguments]
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


@pytest.fixture(scope="module")
def router_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_router(tmp_path_factory.mktemp("router")) as url:
        yield url


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
    left = lambda: InFlight(float(workers[0].running), 0.0)  # noqa: E731
    assert drain(router, workers[0].url, left, SystemClock(), 0.5).endswith(" running")
    workers[0].held.set()
    assert drain(router, workers[0].url, left, SystemClock(), 120) == ""
    for thread in threads:
        thread.join()


def book_of(*urls: str) -> AddressBook:
    return AddressBook({f"w{n}": [url] for n, url in enumerate(urls, 1)}, Names(lambda: 0.0))


@pytest.mark.slow
def test_all_ranks_behind_a_dp_aware_router_move_together(tmp_path: Path) -> None:
    """Field failure: the router takes the removal of one rank, answers 202, and does nothing."""
    first, second = FakeWorker(ranks=2), FakeWorker(ranks=3)
    alias = f"http://LOCALHOST:{second.url.rpartition(':')[2]}/"
    try:
        with running_router(tmp_path, "--dp-aware") as url:
            book = book_of(first.url, second.url)
            router = SglangRouter(url, SystemClock(), timeout=90, book=book)
            router.add(first.url)
            requests.post(f"{url}/workers", json={"url": alias}, timeout=30).raise_for_status()
            while len(router.workers()) < 5:
                time.sleep(0.05)
            router.add(second.url)  # waits for what is there under another name, and adds nothing
            listed = sorted(worker.url for worker in router.workers())
            assert listed == sorted([f"{first.url}@0", f"{first.url}@1", *(f"{alias}@{rank}" for rank in range(3))])
            assert book.place(router.workers()).in_service("w2") is True
            assert first.url in ask(url, 10)
            router.remove(first.url)
            assert book.place(router.workers()).listed("w1") is False
            assert set(ask(url, 10)) == {second.url}
            router.add(first.url)
            stranger = SglangRouter(url, SystemClock(), timeout=90, book=book)  # has added nothing, so knows no ids
            stranger.remove(second.url)
            assert sorted(worker.url for worker in router.workers()) == [f"{first.url}@0", f"{first.url}@1"]
            time.sleep(2)  # the addition that told the id must not come after the removal
            assert sorted(worker.url for worker in router.workers()) == [f"{first.url}@0", f"{first.url}@1"]
    finally:
        first.close()
        second.close()


@pytest.mark.slow
def test_another_spelling_is_taken_out_and_what_may_be_it_is_no_success(
    router: SglangRouter, workers: list[FakeWorker], router_url: str
) -> None:
    port = workers[0].url.rpartition(":")[2]
    alias = f"http://localhost:{port}"
    router.add(alias)
    router.add(workers[1].url)
    known = SglangRouter(router_url, SystemClock(), timeout=90, book=book_of(workers[0].url, workers[1].url))
    known.remove(workers[0].url)
    assert [worker.url for worker in known.workers()] == [workers[1].url]
    router.add(alias)
    unsure = SglangRouter(
        router_url,
        SystemClock(),
        book=AddressBook({"w1": [f"http://no-such-name.invalid:{port}"]}, Names(lambda: 0.0, lookup=_nothing)),
    )
    with pytest.raises(RouterError, match=rf"whether .*{port} is out of service is not known: .*{alias}.*router_url"):
        unsure.remove(f"http://no-such-name.invalid:{port}")


def _nothing(name: str) -> list[str]:
    raise OSError(name)


def test_hooks_take_out_every_spelling(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text("http://localhost:1\nhttp://127.0.0.1:1/\nhttp://127.0.0.1:2@0\n")
    remove = ["sh", "-c", f'grep -vxF -e "$0" -e "$0/" {table} > {table}.new; mv {table}.new {table}', "{url}"]
    hooks = HookRouter(["true"], remove, ["cat", str(table)], SystemClock(), book=book_of("http://127.0.0.1:1"))
    hooks.remove("http://127.0.0.1:1")
    assert table.read_text() == "http://127.0.0.1:2@0\n"


@pytest.mark.parametrize(
    ("page", "told", "seconds"),
    [
        ("sglang:num_running_reqs 0\nsglang:num_queue_reqs 0\n", "", 0.2),
        ("sglang:num_running_reqs 0\nsglang:num_queue_reqs 2\n", "2 queued", 5.0),
        (
            "sglang:num_running_reqs 1\nsglang:num_queue_reqs 0\nsglang:num_grammar_queue_reqs 3\n",
            "1 running, 3 queued",
            5.0,
        ),
        ("sglang:num_queue_reqs 0\n", "how many it has is not known: /metrics of w has no num_running_reqs", 5.0),
        ("sglang:num_running_reqs 0\n", "has no num_queue_reqs", 5.0),
        ("", "has no num_running_reqs and no num_queue_reqs", 5.0),
    ],
)
def test_what_is_queued_is_in_flight_and_a_missing_gauge_is_not_zero(
    page: str, told: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ticking()
    client = Client("http://127.0.0.1:1", "w")
    monkeypatch.setattr(client, "metrics", lambda: page)
    idle = HookRouter(["true"], ["true"], ["true"], clock)
    said = drain(idle, "http://127.0.0.1:1", lambda: in_flight(client), clock, 5.0)
    assert told in said and bool(said) is bool(told)
    assert clock.at == pytest.approx(seconds, abs=0.3)


def test_a_worker_that_is_gone_has_nothing_in_flight_and_one_that_hangs_may_have_anything() -> None:
    assert in_flight(Client(f"http://127.0.0.1:{free_port()}", "w", 5.0)).empty
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        seen = in_flight(Client(f"http://127.0.0.1:{mute.getsockname()[1]}", "w", 0.3))
    assert not seen.empty and "not known" in str(seen)


class Ticking:
    """Time that passes only where it is waited for."""

    at = 0.0

    def now(self) -> float:
        return self.at

    monotonic = now

    def sleep(self, seconds: float) -> None:
        self.at += seconds


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
