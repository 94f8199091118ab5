"""Where a rollback by hand goes when the ledger at hand does not know the rollout: what the hosts recorded of it."""

from __future__ import annotations

import pytest

from phases.errors import Exit, LedgerError
from phases.fleet.host import Host
from phases.fleet.lease import LeaseState
from phases.fleet.releases import NEVER
from phases.rollout import by_hand
from phases.rollout.by_hand import _replaced
from phases.rollout.production import WorkerState
from phases.rollout.rollback import Rollback


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


@pytest.mark.parametrize(("code", "ends_with"), [(Exit.ROLLED_BACK, 7), (Exit.ROLLBACK_INCOMPLETE, 8), (Exit.PASSED, 1)])
def test_how_production_ended_is_told_though_the_ledger_refuses_to_record_it(monkeypatch: pytest.MonkeyPatch, code: Exit, ends_with: int) -> None:
    def refuse(*arguments: object) -> None:
        raise LedgerError("branch 'checkpoints' is checked out here.")

    monkeypatch.setattr(by_hand, "record", refuse)
    said: list[str] = []
    with pytest.raises(LedgerError, match="is checked out") as caught:
        by_hand.recorded(None, Rollback("asked for", True, (), {}, ()), 0.0, None, said.append, code)  # type: ignore[arg-type]
    assert caught.value.exit_code == ends_with and said == ["production is restored; what failed is only to write that down"]
