"""Request records as JSON lines: `{"t": 12.3, "arm": "canary", "metric": "ttft", "value": 0.041, "status": 200}`.

`t` is the time in seconds at which the request (or, for `itl`, the token) completed. A request that failed has a status and
may leave `value` out. Records of both arms may be interleaved in any order within a window.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from phases.analysis.cells import ARMS
from phases.analysis.settings import METRICS
from phases.base.errors import AnalysisError


@dataclass(frozen=True)
class ArmRecords:
    """Requests of one arm and metric, shape (n,) each, in the order of the file; value is NaN where the request failed."""

    t: np.ndarray
    value: np.ndarray
    status: np.ndarray

    @property
    def succeeded(self) -> np.ndarray:
        return (self.status >= 200) & (self.status < 300)

    def before(self, end: float, start: float = -math.inf) -> ArmRecords:
        """Those with start <= t < end."""
        keep = (self.t >= start) & (self.t < end)
        return ArmRecords(self.t[keep], self.value[keep], self.status[keep])


Records = dict[str, dict[str, ArmRecords]]  # metric -> arm -> records


def read(lines: Iterable[str], name: str) -> Records:
    """Parse JSON lines.

    Args:
        lines: the text, line by line; blank lines are skipped.
        name: of the file or URL, for messages.

    Raises:
        AnalysisError: the first line that is not a valid record, as `name:line`.
    """
    rows: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            metric, arm, row = _row(line, f"{name}:{number}")
            rows.setdefault((metric, arm), []).append(row)
    if not rows:
        raise AnalysisError(f"{name} holds no records.", hint="Give JSON lines or Prometheus snapshots.")
    records: Records = {}
    for (metric, arm), found in rows.items():
        t, value, status = (np.array(column) for column in zip(*found, strict=True))
        records.setdefault(metric, {})[arm] = ArmRecords(t, value.astype(float), status.astype(int))
    return records


def merge(parts: Iterable[Records]) -> Records:
    """Records of several files as one, ordered by time within each arm."""
    joined: Records = {}
    for part in parts:
        for metric, arms in part.items():
            for arm, new in arms.items():
                old = joined.setdefault(metric, {}).get(arm)
                if old is None:
                    joined[metric][arm] = new
                    continue
                t = np.concatenate([old.t, new.t])
                order = np.argsort(t, kind="stable")
                value, status = np.concatenate([old.value, new.value]), np.concatenate([old.status, new.status])
                joined[metric][arm] = ArmRecords(t[order], value[order], status[order])
    return joined


def _row(line: str, where: str) -> tuple[str, str, tuple[float, float, int]]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise AnalysisError(f"{where}: not JSON: {error}.", hint="Each line is one record.") from None
    except RecursionError:
        raise AnalysisError(
            f"{where}: nested too deeply to be a record.", hint="Each line is one flat JSON object."
        ) from None
    if not isinstance(record, dict):
        raise AnalysisError(f"{where}: not a JSON object.", hint="Each line is one record.")
    arm, metric = record.get("arm"), record.get("metric")
    if arm not in ARMS:
        raise AnalysisError(f"{where}: arm is {_short(arm)}.", hint="It is canary or control.")
    if metric not in METRICS:
        raise AnalysisError(f"{where}: metric is {_short(metric)}.", hint=f"It is one of {', '.join(METRICS)}.")
    status = record.get("status", 200)
    if type(status) is not int or not 0 <= status < 1000:
        raise AnalysisError(f"{where}: status is {_short(status)}.", hint="It is an HTTP status, or 0 for no answer.")
    t = _number(record.get("t"), "t", where)
    if not 200 <= status < 300:
        return metric, arm, (t, math.nan, status)
    value = _number(record.get("value"), "value", where)
    if value < 0:
        raise AnalysisError(f"{where}: value {value} is negative.", hint="A latency in seconds is not.")
    return metric, arm, (t, value, status)


def _number(value: object, key: str, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise AnalysisError(f"{where}: {key} is {_short(value)}, not a finite number.", hint="Give seconds.")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
