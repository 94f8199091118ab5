"""Playbooks: what is read, and that the exported schema says the same as the loader."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from phases.base.errors import Exit, PlaybookError
from phases.playbook import loader
from phases.playbook.located import Mistakes, load_text
from phases.playbook.schema import Device, Review, Sign


def plain(text):
    """As an editor reads it (YAML 1.2)."""
    return load_text(text, "f", Mistakes()).plain()


GOOD = """schema: phasegate/playbook/v1
name: mine
kernel: kernel.yaml
ledger: {branch: proofs, remote: origin, sign: never}
phases:
  build-parity:
    review: none
    device: cpu
    benchmark: {cases: ["q9/*"], seconds: 500ms, min_samples: 5}
    gate:
      rules:
        - rule: parity
        - {rule: speedup, baseline: naive, candidate: fast, at_least: 1.5}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "kernel.yaml").write_text("")

    def load(text):
        (tmp_path / "p.yaml").write_text(text)
        return loader.load(tmp_path / "p.yaml")

    return load


def test_everything_of_a_playbook(load):
    playbook = load(GOOD)
    (section,) = playbook.phases
    assert (playbook.name, playbook.ledger.branch, playbook.ledger.sign) == ("mine", "proofs", Sign.NEVER)
    assert (section.review, section.settings.device, section.settings.benchmark.seconds) == (
        Review.NONE,
        Device.CPU,
        0.5,
    )
    assert [rule.kind for rule in section.rules] == ["parity", "speedup"]
    assert section.rules[1].where.endswith("p.yaml:13")
    assert playbook.kernel.is_absolute() and playbook.kernel.name == "kernel.yaml"


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("playbook/v1", "playbook/v2", 1, "one of phasegate/playbook/v1"),
        ("name: mine", "name: '../x'", 2, "of the form"),
        ("kernel: kernel.yaml", "kernel: k.yaml", 3, "there is no file k.yaml"),
        ("kernel: kernel.yaml", 'kernel: "a\\0b"', 3, "must be a path"),
        ("kernel: kernel.yaml", f"kernel: {'k' * 5000}", 3, "there is no file k"),
        ("seconds: 500ms", f"seconds: {'9' * 400}", 9, "a finite number"),
        ("ledger:", "leger:", 4, "did you mean 'ledger'"),
        ("remote: origin", "remote: --upload-pack=x", 4, "text of the form"),
        ("  build-parity:", "  build_parity:", 6, "did you mean 'build-parity'"),
        ("review: none", "review: never", 7, "one of required, none"),
        ("device: cpu", "gates: cpu", 8, "did you mean 'gate'"),
        ("min_samples: 5", "min_samples: 50, max_samples: 4", 9, "more than max_samples"),
        (
            "      rules:\n        - rule: parity\n        - {rule: speedup, baseline: naive, candidate: fast, at_least: 1.5}\n",
            "      rules: []\n",
            11,
            "at least one entry",
        ),
        ("rule: parity", "rule: parity\n          absent: maybe", 13, "one of fail, inconclusive, zero"),
        ("        - rule: parity", "        - parity", 12, "needs the key 'rule'"),
    ],
)
def test_each_mistake_has_its_line_and_the_schema_agrees(load, old, new, line, words):
    assert old in GOOD
    text = GOOD.replace(old, new)
    with pytest.raises(PlaybookError) as caught:
        load(text)
    assert caught.value.exit_code is Exit.USAGE
    assert any(f"p.yaml:{line}: " in row and words in row for row in str(caught.value).splitlines()), str(caught.value)
    if not words.startswith(("there is no file", "more than max", "must be a path", "a finite")):
        assert not jsonschema.Draft202012Validator(loader.schema()).is_valid(plain(text))


def test_variants_that_kernel_yaml_does_not_have(load, tmp_path):
    (tmp_path / "kernel.yaml").write_text("variants: {naive: {}, fast: {}}\n")
    load(GOOD)
    with pytest.raises(PlaybookError) as caught:
        load(GOOD.replace("candidate: fast", "candidate: fats").replace("seconds: 500ms", "variants: [naive, other]"))
    rows = str(caught.value).splitlines()
    assert any(
        "p.yaml:9: " in row and "benchmark.variants[1]: kernel.yaml has no variant 'other'" in row for row in rows
    ), rows
    assert any("p.yaml:13: " in row and "'fats' (did you mean 'fast'?)" in row for row in rows), rows


def test_broken_yaml_is_one_mistake(load):
    with pytest.raises(PlaybookError) as caught:
        load("a: [1\nb: }")
    assert len(str(caught.value).splitlines()) == 2, str(caught.value)


def test_phases_out_of_order(load):
    from phases.playbook.phase_kinds import PHASES

    names = list(PHASES)
    body = "\n".join(f"  {name}: {{gate: {{rules: [{{rule: parity}}]}}}}" for name in (names[2], names[0]))
    with pytest.raises(PlaybookError, match=f"phase {names[0]} stands after {names[2]}"):
        load(GOOD[: GOOD.index("  build-parity")] + body)


def test_the_schema_is_valid_and_accepts_what_we_ship(load):
    schema = loader.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(plain(GOOD), schema)
    shipped = list((Path(__file__).parents[2] / "playbooks").glob("*.yaml"))
    assert shipped
    for path in shipped:
        jsonschema.validate(plain(path.read_text()), schema)


def _empty(node, path=""):
    """Paths of `{}`: places where an editor is told nothing."""
    if node == {}:
        yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _empty(child, f"{path}/{key}")


def test_the_schema_says_something_of_every_key():
    assert list(_empty(loader.schema())) == []


def test_comments_and_review_do_not_change_what_was_judged(load):
    digest = load(GOOD).phases[0].digest
    assert load(GOOD.replace("review: none", "review: required # now")).phases[0].digest == digest
    assert load(GOOD.replace("1.5", "1.4")).phases[0].digest != digest
