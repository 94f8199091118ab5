"""Phase 2, sglang-integration: the kernel inside a real SGLang server, beside the incumbent.

The kernel must be picked up and used, what it emits must be right, its accept length must hold and its latency must
improve. Two servers are started and stopped on one machine; production is not touched.
"""

from __future__ import annotations

from phases.run.closing import closing_steps
from phases.run.phase_run import PhaseRun
from phases.run.steps import Step
from phases.sglang_integration import steps as phase_two


def sglang_integration(run: PhaseRun) -> list[Step]:
    """The steps of Phase 2."""
    return [
        phase_two.provision(run),  # SGLang itself: provisioned or checked by content, its versions written down
        phase_two.make_releases(
            run
        ),  # what would be rolled out: wheel and objects, incumbent and candidate side by side
        phase_two.load_objects(run),  # a wrong ABI or architecture ends a probe process here, not a server later
        phase_two.start_servers(run),  # the same flags, the same model, another attention
        phase_two.await_completions(run),  # ready is who completes our requests, and active is who says so and shows it
        phase_two.compare_outputs(run),  # the incumbent judges what the candidate's verify path emitted
        phase_two.compare_latency(run),  # pair by pair, in random order
        phase_two.scan_logs(run),  # errors that only the candidate logs
        phase_two.stop_servers(run),  # no server is left running, whatever happened
        phase_two.write_report(run),  # results.json, the table and the ends of both logs
        *closing_steps(run),  # judge the gate, record the checkpoint
    ]
