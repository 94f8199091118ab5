"""Where a rollback by hand goes when the ledger at hand does not know the rollout: what the hosts recorded of it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from phases.base.errors import Exit, LedgerError
from phases.base.results import Results
from phases.base.verdict import Verdict
from phases.engines.ssh.host import Host
from phases.engines.ssh.lease import LeaseState
from phases.engines.ssh.releases import NEVER
from phases.full_rollout import steps as waves
from phases.ledger.checkpoint import RESULTS, Draft, canonical_json
from phases.ledger.ledger import Ledger
from phases.ledger.objects import write_tree
from phases.production.production import WorkerState
from phases.rollback import by_hand
from phases.rollback.by_hand import _recorded, _replaced
from phases.rollback.steps import Rollback
from phases.trial.reference import Level, Reference
from phases.watch import phase as watch


def worker(current: str, release: str, previous: str, state: str = "kept") -> WorkerState:
    lease = LeaseState("id", state, release, previous, current, 0.0, guard_works=False, active=False, reason="")
    return WorkerState(Host("w", "local", "/srv/w"), current, current, lease, serving=True, in_service=True)


@pytest.mark.parametrize(
    ("states", "goes_to"),
    [
        ([worker("new", "new", "old"), worker("new", "new", "old")], "old"),
        ([worker("new", "new", "old"), worker("new", "new", "older")], ""),  # they had different releases before
        ([worker("old", "new", "old"), worker("old", "new", "old")], ""),  # rolled back already: not one further
        ([worker("new", "new", "old", "reverted")], ""),
        ([worker("new", "new", NEVER)], ""),
        ([WorkerState(Host("w", "local", "/srv/w"), "new", "new")], ""),  # never under a lease
    ],
)
def test_what_a_rollout_replaced_is_known_by_every_host_or_not_at_all(states: list[WorkerState], goes_to: str) -> None:
    assert _replaced(states) == goes_to


@pytest.mark.parametrize(
    ("code", "ends_with"), [(Exit.ROLLED_BACK, 7), (Exit.ROLLBACK_INCOMPLETE, 8), (Exit.PASSED, 1)]
)
def test_how_production_ended_is_told_though_the_ledger_refuses_to_record_it(
    monkeypatch: pytest.MonkeyPatch, code: Exit, ends_with: int
) -> None:
    def refuse(*arguments: object) -> None:
        raise LedgerError("branch 'checkpoints' is checked out here.")

    monkeypatch.setattr(by_hand, "record", refuse)
    said: list[str] = []
    with pytest.raises(LedgerError, match="is checked out") as caught:
        by_hand.recorded(None, Rollback("asked for", True, (), {}, ()), 0.0, None, said.append, code)  # type: ignore[arg-type]
    assert caught.value.exit_code == ends_with and said == [
        "production is restored; what failed is only to write that down"
    ]


@pytest.fixture
def rollouts(tmp_path: Path) -> Ledger:
    """Two full rollouts that passed: to `b` from `a`, then to `c` from `b`."""
    subprocess.run(["git", "init", "-q", "-b", "main", str(tmp_path)], check=True)
    for key, value in (("user.name", "Ada"), ("user.email", "ada@example.org")):
        subprocess.run(["git", "-C", str(tmp_path), "config", key, value], check=True)
    ledger = Ledger(tmp_path)
    for before, after in ("ab", "bc"):
        results = Results("full-rollout", "k", facts={"end": {"last_good": after, "previous": before}}).to_json()
        ledger.record(
            Draft(
                "full-rollout",
                Verdict.PASS,
                "k",
                f"run-{after}",
                {RESULTS: canonical_json(results)},
                {"commit": None},
                1_700_000_000.0,
            )
        )
    return ledger


def damage(ledger: Ledger, path: str, content: bytes) -> None:
    tip = ledger.tip()
    assert tip
    commit = ledger.commit(write_tree(ledger.git, tip, {path: content}), [tip], "Damage it\n", 2.0)
    ledger.git.run("update-ref", "refs/heads/checkpoints", commit)


def test_a_damaged_checkpoint_keeps_no_rollback_from_going_back(rollouts: Ledger) -> None:
    assert (_recorded(rollouts, "c"), _recorded(rollouts, "b"), _recorded(rollouts, "x")) == ("b", "a", "")
    damage(rollouts, "checkpoints/0001-full-rollout-PASS/manifest.json", b"{")
    assert (_recorded(rollouts, "c"), _recorded(rollouts, "b")) == (
        "b",
        "",
    )  # "": then what the hosts themselves know counts


@pytest.mark.parametrize("path", ["manifest.json", RESULTS])
@pytest.mark.parametrize("content", [b"{", b"[]", b"null", b"\xff", b'{"schema": 1}'])
def test_an_older_rollout_does_not_speak_for_a_newer_one_that_is_damaged(
    rollouts: Ledger, path: str, content: bytes
) -> None:
    damage(rollouts, f"checkpoints/0002-full-rollout-PASS/{path}", content)
    assert _recorded(rollouts, "b") == ""


def test_the_reference_is_of_this_playbooks_own_phase_3_and_a_ledger_in_disorder_leaves_nobody_unwatched(
    rollouts: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passed(playbook: str, low: float) -> str:
        results = Results(
            "tp8-canary", "k", facts={"reference": [Level("e2e", 0.5, low, 2.0, 100).to_json()]}
        ).to_json()
        draft = Draft(
            "tp8-canary",
            Verdict.PASS,
            "k",
            playbook,
            {RESULTS: canonical_json(results)},
            {"commit": None},
            1_700_000_000.0,
            playbook=f"{playbook} sha256:0",
        )
        return rollouts.record(draft).directory

    monkeypatch.setattr(waves, "ledger_of", lambda playbook: rollouts)
    run = SimpleNamespace(playbook=SimpleNamespace(name="mine"))
    assert waves.recorded_reference(run) == Reference()  # type: ignore[arg-type]
    mine, _ = (
        passed("mine", 1.0),
        passed("another", 0.001),
    )  # of another model, say: production would seem to have got slower
    damage(rollouts, "checkpoints/0001-full-rollout-PASS/manifest.json", b"{")
    recorded = waves.recorded_reference(run)  # type: ignore[arg-type]
    assert [level.low for level in recorded.levels] == [1.0]
    assert (recorded.checkpoint, recorded.kernel, recorded.recorded_at) == (
        mine.rpartition("/")[2],
        "k",
        1_700_000_000.0,
    )

    damage(rollouts, f"{mine}/{RESULTS}", b"null")
    soaked: list[object] = []
    monkeypatch.setattr(watch, "_standing", lambda production: None)
    monkeypatch.setattr(
        watch.judging, "soak", lambda production, judge, fit, reference, *more: soaked.append(reference) or "looked"
    )
    said: list[str] = []
    settings = SimpleNamespace(judge=None, interval=1.0, reference=None)
    assert watch._look(run, None, settings, None, said.append) == "looked"  # type: ignore[arg-type]
    assert soaked == [Reference()] and said == [
        "watching without the latencies of Phase 3: 0003-tp8-canary-PASS holds no readable results. See `phase checkpoint verify 3`."
    ]
