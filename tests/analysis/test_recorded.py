"""What two real SGLang servers served (recorded by tests/benchmarks/record_two_servers.py on a crowded 2-core machine)."""

from pathlib import Path

import pytest

from phases.analysis import TestSettings, sources
from phases.analysis.replay import replay_records
from phases.base.verdict import Verdict

DATA = Path(__file__).parent / "data"


def judge(name, metric, quantile):
    recorded = sources.read([str(DATA / name)]).records
    return replay_records(recorded, TestSettings(metric=metric, quantile=quantile), source=name).latency


@pytest.mark.parametrize("metric", ["ttft", "e2e"])
@pytest.mark.parametrize("quantile", [0.5, 0.95, None])
def test_two_equal_real_servers_do_not_fail(metric, quantile):
    decision = judge("two-servers-x1.jsonl.gz", metric, quantile)
    assert decision.verdict is not Verdict.FAIL
    assert decision.low < 1.0 and (decision.high is None or decision.high > 1.0)
    assert decision.n > 500


def test_a_real_server_slowed_twofold_fails_on_its_tail_and_never_passes():
    assert judge("two-servers-x2.jsonl.gz", "ttft", 0.95).verdict is Verdict.FAIL
    for metric in ("ttft", "e2e"):
        for quantile in (0.5, 0.95, None):
            assert judge("two-servers-x2.jsonl.gz", metric, quantile).verdict is not Verdict.PASS
