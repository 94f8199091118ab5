"""The prompts outputs are compared on."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from phases.base.errors import ServingError
from phases.base.reading import NotAFile, open_regular

LONGEST = 16 << 20  # characters of a prompt
BUILT_IN = Path(__file__).with_name("prompts.json")
_WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "forest",
    "once",
    "upon",
    "a",
    "time",
    "there",
    "was",
    "small",
    "model",
    "which",
    "spoke",
    "in",
    "short",
    "sentences",
    "lookup",
    "city",
    "days",
    "units",
    "metric",
    "return",
    "left",
    "right",
    "sum",
    "of",
    "two",
    "numbers",
    "number",
    "weather",
    "order",
    "count",
    "launch",
    "test",
    "ship",
]


@dataclass(frozen=True)
class Prompt:
    name: str
    kind: str  # short, long, json, code, language ...
    text: str


def load_prompts(path: Path | None) -> tuple[Prompt, ...]:
    """The prompt set of a JSON file, or the built-in one. `repeat` of an entry makes a long prompt of a short text.

    Raises:
        ServingError: naming the file and the entry that is wrong.
    """
    source = path or BUILT_IN
    try:
        with open_regular(source) as file:
            rows = json.loads(file.read().decode("utf-8"))
        prompts = tuple(
            Prompt(str(row["name"]), str(row["kind"]), _repeated(str(row["text"]), row.get("repeat", 1)))
            for row in rows
        )
    except OSError as fault:
        why = str(fault) if isinstance(fault, NotAFile) else f"cannot be read: {fault.strerror}"
        raise ServingError(f"{source} {why}.", hint="Check `prompts` in the playbook.") from None
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        hint = 'It must be a JSON list of {"name", "kind", "text"}, with "repeat" if wanted.'
        raise ServingError(f"{source} is not a prompt set: {type(fault).__name__} {fault}.", hint=hint) from None
    empty = [prompt.name for prompt in prompts if not prompt.text]
    if not prompts or empty or len({prompt.name for prompt in prompts}) < len(prompts):
        raise ServingError(
            f"{source} has no prompts, an empty text ({', '.join(empty) or 'none'}) or a name used twice.",
            hint="Mend it.",
        )
    return prompts


def _repeated(text: str, times: object) -> str:
    if isinstance(times, bool) or not isinstance(times, int):
        raise ValueError(f"repeat must be a whole number, not {times!r}")
    if len(text) * times > LONGEST:
        raise ValueError(f"repeat {times} makes a text of more than {LONGEST} characters")
    return text * times


def timing_prompt(number: int, tokens: int) -> list[int]:
    """Token ids of a prompt of that length that shares no prefix with those of other numbers, so no cache answers for it."""
    draw = random.Random(f"timing prompt {number}")
    return [draw.randrange(3, 259) for _ in range(tokens)]


def filler_text(number: int, words: int) -> str:
    """Words in a fixed pseudo-random order, for load of a given length."""
    draw = random.Random(f"filler {number}")
    return " ".join(draw.choice(_WORDS) for _ in range(words))
