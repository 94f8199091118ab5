"""A phase that measures nothing real, in milliseconds: random numbers, so that a step done twice shows."""

from __future__ import annotations

import random

from phases.engine.closing import closing_steps
from phases.engine.files import write_json
from phases.engine.steps import Step
from phases.ledger.checkpoint import RESULTS
from phases.results import Case, ParityRecord


def light_phase(run):
    def prove(context):
        error = random.random()
        context.progress(f"error {error}")
        return {"parity": (ParityRecord(Case("q1", "float32"), "vectorised", "cpu", True, error, 1.0),)}

    def report(context):
        write_json(run.work / "checkpoint" / RESULTS, run.gathered(context).to_json())
        run.add_file("table.txt", b"a table\n")
        return {}

    def prepare(context):
        run.checkpoint_files.mkdir(exist_ok=True)
        return {"manifest": {"device": "none"}, "lucky": random.random()}

    return [
        Step("prepare", "make room", prepare),
        run.results_step("prove", "prove", prove),
        Step("report", "write files", report, holds=lambda context, facts: (run.checkpoint_files / RESULTS).exists()),
        *closing_steps(run),
    ]


def failing_phase(run):
    def fail(context):
        raise context.facts["nothing"]  # a KeyError: a mistake of the script itself

    return [Step("prepare", "make room", lambda context: {}), Step("fail", "fail", fail), *closing_steps(run)]
