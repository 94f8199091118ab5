"""The playbook's `notify` section, and what a run says through it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from phases.base.errors import Exit, PlaybookError
from phases.base.findings import Health
from phases.notify.doctor import check_target
from phases.notify.message import TEXT_LIMIT, Event, Message, gate_event
from phases.notify.settings import NotifySettings, WebhookSettings
from phases.notify.targets import targets_of
from phases.playbook import loader
from phases.playbook.located import Mistakes, load_text
from tests.cli.conftest import phase, repository  # noqa: F401 - fixtures


def _notify(repository, section):
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("name: light", f"name: light\n{section}", 1))
    return path


GOOD = """notify:
  flush: 10s
  webhooks:
    - {url_env: SLACK_URL, events: [gate-waiting, regression]}
    - {url_file: pager.url, token_env: PAGER_TOKEN, timeout: 5s, retries: 1}
  hooks:
    - {run: [./page.sh, --team, x], events: [rollback-started], timeout: 3s}
"""


def test_a_good_section_is_read_and_the_schema_says_the_same(repository):
    path = _notify(repository, GOOD)
    settings = loader.load(path).sections["notify"]
    assert settings.webhooks[0].events == (Event.GATE_WAITING, Event.REGRESSION) and settings.webhooks[1].timeout == 5.0
    assert settings.hooks[0].run == ("./page.sh", "--team", "x") and settings.flush == 10.0
    jsonschema.validate(load_text(path.read_text(), "p", Mistakes()).plain(), loader.schema())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{url_env: A, url: 'http://h/'}", "exactly one of url, url_env and url_file"),
        ("{}", "exactly one of"),
        ("{url: 'ftp://h/s3cret'}", "begins with http://"),
        ("{url: 'https://me:hunter2@h/x'}", "password does not belong"),
        ("{url: 'http://h/', events: [gate-wating]}", "did you mean 'gate-waiting'"),
        ("{url_env: A, token_env: B, token_file: c}", "one of token_env and token_file"),
        ("{url_env: 'https://h/s3cret'}", "name of an environment variable"),
        ("{url_file: 'https://h/s3cret'}", "path of a file"),
        ("{url: 'hooks.example.org/s3cret'}", "begins with http://"),
        ("{url_env: A, token_env: 's3 cret'}", "name of an environment variable"),
        ("{ulr: x}", "did you mean 'url'"),
    ],
)
def test_mistakes_are_found_with_their_line(repository, line, words):
    path = _notify(repository, f"notify:\n  webhooks:\n    - {line}\n")
    with pytest.raises(PlaybookError) as caught:
        loader.load(path)
    assert (
        words in str(caught.value)
        and "playbook.yaml:6" in str(caught.value)
        and not any(secret in str(caught.value) for secret in ("hunter2", "s3cret", "s3 cret"))
    )


def test_a_run_tells_its_gate_and_the_secret_stays_out_of_everything(repository, phase, receiver, monkeypatch):
    _notify(
        repository,
        "notify:\n  webhooks: [{url_env: SLACK_URL, retries: 0}]\n  hooks: [{run: [sh, -c, 'cat > told.json']}]\n",
    )
    monkeypatch.setenv("SLACK_URL", receiver.url)
    _run(repository)
    (body,) = receiver.bodies
    assert (
        body["event"] == "gate-waiting"
        and body["verdict"] == "PASS"
        and body["exit"] == 3
        and body["next"] == "phase gate review 1"
    )
    assert (
        body["checkpoint"] == "0001-build-parity-PASS"
        and body["digest"] == phase.json("checkpoint", "list")["checkpoints"][0]["digest"][:16]
    )
    assert json.loads((repository.path / "told.json").read_text())["event"] == "gate-waiting"
    for path in (repository.path / ".phase").rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path
    assert "s3cret" not in repository.git("log", "-p", "--all")


def _run(repository, script="tests.run.light_phase:light_phase"):
    from phases.notify.teller import teller_of
    from phases.notify.watcher import Telling
    from phases.run.runner import Silent

    warned = []
    with teller_of(repository.playbook, "mine", "build-parity", warned.append) as teller:
        try:
            repository.run(watcher=Telling(Silent(), teller), script=script)
        except KeyError:
            pass
    return warned


def test_a_failed_gate_says_why_and_an_error_says_where(repository, receiver, monkeypatch):
    _notify(repository, "notify:\n  webhooks: [{url_env: SLACK_URL}]\n")
    monkeypatch.setenv("SLACK_URL", receiver.url)
    path = repository.path / "playbook.yaml"
    path.write_text(path.read_text().replace("variants: [vectorised]", "variants: [rows]"))
    _run(repository)
    (body,) = receiver.bodies
    assert (
        body["event"] in ("gate-failed", "gate-inconclusive")
        and body["reasons"]
        and body["reasons"][0].startswith("parity: ")
    )
    _run(repository, script="tests.run.light_phase:failing_phase")
    assert (
        receiver.bodies[1]["event"] == "run-stopped"
        and "step 'fail'" in receiver.bodies[1]["headline"]
        and receiver.bodies[1]["reasons"] == ["internal error KeyError"]
    )


def test_a_target_that_lacks_its_secret_is_warned_of_before_the_run(repository):
    _notify(repository, "notify:\n  webhooks: [{url_env: NOT_SET_ANYWHERE}]\n")
    warned = _run(repository)
    assert (
        "NOT_SET_ANYWHERE" in warned[0]
        and "will not be told" in warned[0]
        and "was not told of gate-waiting" in warned[1]
    )


def test_the_test_message(repository, phase, receiver):
    assert "no `notify` section" in phase("notify", "test", code=2).stderr
    _notify(
        repository,
        "notify:\n  webhooks: [{url_env: SLACK_URL, events: [regression]}]\n  hooks: [{run: [sh, -c, 'echo from the hook >&2; exit 4']}]\n",
    )
    done = phase("notify", "test", "--json", code=1, env={"SLACK_URL": receiver.url})
    rows = json.loads(done.stdout)["targets"]
    assert [(row["target"], row["result"]) for row in rows] == [("webhook $SLACK_URL", "ok"), ("hook sh", "failed")]
    assert "exit code 4" in rows[1]["why"] and "from the hook" in done.stderr and receiver.bodies[0]["event"] == "test"
    receiver.answers = [403]
    shown = phase("notify", "test", code=1, env={"SLACK_URL": receiver.url})
    assert "status 403" in shown.stdout and "s3cret" not in shown.stdout + shown.stderr
    unset = json.loads(phase("notify", "test", "--json", code=1, env={"SLACK_URL": ""}).stdout)["targets"][0]
    assert "SLACK_URL with its address is not set" in unset["why"]


def test_texts_are_bounded_and_further_fields_cannot_replace_the_common_ones():
    message = Message(
        Event.REGRESSION, "p", "k", "f", "h" * 9000, 0.0, fields={"event": "gate-passed", "text": "forged"}
    )
    assert (
        len(message.text) == TEXT_LIMIT
        and message.to_json()["event"] == "regression"
        and message.to_json()["text"] == message.text
    )


def test_every_end_of_a_run_is_some_event():
    assert {
        code: gate_event(code, "PASS" if code in (Exit.PASSED, Exit.WAITING_FOR_REVIEW) else "FAIL").value
        for code in Exit
    } == {
        Exit.PASSED: "gate-passed",
        Exit.WAITING_FOR_REVIEW: "gate-waiting",
        Exit.INCONCLUSIVE: "gate-inconclusive",
        **dict.fromkeys(
            (Exit.OPERATIONAL, Exit.USAGE, Exit.GATE_FAILED, Exit.LOCKED, Exit.ROLLED_BACK, Exit.ROLLBACK_INCOMPLETE),
            "gate-failed",
        ),
    }


def test_the_doctor_says_who_would_not_be_told(repository, phase, receiver):
    hook = "{run: [no-such-program-here]}"
    _notify(
        repository,
        f"notify:\n  webhooks: [{{url_env: SLACK_URL}}, {{url: '{receiver.url}'}}]\n  hooks: [{hook}]\nmetrics: {{textfile: nowhere/x.prom}}\n",
    )
    rows = [
        row for row in phase.json("doctor", env={"SLACK_URL": ""})["findings"] if row["name"] in ("notify", "metrics")
    ]
    assert [row["health"] for row in rows] == ["warning", "ok", "warning", "warning"] and all(
        row["cure"] for row in rows if row["health"] == "warning"
    )
    assert "SLACK_URL" in rows[0]["found"] and "no such program" in rows[2]["found"] and "nowhere" in rows[3]["found"]
    assert not receiver.requests and "s3cret" not in json.dumps(rows)


def test_the_doctor_warns_of_a_token_that_would_go_over_a_network_unencrypted():
    def found(**settings):
        (target,) = targets_of(
            NotifySettings(webhooks=(WebhookSettings(**settings),)),
            Path("."),
            {"TOKEN": "s3cret-token", "URL": "http://pager.example:99x/hook", "BROKEN": "http://[::1"},
        )
        return check_target(target)[0]

    exposed = found(url="http://pager.example/hook", token_env="TOKEN")
    assert (
        exposed.health is Health.WARNING
        and "unencrypted" in exposed.found
        and "https://" in exposed.cure
        and "s3cret" not in exposed.found
    )
    for fine in (
        {"url": "https://pager.example/hook", "token_env": "TOKEN"},
        {"url": "http://127.0.0.1:8/hook", "token_env": "TOKEN"},
        {"url": "http://pager.example/hook"},
    ):
        assert found(**fine).health is Health.OK
    assert (
        found(url_env="URL", token_env="TOKEN").health is Health.WARNING
        and found(url_env="BROKEN", token_env="TOKEN").health is Health.OK
    )
