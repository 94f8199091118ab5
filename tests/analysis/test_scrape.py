from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phases.analysis.counters import CounterWindows
from phases.analysis.histograms import HistogramTest, HistogramWindows
from phases.analysis.scrape import HISTOGRAMS, Buckets, Increases, Scrape, split_snapshots
from phases.analysis.settings import TestSettings
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict

REAL = (
    Path(__file__).parent / "data" / "sglang-metrics.txt"
).read_text()  # a scrape of SGLang 0.5.23 under speculation


def scrape(text, t=0.0, source="here"):
    return Scrape.parse(text, t=t, source=source)


def histogram(values, edges, name="sglang:time_to_first_token_seconds", **labels):
    extra = "".join(f',{key}="{value}"' for key, value in labels.items())
    lines = [f"# TYPE {name} histogram"]
    lines += [f'{name}_bucket{{le="{edge}"{extra}}} {np.count_nonzero(values <= edge)}' for edge in edges]
    lines += [
        f'{name}_bucket{{le="+Inf"{extra}}} {len(values)}',
        f"{name}_count {len(values)}",
        f"{name}_sum {values.sum()}",
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
def test_names_are_resolved_from_the_scrape(prefix):
    found = scrape(REAL.replace("sglang:", prefix))
    assert found.require(HISTOGRAMS["ttft"], suffix="_bucket") == prefix + "time_to_first_token_seconds"
    assert found.require(HISTOGRAMS["tpot"], suffix="_bucket") == prefix + "request_time_per_output_token_seconds"


def test_a_renamed_metric_is_found_under_its_older_name():
    older = REAL.replace("request_time_per_output_token_seconds", "time_per_output_token_seconds")
    assert scrape(older).require(HISTOGRAMS["tpot"], suffix="_bucket") == "sglang:time_per_output_token_seconds"


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(AnalysisError, match="sglang:e2e_request_latency_seconds"):
        scrape(REAL).require(["e2e_request_latency_second"], suffix="_bucket")
    with pytest.raises(AnalysisError, match="--enable-metrics"):
        scrape("other 1\n").require(HISTOGRAMS["ttft"], suffix="_bucket")


@pytest.mark.parametrize("text", ["{{{{", "name three", "<html>no</html>"])
def test_what_is_no_prometheus_text_is_refused(text):
    with pytest.raises(AnalysisError, match="here"):
        scrape(text)


def test_real_histogram_has_bounds_not_points():
    windows = HistogramWindows("e2e")
    assert (
        windows.add(scrape(REAL.replace("} 21.0", "} 0.0").replace("} 11.0", "} 0.0").replace("} 14.0", "} 0.0")))[0]
        is None
    )
    buckets, restarted = windows.add(scrape(REAL, t=10.0))
    assert not restarted and buckets.total == 21
    assert buckets.quantile_bounds(0.5) == (0.0, 0.1)  # 11 of 21 are at most 0.1 s: no more can be said
    assert buckets.quantile_bounds(0.95) == (0.2, 0.4)


@given(st.lists(st.floats(0.001, 20), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_quantile_bounds_hold_the_order_statistic(values, level):
    edges = [0.1, 0.5, 1.0, 5.0]
    windows, values = HistogramWindows("ttft"), np.array(values)
    windows.add(scrape(histogram(np.empty(0), edges)))
    low, high = windows.add(scrape(histogram(values, edges), t=1.0))[0].quantile_bounds(level)
    place = max(int(np.ceil(level * len(values) * (1 - 1e-12))) - 1, 0)
    assert low < np.sort(values)[place] <= high


def test_no_observations_mean_no_quantile():
    assert Buckets(np.array([0.1, np.inf]), np.zeros(2)).quantile_bounds(0.5) is None


SERIES = (("a", "1"),)


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=30))
def test_increases_add_up_over_resets(steps):
    """Whatever is counted between two scrapes is found, unless a reset swallows what came before it in the same interval."""
    increases, counter, expected, found = Increases(), 0.0, 0.0, 0.0
    increases.step("s", {SERIES: 0.0})
    for more, restart in steps:
        before = counter
        counter = float(more) if restart else counter + more
        step, reset = increases.step("s", {SERIES: counter})
        visible = restart and counter < before
        assert reset == visible
        expected += counter if visible else counter - before
        found += step[SERIES]
    assert found == expected


def test_the_first_value_of_a_series_born_later_counts_in_full():
    increases = Increases()
    assert increases.step("s", {SERIES: 100.0}) is None  # a first look at a running server is only a start
    step, reset = increases.step("s", {SERIES: 101.0, (("a", "2"),): 7.0})
    assert not reset and step == {SERIES: 1.0, (("a", "2"),): 7.0}


def test_after_a_restart_all_series_count_from_zero():
    increases = Increases()
    increases.step("s", {(("le", "1"),): 10.0, (("le", "2"),): 20.0})
    step, reset = increases.step("s", {(("le", "1"),): 12.0, (("le", "2"),): 15.0})
    assert reset and step == {(("le", "1"),): 12.0, (("le", "2"),): 15.0}
    step, reset = increases.step("s", {(("le", "2"),): 30.0})
    assert reset  # a series that is gone means a new process, too


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_broken_counter_is_refused(value):
    with pytest.raises(AnalysisError):
        Increases().step("s", {SERIES: value})


def test_servers_with_different_buckets_are_refused():
    values, test = np.full(50, 0.3), HistogramTest(TestSettings(metric="ttft"))
    for t, count in ((0.0, 0), (10.0, 50)):
        test.add("canary", scrape(histogram(values[:count], [0.1, 1.0]), t=t, source="a"))
        if t:
            with pytest.raises(AnalysisError, match="different buckets"):
                test.add("canary", scrape(histogram(values[:count], [0.2, 1.0]), t=t, source="b"))
        else:
            test.add("canary", scrape(histogram(values[:count], [0.2, 1.0]), t=t, source="b"))


def drive(edges, ratio, *, windows=240, quantile=0.95, restart_at=None, rate=20, seed=1):
    rng = np.random.default_rng(seed)
    test = HistogramTest(TestSettings(metric="ttft", quantile=quantile, margin=0.1))
    seen = {"canary": np.empty(0), "control": np.empty(0)}
    for k in range(windows):
        for arm in seen:
            if k == restart_at and arm == "canary":
                seen[arm] = np.empty(0)
            fresh = (
                0.2 * np.exp(0.5 * rng.standard_normal(rng.poisson(10 * rate))) * (ratio if arm == "canary" else 1.0)
            )
            seen[arm] = np.append(seen[arm], fresh)
            test.add(arm, scrape(histogram(seen[arm], edges), t=10.0 * k, source=arm))
        decision = test.look(10.0 * k)
        if decision.verdict is not None:
            break
    return decision


FINE = np.round(np.geomspace(0.02, 5.0, 280), 5)
COARSE = [0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0]  # SGLang's own


def test_fine_buckets_decide_as_records_do():
    slow = drive(FINE, 1.4)
    assert slow.verdict is Verdict.FAIL and slow.low < 1.4 and slow.seconds_to_decide <= 200
    equal = drive(FINE, 1.0, quantile=0.5)
    assert equal.verdict is Verdict.PASS and equal.low < 1.0 < equal.high


def test_coarse_buckets_widen_the_interval_instead_of_lying():
    for ratio in (1.0, 1.3):
        decision = drive(COARSE, ratio, windows=120)
        assert decision.verdict is None
        assert decision.low <= ratio and (decision.high or 99) >= ratio
        assert decision.estimate is None
    assert drive(COARSE, 3.0).verdict is Verdict.FAIL


def test_everything_in_one_bucket_says_so():
    decision = drive([1000.0], 1.0, windows=20)
    assert decision.verdict is None and "one bucket" in decision.reason


def test_a_restart_is_seen_and_settled():
    decision = drive(FINE, 1.0, quantile=0.5, restart_at=5, windows=60)
    assert decision.counts["canary"]["ignored"] > 0
    assert decision.verdict is not Verdict.FAIL


def test_an_arm_that_is_no_longer_scraped_never_passes():
    rng = np.random.default_rng(2)
    test, seen = HistogramTest(TestSettings(metric="ttft", quantile=0.5, margin=0.5)), np.empty(0)
    for k in range(60):
        seen = np.append(seen, rng.lognormal(size=100))
        for arm in ("canary", "control") if k < 3 else ("control",):
            test.add(arm, scrape(histogram(seen, FINE), t=10.0 * k, source=arm))
        assert test.look(10.0 * k).verdict is None
    assert "not scraped" in test.look(600.0).reason


def test_a_histogram_that_never_appears_is_an_error_at_the_end():
    test = HistogramTest(TestSettings(metric="itl"))
    test.add("canary", scrape(REAL))
    with pytest.raises(AnalysisError, match="inter_token_latency"):
        test.finish(10.0)


def test_counters_give_errors_throughput_and_accept_length():
    windows = CounterWindows()
    later = (
        REAL.replace(
            '/generate",method="POST",status_code="200"} 21.0', '/generate",method="POST",status_code="200"} 31.0'
        )
        .replace("generation_tokens_total{engine_type", "generation_tokens_total{engine_type")
        .replace("} 448.0", "} 748.0")
        .replace("} 247.0", "} 347.0")
        .replace(
            'sglang:http_responses_total{endpoint="/health",method="GET",status_code="503"} 1.0',
            'sglang:http_responses_total{endpoint="/health",method="GET",status_code="503"} 9.0\n'
            'sglang:http_responses_total{endpoint="/generate",method="POST",status_code="500"} 2.0',
        )
    )
    assert windows.add(scrape(REAL)) is None
    step = windows.add(scrape(later, t=20.0))
    assert step.responses == {200: 10.0, 500: 2.0}  # probes of /health do not count
    assert step.errors("5xx") == 2 and step.errors("4xx") == 0 and step.requests == 12
    assert step.throughput == 15.0 and step.accept_length == 3.0


def test_no_verification_calls_mean_no_accept_length():
    windows = CounterWindows()
    windows.add(scrape(REAL))
    assert windows.add(scrape(REAL, t=10.0)).accept_length is None


def test_snapshots_in_one_file():
    text = f"# scrape 10 canary http://a\n{REAL}# scrape 11.5 control http://b\n{REAL}"
    pairs = list(split_snapshots(text, "file"))
    assert [(arm, one.t, one.source) for arm, one in pairs] == [
        ("canary", 10.0, "http://a"),
        ("control", 11.5, "http://b"),
    ]
    with pytest.raises(AnalysisError, match="file:1"):
        list(split_snapshots("# scrape then canary\n", "file"))
    with pytest.raises(AnalysisError, match="file:1"):
        list(split_snapshots("# scrape 3 baseline\n", "file"))


def _responses(aborted: float | None, **answers: float) -> Scrape:
    text = "# TYPE sglang:http_responses counter\n" + "".join(
        f'sglang:http_responses_total{{endpoint="{endpoint}",status_code="200"}} {n}\n'
        for endpoint, n in answers.items()
    )
    if aborted is not None:
        text += f"# TYPE sglang:num_aborted_requests counter\nsglang:num_aborted_requests_total {aborted}\n"
    return Scrape.parse(text, t=0.0, source="w1")


def test_polls_are_no_requests_and_what_was_aborted_is_an_error() -> None:
    """`/v1/models`, `/health`, `/metrics` and whatever else is polled must not dilute an error rate."""
    windows = CounterWindows()
    windows.add(_responses(2, **{"/generate": 10, "/v1/chat/completions": 5, "/v1/models": 900, "/health": 10, "": 3}))
    step = windows.add(
        _responses(6, **{"/generate": 20, "/v1/chat/completions": 15, "/v1/models": 1900, "/health": 90, "": 70})
    )
    assert step is not None and (step.requests, step.errors("5xx"), step.errors("4xx")) == (20, 4, 0)
    late = windows.add(
        _responses(9, **{"/generate": 20, "/v1/chat/completions": 15, "/v1/models": 1900, "/health": 90, "": 70})
    )
    assert late is not None and late.requests == late.errors("5xx") == 3  # counted when it began, given up now
    older = CounterWindows()
    older.add(_responses(None, **{"/generate": 10}))
    step = older.add(_responses(None, **{"/generate": 30}))
    assert step is not None and (step.requests, step.aborted) == (20, 0)


def started(at: float, values: dict[str, float], t: float, source: str = "w") -> Scrape:
    text = "".join(
        f'sglang:http_responses_total{{endpoint="/generate",status_code="{code}"}} {n}\n' for code, n in values.items()
    )
    return Scrape.parse((f"process_start_time_seconds {at}\n" if at else "") + text, t=t, source=source)


@pytest.mark.parametrize("counted", [10.0, 400.0])
def test_a_counter_that_appears_later_began_at_zero_after_the_scrape_before(counted):
    windows = CounterWindows()
    assert windows.add(started(0, {}, 0.0)) is None
    step = windows.add(started(0, {"500": counted}, 10.0))
    assert step is not None and step.errors("5xx") == counted and not step.restarted


@pytest.mark.parametrize(
    ("before", "after", "since", "increase"), [(50, 60, 99.0, 60.0), (50, 60, 7.0, 10.0), (50, 20, 99.0, 20.0)]
)
def test_a_restart_is_known_by_when_the_process_started(before, after, since, increase):
    windows = CounterWindows()
    windows.add(started(7.0, {"200": before}, 0.0))
    step = windows.add(started(since, {"200": after}, 10.0))
    assert step is not None and step.requests == increase and step.restarted is (since != 7.0)


@pytest.mark.parametrize("at", [0.0, 7.0])
def test_a_counter_that_is_missing_once_is_not_counted_twice(at):
    windows = CounterWindows()
    windows.add(started(at, {"200": 400}, 0.0))
    steps = [windows.add(started(at, values, t)) for t, values in ((10.0, {}), (20.0, {"200": 410}))]
    assert sum(step.requests for step in steps if step) == 10
