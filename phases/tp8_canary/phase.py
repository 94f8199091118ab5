"""Phase 3, tp8-canary: a few workers on the candidate, beside control workers of the same age, under live traffic.

Production ends on the incumbent whatever happens: a canary that regresses is rolled back by itself (exit 7), one that passed
goes back too and waits for review. While it bakes, its hosts hold a lease: if this toolkit dies, they go back alone.
"""

from __future__ import annotations

from phases.fleet import shared_steps
from phases.fleet.last_look import last_look
from phases.fleet.live import Live
from phases.run.closing import closing_steps
from phases.run.phase_run import PhaseRun
from phases.run.steps import Step
from phases.tp8_canary import steps as canary


def tp8_canary(run: PhaseRun) -> list[Step]:
    """The steps of Phase 3."""
    live = Live(run)
    return [
        canary.look_at_fleet(run, live),  # everybody reached, well, in service, on one incumbent
        canary.push_releases(run, live),  # onto the hosts of both arms; nothing that serves changes
        *canary.restart_control(
            run, live
        ),  # on the incumbent, so that both arms are equally old; none where workers are their own
        canary.switch_canary(run, live),  # under a lease; every rank must report the candidate
        canary.bake(run, live),  # same traffic, same windows, until there is a verdict
        canary.put_back(run, live),  # observed, not assumed; its exit code says how production ended
        canary.write_report(run),
        shared_steps.leave(live),
        *closing_steps(run, last_look(run, canary.END), [canary.BAKE]),
    ]
