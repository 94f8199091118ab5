"""A real HTTP server on a free port that answers as each test wants."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from phases.notify.message import Event, Message


class Receiver:
    """Keeps what it is sent. `answers` are used one by one, the last again and again: a status, (status, headers), or HANG."""

    HANG = "hang"

    def __init__(self):
        self.answers, self.requests, self.release = [200], [], threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append((self.path, dict(self.headers), json.loads(body)))
                answer = receiver.answers.pop(0) if len(receiver.answers) > 1 else receiver.answers[0]
                if answer == Receiver.HANG:
                    receiver.release.wait(600)
                    return
                status, headers = answer if isinstance(answer, tuple) else (answer, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(self.path.encode())  # a server that echoes its address

            def do_GET(self):
                receiver.requests.append((self.path, dict(self.headers), None))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/T0/B0/s3cret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def bodies(self):
        return [body for _, _, body in self.requests]


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def message():
    return Message(
        Event.GATE_FAILED,
        "prod",
        "verify_attn",
        "tp8-canary",
        "tp8-canary failed",
        1764446400.0,
        ("itl p95: <!channel> slower",),
        "phase gate review 3",
        {"verdict": "FAIL", "checkpoint": "0003-tp8-canary-FAIL", "exit": 7},
    )
