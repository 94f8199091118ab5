"""Launch flags that cannot go together, known before anything is started.

What SGLang refuses at start is read from its own source (0.5.23, `srt/arg_groups/speculative_hook.py`): trees of drafts
(top-k over 1) over pages of more than one token need a draft decode in two passes, which few of its attention backends have and no plugin's.
"""

from __future__ import annotations

from collections.abc import Sequence

TREES_OVER_PAGES = {"NGRAM": ("flashinfer",)}  # by algorithm; all others:
BREADTH, DEFAULT_BREADTH = "--speculative-ngram-max-bfs-breadth", 10  # what NGRAM has for a top-k
OTHERS = ("flashinfer", "fa3", "triton")


def value_of(arguments: Sequence[str], flag: str) -> str:
    """The value a flag ends up with, as argparse takes it: the last one counts, `--flag VALUE` or `--flag=VALUE`; empty without it."""
    found = ""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else (arguments[place + 1] if place + 1 < len(arguments) else "")
    return found


def refused(arguments: Sequence[str], backend: str) -> str:
    """Why SGLang will not start with these flags and this attention backend; empty when nothing is known against it."""
    algorithm = value_of(arguments, "--speculative-algorithm").upper()
    branching = BREADTH if algorithm == "NGRAM" else "--speculative-eagle-topk"
    page, topk = (_number(value_of(arguments, flag)) for flag in ("--page-size", branching))
    if algorithm == "NGRAM" and not value_of(arguments, BREADTH):
        topk = DEFAULT_BREADTH
    if not algorithm or page <= 1 or topk <= 1:
        return ""
    able = TREES_OVER_PAGES.get(algorithm, OTHERS)
    if backend in able:
        return ""
    return (
        f"{algorithm} with {branching} {topk} over pages of {page} tokens is served by {', '.join(able)} only, "
        f"not by {backend}: use --page-size 1, or {branching} 1"
    )


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
