"""What a production phase refuses to start on."""

from __future__ import annotations

import pytest

from phases.errors import FleetError
from phases.fleet.host import Host
from phases.fleet.lease import LeaseState
from phases.rollout.production import WorkerState
from phases.rollout.shared_steps import _require_one_release, _require_well

OLD, NEW = "a" * 64, "b" * 64


def worker(number: int, current: str = OLD, *, leased: bool = False, serving: bool = True, in_service: bool = True) -> WorkerState:
    lease = LeaseState("l", "confirmed", current, OLD, current, 50.0, True, leased, "") if leased else None
    return WorkerState(Host(f"w{number}", "local", f"/srv/w{number}"), current, OLD, lease, serving, in_service)


def test_a_fleet_of_mixed_releases_is_refused_and_so_is_one_that_runs_the_candidate() -> None:
    _require_one_release([worker(1), worker(2)], NEW)
    _require_one_release([worker(1, NEW, leased=True), worker(2)], NEW)  # moved by an earlier process of this run
    with pytest.raises(FleetError, match=r"different releases before anything has moved: aaaaaaaaaaaa on w1; bbbbbbbbbbbb on w2"):
        _require_one_release([worker(1), worker(2, NEW)], NEW)
    with pytest.raises(FleetError, match="all workers run the candidate bbbbbbbbbbbb already"):
        _require_one_release([worker(1, NEW), worker(2, NEW)], NEW)


def test_a_worker_that_does_not_serve_or_gets_nothing_is_named() -> None:
    with pytest.raises(FleetError, match="w2: does not answer"):
        _require_well([worker(1), worker(2, serving=False)])
    with pytest.raises(FleetError, match="does not send anything to w1"):
        _require_well([worker(1, in_service=False), worker(2)])
