"""The hot fallback under CUDA graphs, on SGLang's own classes without a GPU: see hot_seam.py for what is run there."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from verify_attn.sglang import graphs
from verify_attn.sglang.graphs import Way, choose_way

from tests.sglang.conftest import KERNEL


def in_server_environment(test):
    return pytest.mark.sglang(pytest.mark.slow(pytest.mark.timeout(900)(test)))


@pytest.fixture(scope="module")
def report(serving_environment) -> dict:
    done = subprocess.run(
        [str(serving_environment.python), str(Path(__file__).with_name("hot_seam.py"))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(KERNEL), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@in_server_environment
def test_sglang_has_the_places_that_are_hooked(report):
    assert report["missing"] == ""
    assert report["unknown"] == []


@in_server_environment
def test_eager_incumbent(report):
    assert report["eager"] == {
        "variants": True,
        "candidate": True,
        "planned stays": True,
        "incumbent": False,
        "too large for any graph": False,
        "candidate again": True,
        "another backend": True,
        "off": True,
        "compared step": {
            "asked": [False, False],
            "use": True,
            "compared": True,
            "steps": 1,
            "prefill compared": False,
        },
        "incumbent step": {
            "asked": [False, False],
            "use": False,
            "compared": False,
            "steps": 0,
            "prefill compared": False,
        },
        "off says": [False, "candidate", "candidate"],
        "switchable says": [True, "incumbent", "candidate"],
        "wrapped says": "SGLang wraps this backend in another one",
    }


@in_server_environment
def test_both_sides_are_captured_and_each_replay_picks(report):
    both = report["both"]
    assert both["graphs"] == 6 and both["label after"] is None
    assert both["replayed"] == [[1, True], [4, True], [1, False], [4, False], [1, True], [4, True]]
    assert both["cost"]["candidate"]["graphs"] == both["cost"]["incumbent"]["graphs"] == 3


@in_server_environment
def test_a_compared_step_is_served_by_what_is_right(report):
    compared = report["compared"]
    assert compared["agreed"] and compared["error"] < 1e-5 and compared["engine calls"] == 1
    assert compared["served"] < 1e-6
    assert compared["rest of the step"] is False and compared["next forward"] is False and compared["byte"] == "i"
    assert (compared["worst"], compared["lengths"], compared["layer"]) == (1, [7, 1, 40], 1)


NCCL_ONLY = SimpleNamespace(disable_custom_all_reduce=True)


@pytest.mark.parametrize(
    ("way", "ranks", "arguments", "found", "reason"),
    [
        (Way.CANDIDATE, 1, None, Way.CANDIDATE, ""),
        (Way.BOTH, 1, None, Way.BOTH, ""),
        (Way.OFF, 1, None, Way.OFF, "VERIFY_ATTN_HOT is off"),
        (Way.CANDIDATE, 8, NCCL_ONLY, Way.OFF, "8 ranks under CUDA graphs.*VERIFY_ATTN_HOT=both"),
        (Way.BOTH, 8, SimpleNamespace(), Way.OFF, "custom all-reduce.*--disable-custom-all-reduce"),
        (Way.BOTH, 8, NCCL_ONLY, Way.BOTH, ""),
        (Way.BOTH, 8, SimpleNamespace(disable_custom_all_reduce=True, enable_mscclpp=True), Way.OFF, "enable_mscclpp"),
        (
            Way.BOTH,
            8,
            SimpleNamespace(disable_custom_all_reduce=True, flashinfer_allreduce_fusion_backend="auto"),
            Way.OFF,
            "fusion_backend",
        ),
    ],
)
def test_which_way_a_server_can_go(way, ranks, arguments, found, reason, monkeypatch):
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    made = choose_way(way, controlled=True, captures=True, ranks=ranks, arguments=arguments)
    assert made.way is found and bool(made.reason) == bool(reason)
    assert re.search(reason, made.reason)


@pytest.mark.parametrize(("value", "found"), [("0", Way.BOTH), ("1", Way.OFF)])
def test_nccl_may_not_record_the_addresses_of_peers_either(value, found, monkeypatch):
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", value)
    assert choose_way(Way.BOTH, controlled=True, captures=True, ranks=8, arguments=NCCL_ONLY).way is found


@pytest.mark.parametrize("controlled, captures", [(False, True), (True, False)])
def test_without_a_control_file_or_graphs_nothing_stands_in_the_way(controlled, captures):
    assert choose_way(Way.CANDIDATE, controlled=controlled, captures=captures, ranks=8, arguments=None).reason == ""


def test_a_word_that_is_none_of_the_ways_is_refused(monkeypatch):
    monkeypatch.setenv("VERIFY_ATTN_HOT", "lazily")
    with pytest.raises(ValueError, match="candidate, both or off"):
        graphs.wanted()
