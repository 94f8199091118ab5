"""A phase that measures nothing real, in milliseconds: random numbers, so that a step done twice shows."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time
import weakref

from phases.base.files import write_json
from phases.base.results import BuildRecord, Case, ParityRecord
from phases.ledger.checkpoint import RESULTS
from phases.run.closing import closing_steps
from phases.run.steps import Step


def light_phase(run):
    def prove(context):
        error = random.random()
        context.progress(f"error {error}")
        return {
            "build": (BuildRecord("vectorised", "python", True),),
            "parity": (ParityRecord(Case("q1", "float32"), "vectorised", "cpu", True, error, 1.0),),
        }

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


def plotting_phase(run):
    """The light phase with the real tables and plots of Phase 1 in its report step, of made-up timings."""
    steps = light_phase(run)

    def report(context):
        from phases.report import plots, tables
        from tests.report.sample_results import results

        made = results()
        run.add_file("table.txt", tables.report(made).encode())
        run.add_file("roofline.png", plots.achieved(made.benchmark))
        run.add_file("speedup.png", plots.speedups(made.benchmark))
        return steps[2].run(context)

    return [*steps[:2], dataclasses.replace(steps[2], run=report), *steps[3:]]


def _signalled_in_a_callback(context):
    """What matplotlib's drawing does all the time, with a signal in the middle: nobody can catch what is raised there."""
    thing = threading.Event()
    watched = weakref.ref(thing, lambda gone: os.kill(os.getpid(), signal.SIGTERM))
    del thing
    context.progress(f"the signal came, and nothing was raised ({watched()})")
    time.sleep(60)
    return {}


def _signalled_and_swallowed(context):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    except BaseException:
        context.progress("the signal came, and somebody else's code swallowed it")
    return {}


def callback_phase(run):
    return [Step("draw", "get a signal in a callback", _signalled_in_a_callback), *light_phase(run)]


def swallowing_phase(run):
    return [Step("draw", "swallow a signal", _signalled_and_swallowed), *light_phase(run)]


def failing_phase(run):
    def fail(context):
        raise context.facts["nothing"]  # a KeyError: a mistake of the script itself

    return [Step("prepare", "make room", lambda context: {}), Step("fail", "fail", fail), *closing_steps(run)]
