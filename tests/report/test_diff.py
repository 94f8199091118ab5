"""Comparing two results: calls only what the intervals support."""

import dataclasses
import json
import random

from phases.report import diff
from tests.report.sample_results import results, times


def whats(made, variant):
    return [change.what for change in made.changes if change.variant == variant]


def test_the_same_thing_measured_twice_is_unclear():
    made = diff.compare(results(), results(seed=7))
    assert whats(made, "naive") == whats(made, "cpu") == ["unclear"] * 3
    assert all(change.low < 1 < change.high for change in made.changes if change.ratio)


def test_a_slower_candidate_is_called_and_comes_first():
    made = diff.compare(results(), results(slow=1.2, seed=7))
    assert whats(made, "cpu") == ["slower"] * 3 and whats(made, "naive") == ["unclear"] * 3
    assert made.changes[0].what == "slower" and 1.1 < made.changes[0].low < made.changes[0].ratio < 1.3
    back = diff.compare(results(slow=1.2, seed=7), results())
    assert whats(back, "cpu") == ["faster"] * 3
    text = diff.text(made, ("3", "4"))
    assert "SLOWER" in text and "3 slower" in text and max(map(len, text.splitlines())) <= 120


def test_too_few_samples_call_nothing():
    few = results(slow=3.0)
    few = dataclasses.replace(
        few, benchmark=tuple(dataclasses.replace(r, samples=r.samples[:4]) for r in few.benchmark)
    )
    made = diff.compare(results(), few)
    assert "slower" not in [change.what for change in made.changes]


def test_added_removed_and_refused():
    before, after = results(), results()
    before = dataclasses.replace(before, benchmark=before.benchmark[:4])
    made = diff.compare(before, after)
    assert whats(made, "cuda_naive").count("no number") == 1 and whats(made, "cpu").count("added") == 2
    assert [c.what for c in diff.compare(after, before).changes].count("removed") == 5
    assert "shared memory" in diff.text(made)


def test_facts_parity_and_work_that_changed_are_named():
    after = results(facts={"cpu": "Other CPU", "threads": 2})
    after = dataclasses.replace(
        after,
        parity=after.parity[1:],
        benchmark=(dataclasses.replace(after.benchmark[0], flops=1), *after.benchmark[1:]),
    )
    made = diff.compare(results(), after)
    assert made.facts == {"cpu": ("Test CPU", "Other CPU")}
    assert made.parity == ("cpu q9/1024/s1/h64/float32: right -> absent",)
    assert "count different work" in next(c.note for c in made.changes if c.variant == "naive" and c.note)
    json.dumps(made.to_json())


def test_false_calls_stay_rare():
    """Both sides from one distribution with heavy tails: at joint confidence 0.95 far fewer than 5 % of comparisons call anything."""
    generator = random.Random(1)
    called = 0
    for _ in range(300):
        pair = []
        for _ in range(2):
            base = results()
            rows = tuple(
                dataclasses.replace(r, samples=tuple(1e-3 * (1 + generator.paretovariate(2.5)) for _ in range(12)))
                for r in base.benchmark
                if r.samples
            )
            pair.append(dataclasses.replace(base, benchmark=rows))
        called += any(change.what in ("slower", "faster") for change in diff.compare(*pair, confidence=0.95).changes)
    assert called <= 15
    assert times(1.0)
