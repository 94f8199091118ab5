"""Hooks and webhooks: one attempt at a time, against a real server and real programs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from phases.notify.settings import HookSettings, WebhookSettings
from phases.notify.targets import THREADS, DeliveryError, Hook, Webhook


def _webhook(base=Path(), env=None, **settings):
    return Webhook(WebhookSettings(**settings), base, env or {})


def _hook(code, *arguments, **settings):
    return Hook(HookSettings((sys.executable, "-c", code, *arguments), **settings), Path())


def test_slack_gets_its_text_and_machines_their_fields(receiver, message):
    _webhook(url=receiver.url).deliver(message)
    (path, headers, body) = receiver.requests[0]
    assert path.endswith("/s3cret") and headers["Content-Type"] == "application/json" and "Authorization" not in headers
    assert body["text"].splitlines() == [
        "[prod] tp8-canary failed",
        "- itl p95: &lt;!channel&gt; slower",
        "phase gate review 3",
    ]
    assert (body["event"], body["verdict"], body["checkpoint"], body["exit"]) == (
        "gate-failed",
        "FAIL",
        "0003-tp8-canary-FAIL",
        7,
    )
    assert (
        body["reasons"] == ["itl p95: <!channel> slower"]
        and body["at"] == "2025-11-29T20:00:00Z"
        and body["schema"] == "phasegate/notification/v1"
    )


def test_address_and_token_from_environment_and_files(receiver, message, tmp_path):
    (tmp_path / "url").write_text(receiver.url + "\n")
    (tmp_path / "token").write_text("t0ken\nanother line\n")
    _webhook(tmp_path, url_file=Path("url"), token_file=Path("token")).deliver(message)
    _webhook(env={"URL": receiver.url, "TOKEN": "t1"}, url_env="URL", token_env="TOKEN").deliver(message)
    assert [headers["Authorization"] for _, headers, _ in receiver.requests] == ["Bearer t0ken", "Bearer t1"]


def test_a_netrc_of_the_user_is_not_sent(receiver, message, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    _webhook(url=receiver.url).deliver(message)
    assert "Authorization" not in receiver.requests[0][1]


@pytest.mark.parametrize(
    ("answer", "again", "words"),
    [
        (500, True, "status 500"),
        (503, True, "status 503"),
        (429, True, "status 429"),
        (404, False, "status 404"),
        (403, False, "status 403"),
        ((302, {"Location": "/elsewhere"}), False, "redirects"),
        ((308, {"Location": "/elsewhere"}), False, "redirects"),
    ],
)
def test_answers_that_are_no_success(receiver, message, answer, again, words):
    receiver.answers = [answer]
    with pytest.raises(DeliveryError, match=words) as caught:
        _webhook(url=receiver.url).deliver(message)
    assert caught.value.again is again and "s3cret" not in str(caught.value)
    assert [path for path, _, _ in receiver.requests] == ["/services/T0/B0/s3cret"]  # nothing was followed


def test_retry_after_is_kept_within_a_minute(receiver, message):
    for given, wanted in (("7", 7.0), ("86400", 60.0), ("tomorrow", 0.0)):
        receiver.answers = [(429, {"Retry-After": given})]
        with pytest.raises(DeliveryError) as caught:
            _webhook(url=receiver.url).deliver(message)
        assert caught.value.after == wanted


def test_a_server_that_never_answers_and_one_that_is_not_there(receiver, message):
    receiver.answers = [receiver.HANG]
    with pytest.raises(DeliveryError, match="did not answer within 0.3 s") as caught:
        _webhook(url=receiver.url, timeout=0.3).deliver(message)
    assert caught.value.again
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DeliveryError, match="refused") as caught:
        _webhook(url=f"http://127.0.0.1:{port}/s3cret").deliver(message)
    assert (
        caught.value.again
        and "s3cret" not in str(caught.value)
        and caught.value.__cause__ is None
        and caught.value.__suppress_context__
    )


def test_a_server_that_sends_a_byte_now_and_then_is_not_waited_for_and_not_asked_without_end(message):
    with socket.create_server(("127.0.0.1", 0)) as server:
        over, given = threading.Event(), _webhook(url=f"http://127.0.0.1:{server.getsockname()[1]}/s3cret", timeout=0.3)
        reasons = []
        drips = threading.Thread(target=_drip, args=(server, over))
        drips.start()
        for _ in range(5):
            with pytest.raises(DeliveryError) as caught:
                given.deliver(message)
            reasons.append(caught.value.message)
        over.set()
        drips.join()
    assert reasons == ["it did not answer within 0.3 s."] * 4 + ["4 earlier attempts still hang."]


def _drip(server, over):
    """Every read of the client succeeds in time, and its answer never ends."""
    server.settimeout(0.02)
    clients = []
    while not over.wait(0.05):
        with contextlib.suppress(TimeoutError):
            clients.append(server.accept()[0])
            clients[-1].sendall(b"HTTP/1.1 200 OK\r\n")
        for client in clients:
            client.sendall(b"X-More: 1\r\n")
    for client in clients:
        client.close()


def test_certificates_that_are_not_there(message, monkeypatch, tmp_path):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "gone.pem"))
    with pytest.raises(DeliveryError, match="certificates") as caught:
        _webhook(url="https://127.0.0.1:9/s3cret").deliver(message)
    assert not caught.value.again


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url_env": "NOWHERE"}, "NOWHERE with its address is not set"),
        ({"url_file": Path("gone")}, "file gone .* cannot be read"),
        ({"url_env": "PLAIN"}, "is not one"),
        ({"url_env": "URL", "token_env": "NL"}, "characters that no token has"),
        ({"url_file": Path("empty")}, "is empty"),
        ({"url_file": Path("pipe")}, "is empty"),
        ({"url_env": "PORT"}, "not one that can be sent to"),
    ],
)
def test_what_is_missing_is_named_and_what_is_secret_is_not(message, tmp_path, settings, words):
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    env = {"PLAIN": "s3cret", "URL": "http://127.0.0.1/s3cret", "NL": "s3\ncret", "PORT": "http://127.0.0.1:s3cret/"}
    with pytest.raises(DeliveryError, match=words) as caught:
        _webhook(tmp_path, env, **settings).deliver(message)
    assert (
        not caught.value.again
        and "s3cret" not in str(caught.value)
        and "cret" not in str(caught.value).replace("secret", "")
    )


def test_a_debug_log_does_not_get_the_address(receiver, message, caplog):
    caplog.set_level(logging.DEBUG)
    thread = threading.Thread(target=_webhook(url=receiver.url).deliver, args=(message,), name=f"{THREADS}-0")
    thread.start()
    thread.join(10)
    assert len(receiver.requests) == 1 and "s3cret" not in caplog.text


def test_a_hook_gets_json_on_stdin_and_a_few_variables(message, tmp_path):
    code = "import json, os, sys; json.dump([json.load(sys.stdin), {k: v for k, v in os.environ.items() if k.startswith('PHASE_')}, sys.argv], open(sys.argv[1], 'w'))"
    target = tmp_path / "got"
    _hook(code, str(target), "a b; $(false)").deliver(message)
    body, variables, arguments = json.loads(target.read_text())
    assert body["event"] == "gate-failed" and body["text"].startswith("[prod] tp8-canary failed\n- itl p95: <!channel>")
    assert (
        variables["PHASE_EVENT"] == "gate-failed"
        and variables["PHASE_VERDICT"] == "FAIL"
        and variables["PHASE_TEXT"] == body["text"]
    )
    assert arguments[2] == "a b; $(false)"


def test_a_hook_that_fails_or_cannot_start(message):
    with pytest.raises(DeliveryError, match="exit code 3") as caught:
        _hook("raise SystemExit(3)").deliver(message)
    assert caught.value.again
    with pytest.raises(DeliveryError, match="cannot be started") as caught:
        Hook(HookSettings(("/nowhere/page",)), Path()).deliver(message)
    assert not caught.value.again
    _hook("import sys; sys.stdin.close()").deliver(message)  # it need not read what it is given


def test_a_hook_that_hangs_is_ended_with_what_it_started(message, tmp_path):
    pid_file = tmp_path / "pid"
    hook = (
        "sh",
        "-c",
        'sleep 600 & echo $! > "$0"; wait',
        str(pid_file),
    )  # a shell begins at once, even on a busy machine
    with pytest.raises(DeliveryError, match="longer than 2 s"):
        Hook(HookSettings(hook, timeout=2), Path()).deliver(message)
    pid = int(pid_file.read_text())
    until = time.monotonic() + 60
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ready_sees_what_is_missing_without_sending(receiver):
    with pytest.raises(DeliveryError, match="no such program"):
        Hook(HookSettings(("no-such-program-here",)), Path()).ready()
    Hook(HookSettings((sys.executable,)), Path(os.getcwd())).ready()
    with pytest.raises(DeliveryError, match="GONE"):
        _webhook(url=receiver.url, token_env="GONE").ready()
    assert not receiver.requests
