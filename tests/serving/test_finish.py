"""An answer is good when it ends as asked, whatever status it began with."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from phases.base.errors import ServingError
from phases.serving.client import Client
from phases.serving.finish import not_as_asked
from phases.serving.load import HttpSender, Prompt

LENGTH, STOP, ABORT = (
    {"type": "length", "length": 4},
    {"type": "stop", "matched": 2},
    {"type": "abort", "message": "oom"},
)


@pytest.mark.parametrize(
    ("reason", "tokens", "exactly", "said"),
    [
        (LENGTH, 4, True, ""),
        (STOP, 2, False, ""),
        ("length", 4, False, ""),
        (STOP, 2, True, "stop after 2 of 4"),
        (LENGTH, 3, False, "length after 3 of 4"),
        (LENGTH, 5, True, "length after 5 of 4"),
        (STOP, 0, False, "stop after 0 of 4"),
        (ABORT, 4, False, "abort: oom"),
        (None, 4, False, "no finish_reason"),
        ({"type": "error"}, 4, False, "ended with error"),
    ],
)
def test_what_counts_as_an_end(reason: object, tokens: int, exactly: bool, said: str) -> None:
    found = not_as_asked(reason, tokens, 4, exactly=exactly)
    assert said in found and bool(said) == bool(found)


def _event(tokens: int, reason: object) -> bytes:
    meta = {"completion_tokens": tokens, "finish_reason": reason}
    return b"data: " + json.dumps({"output_ids": list(range(tokens)), "meta_info": meta}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
STREAMS = {
    "whole": (_event(1, None) + _event(4, LENGTH) + DONE, 200),
    "aborted": (_event(1, None) + _event(2, ABORT) + DONE, -1),
    "an error event": (_event(1, None) + b'data: {"error": {"message": "scheduler died"}}\n\n' + DONE, -1),
    "too short": (_event(1, None) + _event(2, LENGTH) + DONE, -1),
    "without a reason": (_event(4, None) + DONE, -1),
    "cut": (_event(4, LENGTH), -1),
    "no JSON": (b"data: {half\n\n" + DONE, -1),
    "no object": (b"data: 5\n\n" + DONE, -1),
}


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A stand-in that streams what it is told to, always under status 200."""
    said = {"body": b""}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(said["body"])))
            self.end_headers()
            self.wfile.write(said["body"])

        def log_message(self, *_: object) -> None: ...

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}", said
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_begins_with_200_is_judged_by_its_end(server: tuple[str, dict[str, bytes]], name: str) -> None:
    url, said = server
    said["body"], status = STREAMS[name]
    record = HttpSender(url)(Prompt("p", "hello", 4, {"ignore_eos": True}), 0.0)
    assert record.status == status and record.ok == (status == 200) and bool(record.error) == (status != 200)
    assert "e2e" in record.metrics() if record.ok else "e2e" not in record.metrics()
    if status == 200:
        assert len(Client(url, "w1").generate("hello", 4, stream=True).tokens) == 4
    else:
        with pytest.raises(ServingError, match="w1"):
            Client(url, "w1").generate("hello", 4, stream=True)
