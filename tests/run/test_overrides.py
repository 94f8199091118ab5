"""An INCONCLUSIVE gate that a person overrides: where the playbook allows it, never as a PASS, and said by all that is built on it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner

from phases.base.clock import SystemClock
from phases.base.errors import Exit, GateError, LedgerError, UsageError
from phases.cli.main import cli
from phases.ledger.ledger import Ledger
from phases.ledger.verify import verify_ledger
from phases.run import progress, session
from phases.run.runner import Silent

PLAYBOOK = """
schema: phasegate/playbook/v1
name: light
kernel: kernel.yaml
phases:
  build-parity:
    allow_override: {allowed}
    gate:
      rules:
        - {{rule: measurement, metric: nobody_measured_it, at_most: 1, absent: inconclusive}}
  sglang-integration:
    incumbent: {{backend: torch_native}}
"""


@pytest.fixture
def held(repository, monkeypatch):
    """A repository whose first phase ended INCONCLUSIVE, and `phase` called in it."""
    write(repository, allowed="true")
    assert run(repository, 0).code is Exit.INCONCLUSIVE
    monkeypatch.chdir(repository.path)
    return repository


def write(repository, allowed):
    (repository.path / "playbook.yaml").write_text(PLAYBOOK.format(allowed=allowed))
    repository.git("commit", "-qam", f"allow_override: {allowed}")


def run(repository, number, notice=lambda line: None):
    section = repository.playbook.phases[number]
    light = dataclasses.replace(section.kind, script="tests.run.light_phase:light_phase")
    return session.run_phase(
        repository.playbook,
        dataclasses.replace(section, kind=light),
        resume=False,
        clock=SystemClock(),
        watcher=Silent(),
        notice=notice,
    )


def phase(*arguments):
    done = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def override(repository):
    digest = Ledger(repository.path).find("1").digest[:16]
    return phase("gate", "override", "1", "--digest", digest, "--reason", "the traffic has no q65")


def states(repository):
    playbook = repository.playbook
    known = progress.standings(playbook, Ledger(repository.path), session.kernel_digest(playbook))
    return [row.state for row in known]


def test_it_opens_the_next_phase_as_an_override_and_every_page_says_so(held):
    with pytest.raises(GateError, match="build-parity is inconclusive"):
        run(held, 1)
    assert "phase gate override 1 --digest" in phase("gate", "review", "1")
    assert "0001-build-parity-INCONCLUSIVE overridden by Ada <ada@example.org>: the traffic" in override(held)
    assert states(held)[0] is progress.State.OVERRIDDEN
    said = []
    run(held, 1, said.append)
    words = "0001-build-parity-INCONCLUSIVE, overridden by Ada <ada@example.org>: the traffic has no q65"
    assert f"stands on an override: {words}" in said
    ledger = Ledger(held.path)
    second = ledger.find("2")
    assert second.manifest["facts"]["overrides"] == [words]  # for ever: the manifest is what the digest is of
    assert words in " ".join(phase("gate", "review", "2").split())
    assert (
        f"stands on an override: {words}".replace("<", "&lt;").replace(">", "&gt;")
        in ledger.files(second)["report.html"].decode()
    )
    first = " ".join(phase("gate", "review", "1").split())
    assert first.startswith("INCONCLUSIVE 0001-build-parity-INCONCLUSIVE overridden, not passed")
    assert "override: Ada <ada@example.org>" in first
    status = json.loads(phase("status", "--json"))["phases"][0]
    assert status["state"] == "overridden" and status["checkpoint"]["verdict"] == "INCONCLUSIVE"
    assert "Overridden build-parity: the traffic has no q65" in phase("status")
    assert "overridden" in phase("checkpoint", "list") and not verify_ledger(ledger)


def test_only_where_the_playbook_allows_it_now(held):
    write(held, allowed="false")
    with pytest.raises(UsageError, match=r"playbook.yaml:\d+: build-parity does not allow an override"):
        override(held)
    assert "gate override" not in phase("gate", "review", "1")
    write(held, allowed="true")  # who lets a phase through is not what it measured: nothing is stale
    override(held)
    assert states(held)[0] is progress.State.OVERRIDDEN
    write(held, allowed="false")
    assert states(held)[0] is progress.State.INCONCLUSIVE


def test_a_changed_gate_makes_it_stale_and_a_no_ends_it(held):
    override(held)
    text = (held.path / "playbook.yaml").read_text()
    (held.path / "playbook.yaml").write_text(text.replace("at_most: 1", "at_most: 2"))
    assert states(held)[0] is progress.State.STALE
    (held.path / "playbook.yaml").write_text(text)
    phase("gate", "reject", "1", "--digest", Ledger(held.path).find("1").digest[:16], "--reason", "no")
    assert states(held)[0] is progress.State.REJECTED


def test_an_unsigned_decision_does_not_count_where_signatures_are_wanted(held):
    override(held)
    text = (held.path / "playbook.yaml").read_text()
    (held.path / "playbook.yaml").write_text(
        text.replace("allow_override: true", "allow_override: true\n    signed_decisions: true")
    )
    assert states(held)[0] is progress.State.INCONCLUSIVE
    with pytest.raises(LedgerError, match="user.signingkey"):  # whatever git is set to, this one is signed or is none
        override(held)
