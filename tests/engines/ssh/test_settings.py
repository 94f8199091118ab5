"""The fleet section of a playbook: what it makes, and every mistake at once with its line."""

from __future__ import annotations

import textwrap

import pytest

from phases.base.errors import PlaybookError
from phases.engines.ssh.services import DockerDriver, ProcessDriver, SystemdDriver
from phases.engines.ssh.settings import FleetSettings
from phases.playbook import typed
from phases.playbook.located import Mistakes, load_text

GOOD = """
hosts:
  - {name: w0, address: node-a, root: /srv/w0, port: 30000}
  - {name: w1, address: node-a, root: /srv/w1, port: 30001, vars: {model: /models/k2}, labels: {role: canary}}
  - name: w2
    address: local
    root: /srv/w2
    port: 30002
    ssh: {user: other, port: 2222}
ssh: {user: serving, known_hosts: [/etc/phasegate/known_hosts], gateway: ops@bastion:22}
timeouts: {connect: 5s, command: 2m}
service: {kind: systemd, name: "sglang-{name}", drain: 20s, ready: 4m}
lease: {arm: 10m, bake: 1m}
router: {kind: sglang, url: "http://router:30100"}
"""


def read(text: str) -> tuple[FleetSettings, Mistakes]:
    mistakes = Mistakes()
    node = load_text(textwrap.dedent(text), "playbook.yaml", mistakes)
    return typed.read(FleetSettings, node, mistakes), mistakes


def test_workers_have_what_the_section_says() -> None:
    settings, mistakes = read(GOOD)
    mistakes.raise_if_any()
    w0, w1, w2 = settings.workers()
    assert (w0.ssh.user, w0.ssh.gateway, w0.timeouts.connect, w0.timeouts.command) == (
        "serving",
        "ops@bastion:22",
        5,
        120,
    )
    assert w1.values == {"port": "30001", "model": "/models/k2"} and w1.labels["role"] == "canary"
    assert w1.url == "http://node-a:30001" and w2.url == "http://127.0.0.1:30002"
    assert (w2.ssh.user, w2.ssh.port, w2.local) == ("other", 2222, True)
    assert settings.service.driver(w1) == SystemdDriver("sglang-w1", False, 20)


@pytest.mark.parametrize(
    ("host", "url", "at_router"),
    [
        ('address: "2001:db8::7"', "http://[2001:db8::7]:30000", "http://[2001:db8::7]:30000"),
        ('address: "[2001:db8::7]"', "http://[2001:db8::7]:30000", "http://[2001:db8::7]:30000"),
        ('address: "fe80::1%eth0"', "http://[fe80::1%25eth0]:30000", "http://[fe80::1%25eth0]:30000"),
        ("address: local", "http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ('address: node-b, url: "https://w0.example/"', "https://w0.example", "https://w0.example"),
        ('address: node-b, router_url: "http://10.0.0.7:30000/"', "http://node-b:30000", "http://10.0.0.7:30000"),
    ],
)
def test_where_a_worker_answers_us_and_the_router(host: str, url: str, at_router: str) -> None:
    settings, mistakes = read(f"hosts:\n  - {{name: w0, {host}, root: /srv/w0, port: 30000}}\n")
    mistakes.raise_if_any()
    (worker,) = settings.workers()
    assert (worker.url, worker.at_router) == (url, at_router)


@pytest.mark.parametrize("kind, made", [("process", ProcessDriver(30)), ("docker", DockerDriver("box", 30))])
def test_service_kinds(kind: str, made: object) -> None:
    settings, _ = read(
        GOOD.replace('{kind: systemd, name: "sglang-{name}", drain: 20s, ready: 4m}', f"{{kind: {kind}, name: box}}")
    )
    assert settings.service.driver(settings.workers()[0]) == made


@pytest.mark.parametrize(
    "old, new, line, message",
    [
        ("name: w1", "name: w0", 4, "the name 'w0' is used twice"),
        ("root: /srv/w1", "root: /srv/w0", 4, "the place 'node-a:/srv/w0' is used twice"),
        ("port: 30001", "port: 30000", 4, "the url 'http://node-a:30000' is used twice"),
        ("port: 30001", "port: 1, url: 'http://NODE-A.:30000/'", 4, "the url 'http://node-a:30000' is used twice"),
        (
            "port: 30001",
            "port: 1, router_url: 'http://node-a:30000'",
            4,
            "the router_url 'http://node-a:30000' is used twice",
        ),
        ("port: 30001", "port: 1, url: 'http://node-a:30000@1'", 4, "`url` names a rank or a user"),
        ("port: 30001", "port: 1, router_url: 'http://2001:db8::7:30000'", 4, "an IPv6 literal in brackets"),
        ("name: w1, address: node-a", "name: w1, address: node a", 4, "`address` is no host name or address"),
        ("vars: {model:", "vars: {port:", 4, "`vars` cannot give another port than the worker has"),
        ("vars: {model:", "vars: {root:", 4, "`vars` cannot give another root than the worker has"),
        ("root: /srv/w0", "root: srv", 3, "text of the form"),
        ("port: 30000", "portt: 30000", 3, "unknown key 'portt' (did you mean 'port'?)"),
        ('name: "sglang-{name}", ', "", 12, "a systemd service needs its `name`"),
        ('name: "sglang-{name}"', "name: --force", 12, "`name` '--force' would be an option to systemctl or docker"),
        ("kind: systemd", "kind: sytemd", 12, "one of process, systemd, docker"),
        ("arm: 10m", "arm: 1m", 13, "must be longer than service.ready + service.drain (260 s)"),
        (', url: "http://router:30100"', "", 14, "needs its `url`"),
        ("kind: sglang, url", "kind: none, add: [a], url", 14, "`remove` is missing"),
        ("connect: 5s", "connect: soon", 11, "a duration"),
    ],
)
def test_mistakes_name_their_line_and_the_cure(old: str, new: str, line: int, message: str) -> None:
    assert old in GOOD
    _, mistakes = read(GOOD.replace(old, new, 1))
    with pytest.raises(PlaybookError) as caught:
        mistakes.raise_if_any()
    assert f"playbook.yaml:{line}: " in str(caught.value) and message in str(caught.value)


def test_all_mistakes_come_at_once() -> None:
    _, mistakes = read(
        GOOD.replace("port: 30001", "port: 0").replace("bake: 1m", "bake: -1").replace("root: /srv/w2", "root: 3")
    )
    assert len(list(mistakes)) == 3
