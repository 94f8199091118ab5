"""Users, answers and the router in a fleet: stand-in workers on real hosts behind the real router, driven by the real command."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.production.light_fleet import LightFleet

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightFleet]:
    made = LightFleet(tmp_path_factory.mktemp("light"), ssh=0)
    try:
        yield made.up()
    finally:
        made.close()


def _configure(fleet: LightFleet, bake: float = 1.0, **candidate: object) -> None:
    """As the fleet's own playbook, with a longer bake, and completions of our own every second."""
    fleet.configure(candidate=candidate, roll_back=False)
    text = (fleet.repo / "playbook.yaml").read_text()
    assert "bake: 1," in text and "  warm_up:" in text
    text = text.replace("bake: 1,", f"bake: {bake:g},")
    fleet.configure(text=text.replace("  warm_up:", "  liveness: {every: 1, within: 4}\n  warm_up:"))


def _until(process: subprocess.Popen[str], what: str) -> str:
    """Read what the command says up to a line with `what`."""
    said, until = "", time.monotonic() + 240
    assert process.stdout
    for line in process.stdout:
        said += line
        if what in line:
            return said
        assert time.monotonic() < until, said
    raise AssertionError(f"it ended before {what!r}: {said}")


def test_a_canary_that_is_taken_out_of_the_router_in_its_bake_fails(fleet: LightFleet) -> None:
    """Own probes went on reaching it, and it passed with a share of 0.876."""
    _configure(fleet, bake=60.0)
    with fleet.start("run", "tp8-canary", "--yes") as process:
        said = _until(process, "e2e p50:")
        with fleet.production() as production:
            production.router.remove(production.workers[0].url)
        rest, _ = process.communicate(timeout=240)
    assert process.returncode == 7, said + rest
    assert "w1: the router sends it no users any more" in rest, said + rest
    fleet.reset()


@pytest.mark.parametrize("wedged_after", [60])
def test_a_canary_that_stops_answering_in_its_bake_fails(fleet: LightFleet, wedged_after: int) -> None:
    """Its /health stays green; it takes requests and answers none."""
    _configure(fleet, bake=20.0, WEDGED_AFTER=wedged_after)
    done = fleet.phase("run", "tp8-canary", "--yes")
    assert done.returncode == 7 and "an own completion" in done.stdout, done.stdout
    fleet.reset()


def test_streams_that_begin_with_200_and_end_in_an_abort_fail_a_canary(fleet: LightFleet) -> None:
    """ "0 of 124 failed", and faster."""
    _configure(fleet, bake=5.0, ABORTS=0.4)
    done = fleet.phase("run", "tp8-canary", "--yes")
    assert done.returncode == 7 and "5xx" in done.stdout, done.stdout
    fleet.reset()


def test_a_watch_does_not_pass_beside_a_worker_that_answers_nothing(fleet: LightFleet) -> None:
    _configure(fleet)
    fleet.fault(2, MUTE=1)
    try:
        done = fleet.phase("watch", "--once")
        assert done.returncode == 4 and "an own completion" in done.stdout, done.stdout
    finally:
        fleet.fault(2)


def test_a_playbook_without_any_rule_keeps_phase_4_closed_after_a_failed_canary(fleet: LightFleet) -> None:
    _configure(fleet, bake=20.0, ABORTS=1)
    assert "rule" not in (fleet.repo / "playbook.yaml").read_text()
    assert fleet.phase("run", "tp8-canary", "--yes").returncode == 7
    refused = fleet.phase("run", "full-rollout", "--yes")
    assert refused.returncode not in (0, 7) and "tp8-canary" in refused.stdout, refused.stdout
    with fleet.production() as production:
        assert all(state.current == state.last_good for state in production.observe())
    fleet.reset()
