"""`phase plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phases.base.clock import SystemClock
from phases.base.errors import LedgerError
from phases.cli.common import completing, example, json_option, load_playbook, playbook_option, print_json, say
from phases.playbook.schema import PhaseSection, Playbook

if TYPE_CHECKING:
    from phases.fleet.forecast import Forecast


@click.command(
    epilog=example(
        "phase plan",
        "phase plan build-parity -p playbooks/local.yaml",
        "phase plan tp8-canary --a-a quiet.jsonl.gz --rate 20",
    )
)
@click.argument("phase", required=False, shell_complete=completing("complete_phase"))
@click.option(
    "--a-a",
    "a_a",
    default=None,
    metavar="FILE",
    help="Recording of two equal arms, as `phase analyze` reads it: from it the slowdown each gate can see is worked out.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="Requests a second of an arm to expect; as recorded when absent.",
)
@playbook_option
@json_option
def plan(phase: str | None, a_a: str | None, rate: float | None, playbook_path: Path | None, as_json: bool) -> None:
    """Show what `phase run` would do, step by step, host by host. Changes nothing.

    For phases that change production also a forecast: which hosts are touched, what share of requests is exposed, how long it takes, and
    the smallest slowdown each gate can see. PHASE limits the plan to one phase; without it all phases of the playbook are shown.
    """
    from phases.run import session

    playbook = load_playbook(playbook_path)
    sections = (playbook.phase(phase),) if phase else playbook.phases
    planned = [
        (section, session.plan(playbook, section, SystemClock()), _forecast(playbook, section, a_a, rate))
        for section in sections
    ]
    if as_json:
        print_json(
            {"playbook": playbook.name, "kernel": str(playbook.kernel), "phases": [_to_json(*row) for row in planned]}
        )
        return
    for row in planned:
        _print(*row)
    say(_totals(playbook, planned))


def _totals(playbook: Playbook, planned: list[tuple[PhaseSection, list[Any], Forecast | None]]) -> str:
    """The whole plan in one line: who is touched, how long it takes, what users see before a verdict, who is asked, what is skipped."""
    from phases.playbook.schema import Review

    expected = {section.name: found for section, _, found in planned if found}
    parts = [_count(len(planned), "phase", "phases")]
    if canary := expected.get("tp8-canary"):
        parts.append(
            _count(len({name for step in canary.moved if step.share for name in step.hosts}), "canary", "canaries")
        )
    if rollout := expected.get("full-rollout"):
        parts.append(_count(len(rollout.moved), "wave", "waves"))
    if expected:
        parts.append(_count(max(len(_workers(found)) for found in expected.values()), "worker", "workers"))
        parts.append(_together(list(expected.values())))
        first = canary or next(iter(expected.values()))
        share = next((step.share for step in first.moved if step.share), 0.0)
        parts.append(f"at most {share:.0%} of requests on the candidate before a verdict")
    asked = [section.name for section, _, _ in planned if section.review is Review.REQUIRED]
    parts.append(f"a person is asked after {', '.join(asked)}" if asked else "nobody is asked")
    try:
        passed = _passed(playbook, [section.name for section, _, _ in planned])
        skipped = f" `phase run` skips {', '.join(passed)}." if passed else ""
    except LedgerError as fault:  # the plan itself does not rest on it
        skipped = f" What `phase run` skips is unknown: {fault.message}"
    return f"In all: {', '.join(parts)}.{skipped}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _workers(expected: Forecast) -> set[str]:
    return {name for step in expected.moved for name in step.hosts} | set(expected.untouched)


def _together(expected: list[Forecast]) -> str:
    if all(found.expected is not None for found in expected):
        return f"about {_time(sum(found.expected or 0.0 for found in expected))} in production"
    shortest, longest = (sum(getattr(found, name) for found in expected) for name in ("shortest", "longest"))
    return f"{_time(shortest)} to {_time(longest)} in production"


def _passed(playbook: Playbook, names: list[str]) -> list[str]:
    """Phases that a run of all would skip, with the checkpoint that lets it."""
    from phases.run import progress, session
    from phases.run.closing import ledger_of

    known = progress.standings(playbook, ledger_of(playbook), session.kernel_digest(playbook))
    return [
        f"{row.section.name} ({row.state.value} with {row.checkpoint.name})"
        for row in known
        if row.section.name in names and row.state.lets_next_start and row.checkpoint
    ]


def _forecast(playbook: Playbook, section: PhaseSection, a_a: str | None, rate: float | None) -> Forecast | None:
    if not section.kind.changes_production:
        return None
    from phases.analysis import sources
    from phases.base.errors import AnalysisError
    from phases.fleet.forecast import forecast
    from phases.run import session

    recorded = sources.read([a_a]).records if a_a else None
    if a_a and recorded is None:
        raise AnalysisError(f"{a_a} holds snapshots, not request records.", hint="Record an A/A run as JSON lines.")
    return forecast(session.plan_run(playbook, section, SystemClock()), recorded, rate)


def _to_json(section: PhaseSection, steps: list[Any], expected: Forecast | None) -> dict[str, Any]:
    rows = [{"name": step.name, "summary": step.summary, "host": step.host, "detail": step.detail} for step in steps]
    found = {
        "phase": section.name,
        "review": section.review.value,
        "rules": [rule.kind for rule in section.rules],
        "thresholds": {f"{rule.label} ({rule.where})": rule.terms for rule in section.rules},
        "steps": rows,
    }
    return found | {"forecast": expected.to_json() if expected else None}


def _print(section: PhaseSection, steps: list[Any], expected: Forecast | None) -> None:
    review = "then a person reviews" if section.review.value == "required" else "no review wanted"
    review += " (--yes allowed)" if section.allow_yes else ""
    say(f"Phase {section.kind.number}, {section.name}: {section.kind.proves}; {review}.")
    for number, step in enumerate(steps, 1):
        host = "" if step.host == "local" else f"{step.host}: "
        say(f"  {number}. {host}{step.name}: {step.summary}")
        for line in step.detail:
            say(f"       {line}")
    if expected:
        _print_forecast(expected)


def _print_forecast(expected: Forecast) -> None:
    say("  Forecast")
    for step in expected.moved:
        share = f"; the candidate then serves {step.share:.0%} of requests" if step.share else ""
        say(f"       {step.step}: {len(step.hosts)} restarted ({', '.join(step.hosts)}){share}")
    say(
        f"       untouched: {', '.join(expected.untouched) or 'nobody'}; at most {expected.exposed:.0%} of requests are exposed"
    )
    recorded = (
        f"{_time(expected.expected)}, as {expected.expected_from}"
        if expected.expected is not None
        else f"unknown ({expected.expected_from})"
    )
    say(
        f"       time: expected {recorded}; by the playbook at least {_time(expected.shortest)}, at most {_time(expected.longest)}, and the sending of releases"
    )
    alike: dict[tuple[str, str], list[str]] = {}
    for sight in expected.sights:
        seen = f"slowdowns from {sight.slowdown:.2f}x on" if sight.slowdown else "unknown"
        alike.setdefault((sight.gate, f"{seen} ({sight.source})"), []).append(sight.metric)
    for (gate, seen), metrics in alike.items():
        say(f"       {gate} can see in {', '.join(metrics)}: {seen}")
    _print_errors(expected)


def _print_errors(expected: Forecast) -> None:
    """A tolerance that the traffic of a bake cannot show would leave it inconclusive, however good the candidate is."""
    if not expected.clean:
        say(f"       error rates: never pass with error_tolerance {expected.tolerance:.2g}")
        return
    own = (
        f"; own requests alone are {expected.own} by the deadline"
        if expected.own
        else "; own requests (`probes`) are none"
    )
    few = ", the rest must be users'" if expected.own < expected.clean else ""
    say(
        f"       error rates: pass after {expected.clean} requests of each arm without a failure (error_tolerance {expected.tolerance:.2%}){own}{few}"
    )


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
