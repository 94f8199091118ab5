"""`phase analyze`: the sequential test on recorded or live data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from phases.base.errors import Exit
from phases.base.verdict import Verdict
from phases.cli.common import example, json_option, note, print_json, say, show_table

METRICS = ("ttft", "itl", "e2e", "tpot", "throughput", "accept_length")


@click.command(
    epilog=example(
        "phase analyze requests.jsonl --metric ttft --quantile 0.95 --margin 0.05",
        "phase analyze requests.jsonl.gz --a-a quiet.jsonl.gz --plot interval.svg",
        "phase analyze canary=http://a:30000/metrics control=http://b:30000/metrics --deadline 1800",
    )
)
@click.argument("sources", nargs=-1, required=True, metavar="FILE|URL|ARM=URL...")
@click.option("--metric", type=click.Choice(METRICS), default="e2e", show_default=True, help="What is compared.")
@click.option("--quantile", type=float, default=None, help="0.95 for p95 (the default for latencies).")
@click.option("--mean", "by_mean", is_flag=True, help="Compare mean log ratios instead of a quantile.")
@click.option("--margin", type=float, default=0.05, show_default=True, help="Slowdown still acceptable, as a fraction.")
@click.option(
    "--alpha", type=float, default=0.01, show_default=True, help="Chance of a wrong FAIL over all looks and metrics."
)
@click.option("--window", type=float, default=10.0, show_default=True, help="Seconds between looks.")
@click.option("--deadline", type=float, default=None, help="Seconds after which an open test is INCONCLUSIVE.")
@click.option("--settle", type=float, default=30.0, show_default=True, help="Seconds ignored after an arm's restart.")
@click.option("--min-samples", type=int, default=100, show_default=True, help="Requests of each arm needed for PASS.")
@click.option(
    "--errors",
    type=click.Choice(["5xx", "4xx", "both", "none"]),
    default="5xx",
    show_default=True,
    help="Error rates compared as well; requests without an answer (status 0) are 5xx.",
)
@click.option("--tolerance", type=float, default=0.01, show_default=True, help="Excess error rate still acceptable.")
@click.option(
    "--a-a",
    "a_a",
    default=None,
    metavar="FILE",
    help="Recording of two equal arms: its noise is taken into account, and what such a bake can detect is shown.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Draw the interval over time (.png, .svg, .pdf).",
)
@json_option
def analyze(sources: tuple[str, ...], a_a: str | None, plot_path: Path | None, as_json: bool, **options: Any) -> None:
    """Compare a canary with its simultaneous control: PASS, FAIL or INCONCLUSIVE, and when that was known.

    Sources are files or URLs with JSON lines {"t": seconds, "arm": "canary"|"control", "metric": "ttft", "value": seconds,
    "status": 200}, where t is when the request completed; or Prometheus snapshots, each after a line "# scrape SECONDS ARM";
    or servers to scrape now, as canary=URL and control=URL. Files may be gzipped; "-" reads standard input.

    \b
    Exit codes: 0 PASS, 4 FAIL, 5 INCONCLUSIVE, 1 unusable data, 2 usage.
    """
    from phases.analysis.replay import PLOTS, plot
    from phases.analysis.settings import HIGHER_IS_BETTER, TestSettings

    quantile = options["quantile"]
    if options["by_mean"] and quantile is not None:
        raise click.UsageError("--mean and --quantile exclude each other")
    if not 0 <= options["tolerance"] < 1:
        raise click.UsageError(f"tolerance {options['tolerance']:g} is not a fraction such as 0.01")
    if plot_path is not None and plot_path.suffix.lower() not in PLOTS:
        raise click.UsageError(
            f"cannot draw to {plot_path}: name a file ending in {', '.join(PLOTS[:-1])} or {PLOTS[-1]}"
        )
    if quantile is None and not options["by_mean"] and options["metric"] not in HIGHER_IS_BETTER:
        quantile = 0.95
    names = ("metric", "margin", "alpha", "window", "deadline", "settle", "min_samples")
    settings = TestSettings(quantile=quantile, **{name: options[name] for name in names})
    planned: dict[str, Any] = {}
    if a_a is not None:
        settings, planned = _planned(a_a, settings)
    kinds = {"both": ("5xx", "4xx"), "none": ()}.get(options["errors"], (options["errors"],))
    found = _replay(sources, settings, kinds, options["tolerance"])
    if plot_path is not None:
        plot(found, plot_path)
    if as_json:
        print_json({**found.to_json(), **({"a_a": planned} if planned else {})})
    else:
        _show(found, planned)
    code = {Verdict.PASS: Exit.PASSED, Verdict.FAIL: Exit.GATE_FAILED}.get(found.verdict, Exit.INCONCLUSIVE)
    raise click.exceptions.Exit(int(code))


def _replay(sources: tuple[str, ...], settings: Any, kinds: tuple[str, ...], tolerance: float) -> Any:
    from phases.analysis import sources as reading
    from phases.analysis.replay import replay_records, replay_snapshots

    source = ", ".join(sources)
    if all(reading.is_target(name) for name in sources):
        if {reading.target(name)[0] for name in sources} != {"canary", "control"}:
            raise click.UsageError("name at least one server of each arm: canary=URL control=URL")
        note(
            f"scraping every {settings.window:g} s until there is a verdict{'' if settings.deadline else ' (no --deadline)'}"
        )
        until = None if settings.deadline is None else settings.deadline + settings.window
        stream = reading.live(sources, every=settings.window, until=until)
        return replay_snapshots(stream, settings, errors=kinds, tolerance=tolerance, source=source)
    recorded = reading.read(sources)
    if recorded.records is not None:
        return replay_records(recorded.records, settings, errors=kinds, tolerance=tolerance, source=source)
    return replay_snapshots(recorded.snapshots, settings, errors=kinds, tolerance=tolerance, source=source)


def _planned(name: str, settings: Any) -> tuple[Any, dict[str, Any]]:
    """The settings with the noise of an A/A recording, and what it says a bake detects."""
    from dataclasses import asdict, replace

    from phases.analysis import power, sources
    from phases.base.errors import AnalysisError

    arms = (sources.read([name]).records or {}).get(settings.metric, {})
    if len(arms) < 2:
        raise AnalysisError(
            f"{name} has no {settings.metric} records of both arms.", hint="Record an A/A run as JSON lines."
        )
    if settings.quantile is None:
        recording = power.Recording.of(arms["canary"], arms["control"], settings)
        known = {"dispersion": power.dispersion(recording, settings)}
    else:
        known = asdict(power.plan(arms["canary"], arms["control"], settings))
    return replace(settings, dispersion=known["dispersion"]), known


def _show(found: Any, planned: dict[str, Any]) -> None:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    rows = [
        (
            d.metric,
            d.statistic,
            d.word,
            number(d.estimate),
            f"{number(d.low)} … {number(d.high)}",
            number(d.threshold),
            str(d.n),
            "-" if d.seconds_to_decide is None else f"{d.seconds_to_decide:.0f} s",
        )
        for d in found.decisions
    ]
    show_table(("metric", "statistic", "verdict", "estimate", "interval", "limit", "n", "reached after"), rows)
    for decision in found.decisions:
        say(f"{decision.metric}: {decision.reason}; source: {decision.source}")
    if planned:
        bakes = ", ".join(
            f"{minutes} min: {'none' if r is None else f'{r:g}x'}"
            for minutes, r in planned.get("detectable", {}).items()
        )
        say(
            f"A/A: dispersion {planned['dispersion']:.2f}; detectable with 95 % power: {bakes}; "
            f"an equal canary passes after {number(planned.get('seconds_to_pass'))} s"
        )
    say(f"verdict: {found.verdict.value}")
