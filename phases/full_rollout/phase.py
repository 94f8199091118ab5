"""Phase 4, full-rollout: the candidate to the whole fleet, wave by wave, then a soak.

Each wave is judged against workers not yet moved; one that regresses takes everything back by itself (exit 7). All moved
workers stay under leases until the soak has passed; then the candidate becomes last-good.
"""

from __future__ import annotations

from phases.fleet import shared_steps
from phases.fleet.last_look import last_look
from phases.fleet.live import Live
from phases.full_rollout import steps as waves
from phases.run.closing import closing_steps
from phases.run.phase_run import PhaseRun
from phases.run.steps import Step


def full_rollout(run: PhaseRun) -> list[Step]:
    """The steps of Phase 4."""
    live = Live(run)
    planned = waves.waves_of(run)
    unmoved = [tuple(host for later in planned[number:] for host in later) for number in range(1, len(planned) + 1)]
    return [
        waves.look_at_fleet(run, live),  # everybody reached, well, in service
        waves.push_releases(run, live),  # onto every host; nothing that serves changes
        *(waves.wave(run, live, number, moving, unmoved[number - 1]) for number, moving in enumerate(planned, 1)),
        waves.soak(run, live),  # no control is left: against what Phase 3 recorded
        waves.finish(run, live),  # last-good, or back, and which of the two is observed
        waves.write_report(run),
        shared_steps.leave(live),
        *closing_steps(run, last_look(run, waves.FINISH), waves.stages(run)),
    ]
