"""Scoring: what a server's rows say against what it was given. The rows are those of SGLang 0.5.23 with a vocabulary of 512."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import requests

from phases.base.errors import ServingError
from phases.serving import outputs
from phases.serving.client import Client, Completion, ScoringError
from phases.sglang_integration import steps as phase_two

PROMPT, LAST = [5, 6, 7], 511
GIVEN = (LAST, 8, LAST, 9)
ROWS = [[None, 7, None], [-11.25, 0, None], [-8.25, 8, None], [-9.5, 0, None], [-10.5, 9, None]]  # id 511 is called 0


@pytest.fixture
def teacher():
    """A client of a stand-in that answers every scoring with `rows`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["input_ids"] == [*PROMPT, *GIVEN] and asked["logprob_start_len"] == len(PROMPT) - 1
            top = [None, *([[-0.5, 3, None]] for _ in rows[1:])]
            body = json.dumps({"meta_info": {"input_token_logprobs": rows, "input_top_logprobs": top}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    rows = [list(row) for row in ROWS]
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Client(f"http://127.0.0.1:{server.server_port}", "the teacher"), rows
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_last_id_of_the_vocabulary_is_called_0_and_scored_all_the_same(teacher):
    client, _ = teacher
    found = client.score(PROMPT, GIVEN)
    assert found.logprobs == (-11.25, -8.25, -9.5, -10.5) and found.best == (-0.5,) * 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda rows: rows[2].__setitem__(1, 0),
            "4 tokens given, as many rows came back, 1 differ, first token 2: id 0 instead of 8",
        ),
        (lambda rows: rows[3].__setitem__(1, 12), "first token 3: id 12 instead of 511"),
        (lambda rows: rows[4].__setitem__(1, None), "first token 4: id None instead of 9"),
        (lambda rows: rows.__delitem__(slice(2, None)), "4 tokens given, 2 rows came back"),
    ],
    ids=["0 for another id", "another id for the last", "no id", "too few rows"],
)
def test_other_differences_are_errors_that_say_where(teacher, change, said):
    client, rows = teacher
    change(rows)
    with pytest.raises(ScoringError, match=said) as caught:
        client.score(PROMPT, GIVEN)
    assert caught.value.given == GIVEN and caught.value.rows == rows


def test_a_scoring_that_fails_names_the_prompt_and_keeps_what_was_answered(teacher, tmp_path):
    client, rows = teacher
    rows[2][1] = 44
    answer = Completion(GIVEN, (-1.0, float("nan"), -2.0, -3.0), "secret words", len(PROMPT), 2, 1.0, 0.1, 0.9)
    collected = [("numbers", "concurrency 4", PROMPT, answer)]
    path = tmp_path / "answers.json"
    with pytest.raises(
        ServingError, match="prompt 'numbers' of 3 tokens, concurrency 4: .*first token 2: id 44 instead of 8"
    ) as caught:
        phase_two._scored(path, client, collected, collected)
    assert str(path) in caught.value.hint
    kept = json.loads(path.read_text())
    assert kept["candidate"] == kept["incumbent"] == outputs.as_json(collected)
    assert kept["candidate"][0]["tokens"] == list(GIVEN) and kept["candidate"][0]["logprobs"][1] == "nan"
    assert (
        kept["scoring"]["given"] == list(GIVEN)
        and kept["scoring"]["rows"][2][1] == "44"
        and "secret" not in path.read_text()
    )


GARBAGE = [
    b"",
    b"<html>",
    b"{}",
    b"[]",
    b"null",
    b'{"meta_info": null}',
    b'{"meta_info": {"output_token_logprobs": [[null, 1, null]]}}',
    b'{"output_ids": 5, "meta_info": {}}',
    b'{"meta_info": {"prompt_tokens": "x"}}',
    b"data: {bad\n\n",
    b"data: 5\n\ndata: [DONE]\n\n",
    b'{"meta_info": {"input_token_logprobs": null, "input_top_logprobs": null}}',
    b'{"meta_info": {"input_token_logprobs": [[null, 7, null]], "input_top_logprobs": [null]}}',
]


@pytest.mark.parametrize("body", GARBAGE, ids=repr)
def test_whatever_a_server_answers_is_one_error_that_names_it(monkeypatch, body):
    """Else a sick canary would end the run as an internal error, with the canary still where it is."""
    answer = requests.Response()
    answer.status_code, answer.raw = 200, io.BytesIO(body)
    client = Client("http://nowhere", "w1")
    monkeypatch.setattr(client._session, "request", lambda *a, **k: answer)
    for ask in (
        lambda: client.generate("hi", 2),
        lambda: client.generate("hi", 2, stream=True),
        lambda: client.score([1], (7,)),
        lambda: client.tokenize("hi"),
        client.server_info,
    ):
        answer.raw, answer._content, answer._content_consumed = io.BytesIO(body), False, False
        try:
            ask()
        except ServingError as fault:
            assert "w1" in fault.message
