"""Pages, trees, algorithms and backends that SGLang would refuse at start are refused when the playbook is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from phases.base.errors import PlaybookError
from phases.playbook import loader
from phases.serving.flags import refused, value_of

TREE = ("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "4")
NGRAM = ("--speculative-algorithm", "NGRAM")
PAGES = ("--page-size", "64")


@pytest.mark.parametrize(
    ("arguments", "backend", "wrong"),
    [
        ((*TREE, *PAGES), "verify_attn", True),
        ((*TREE, *PAGES), "flashmla", True),
        ((*TREE, *PAGES), "triton", False),
        ((*NGRAM, *PAGES), "triton", True),
        ((*NGRAM, *PAGES), "flashinfer", False),
        ((*NGRAM, "--speculative-ngram-max-bfs-breadth", "1", *PAGES), "verify_attn", False),
        ((*TREE, "--page-size=64"), "verify_attn", True),
        ((*PAGES, *TREE, "--page-size", "1"), "verify_attn", False),  # the last one counts
        ((*TREE[:2], "--speculative-eagle-topk=1", *PAGES), "verify_attn", False),
        (TREE, "verify_attn", False),
        (PAGES, "verify_attn", False),
        (("--page-size",), "verify_attn", False),
    ],
)
def test_trees_over_pages(arguments: tuple[str, ...], backend: str, wrong: bool) -> None:
    assert bool(refused(arguments, backend)) is wrong


def test_a_flag_without_a_value_has_none() -> None:
    assert value_of(("--a", "1", "--a"), "--a") == "" and value_of(("--a=1=2",), "--a") == "1=2"


PLAYBOOK = """\
schema: phasegate/playbook/v1
name: flags
kernel: {kernel}
production:
  server: {{python: /usr/bin/python3, model: m, arguments: [--speculative-algorithm, EAGLE, --speculative-eagle-topk, "4"{shared}]}}
  incumbent: {{backend: triton}}
  candidate: {{backend: verify_attn{own}}}
phases:
  sglang-integration:
    server: {{python: /usr/bin/python3, model: m, arguments: [--speculative-algorithm, EAGLE, --speculative-eagle-topk, "4"{shared}]}}
    incumbent: {{backend: triton}}
    candidate: {{{own_only}}}
"""
KERNEL = Path(__file__).parents[2] / "kernels/verify_attn/kernel.yaml"


@pytest.mark.parametrize("where", ["shared", "own"])
def test_the_playbook_is_refused_with_file_and_line_before_anything_moves(tmp_path: Path, where: str) -> None:
    shared = ', --page-size, "64"' if where == "shared" else ""
    own = 'arguments: [--page-size, "64"]' if where == "own" else ""
    file = tmp_path / "playbook.yaml"
    file.write_text(PLAYBOOK.format(kernel=KERNEL, shared=shared, own=f", {own}" if own else "", own_only=own))
    with pytest.raises(PlaybookError) as fault:
        loader.load(file)
    said = str(fault.value)
    assert said.count("served by flashinfer, fa3, triton only") == 2 and "playbook.yaml:" in said
    assert "candidate" in said and "incumbent:" not in said and "--page-size 1" in said
    file.write_text(PLAYBOOK.format(kernel=KERNEL, shared="", own="", own_only=""))
    loader.load(file)
