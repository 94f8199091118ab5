"""The dispatch table: which variant, with how many KV splits, was fastest at which measured shape of which GPU.

`dispatch.json` beside this file holds what was measured before the release; VERIFY_ATTN_DISPATCH may name a file of the
same form that `phase kernel tune` recorded on the machine itself, whose rows for a GPU replace the shipped ones.
"""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from verify_attn.errors import InputError
from verify_attn.problem import Problem

SCHEMA = "verify_attn/dispatch/v1"
TABLE = "VERIFY_ATTN_DISPATCH"
ALIKE = 1.1  # ratio of keys up to which a shape with the rows and streams of a measured one counts as measured


@dataclass(frozen=True)
class Row:
    """One measured shape and its winner. `microseconds` is the winner's median; splits 0 = the variant's own choice."""

    gpu: str
    dtype: str
    heads: int
    q: int
    streams: int
    prefix: int
    variant: str
    splits: int = 0
    microseconds: float | None = None


def read(path: Path) -> tuple[Row, ...]:
    """Rows of a table file.

    Raises:
        InputError: naming the file and what is wrong with it.
    """
    try:
        data = json.loads(path.read_text())
        if data.get("schema") != SCHEMA:
            raise InputError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA!r}; tune again")
        return tuple(Row(**row) for row in data["rows"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a dispatch table ({error}); tune again or remove it") from error


def write(path: Path, rows: tuple[Row, ...]) -> None:
    """Writes a table, replacing the file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    text = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
    temporary.write_text(f'{{"schema": "{SCHEMA}", "rows": [\n{text}\n]}}\n')
    os.replace(temporary, path)


@functools.cache
def rows() -> tuple[Row, ...]:
    """The shipped rows, those of the GPUs in the machine's own table replaced by it."""
    shipped = read(Path(__file__).with_name("dispatch.json"))
    own = read(Path(os.environ[TABLE])) if os.environ.get(TABLE) else ()
    tuned = {row.gpu for row in own}
    return own + tuple(row for row in shipped if row.gpu not in tuned)


def nearest(gpu: str, problem: Problem) -> Row | None:
    """The measured shape nearest to the problem's on that GPU, or None where nothing was measured for its dtype.

    Near means: smallest squared distance of the base-2 logarithms of rows (heads x max_q), streams and max_prefix. Splits are of use only
    where they were measured: of a shape that is not nearly the problem's, the row comes with the variant's own choice.
    """
    dtype = str(problem.q.dtype).removeprefix("torch.")
    at = (problem.heads * max(problem.max_q, 1), max(problem.streams, 1), problem.max_prefix + problem.max_q)
    best, least = None, math.inf
    for row in rows():
        if row.gpu != gpu or row.dtype != dtype:
            continue
        shape = (row.heads * row.q, row.streams, row.prefix + row.q)
        distance = sum(math.log2(a / b) ** 2 for a, b in zip(at, shape))
        if distance < least:
            best, least = row, distance
    if best and (at[:2] != (best.heads * best.q, best.streams) or least > math.log2(ALIKE) ** 2):
        return replace(best, splits=0)
    return best
