"""Phase 1, build-parity: from source to a benchmark that may be believed.

The kernel must build for every architecture of the fleet, compute the right numbers on every parity case, and be faster
than its baseline. Nothing here moves production.
"""

from __future__ import annotations

from phases.build_parity import steps as phase_one
from phases.run.closing import closing_steps
from phases.run.phase_run import PhaseRun
from phases.run.steps import Step


def build_parity(run: PhaseRun) -> list[Step]:
    """The steps of Phase 1."""
    return [
        phase_one.look_around(
            run
        ),  # compilers, architectures, disk, device, git: what would stop us later stops us now
        phase_one.build(run),  # one object for each variant and architecture, from a cache keyed on content
        phase_one.prove_parity(run),  # every variant on every case against the float64 reference
        phase_one.measure_ceilings(run),  # what this very device can do, so that a speed means something
        phase_one.benchmark(run),  # only cases that proved right are timed, and proved again after timing
        phase_one.write_report(run),  # results.json, tables and plots, as the checkpoint will hold them
        *closing_steps(run),  # judge the gate, record the checkpoint
    ]
