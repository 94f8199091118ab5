"""Where `phase analyze` reads from: files and URLs with JSON lines or Prometheus snapshots."""

from __future__ import annotations

import gzip
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

from phases.analysis import records
from phases.analysis.cells import ARMS
from phases.analysis.records import Records
from phases.analysis.scrape import Scrape, split_snapshots
from phases.base.errors import AnalysisError
from phases.base.reading import open_regular
from phases.base.scraping import MOST, PATIENCE, TooLong, get_text

_OWN_PIPES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # somebody writes to them: the shell that started us
TIMEOUT = 10.0  # seconds for one answer


@dataclass(frozen=True)
class Recorded:
    """What was read: records, or snapshots in order of time (one of the two is None)."""

    records: Records | None
    snapshots: tuple[tuple[str, Scrape], ...] | None


def read(names: Iterable[str]) -> Recorded:
    """Read all sources; all must be of one kind.

    Raises:
        AnalysisError: a source that cannot be read, or a mixture of records and snapshots.
    """
    found, snapshots = [], []
    for name in names:
        text = _text(name)
        if text.lstrip().startswith("#"):
            snapshots += split_snapshots(text, name)
        else:
            found.append(records.read(text.splitlines(), name))
    if found and snapshots:
        raise AnalysisError("request records and snapshots are mixed.", hint="Analyse them one after the other.")
    if found:
        return Recorded(records.merge(found) if len(found) > 1 else found[0], None)
    if not snapshots:
        raise AnalysisError("there is nothing in the sources.", hint="Snapshots start with: # scrape SECONDS ARM.")
    return Recorded(None, tuple(sorted(snapshots, key=lambda pair: pair[1].t)))


def live(
    urls: Iterable[str],
    *,
    every: float,
    until: float | None,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[str, Scrape]]:
    """Scrape `ARM=URL` sources every so many seconds until `until` seconds have passed (for ever without).

    A scrape that fails is left out: the arm is then silent, and a silent arm cannot pass.

    Raises:
        AnalysisError: a source that is not ARM=URL, or no first answer from one of them.
    """
    targets = [target(name) for name in urls]
    started, first = now(), True
    while until is None or now() - started <= until:
        begun = now()
        for arm, url in targets:
            try:
                text = _get(url)
            except AnalysisError:
                if first:
                    raise
                continue
            yield arm, Scrape.parse(text, t=now(), source=url)
        first = False
        sleep(max(0.0, every - (now() - begun)))


def is_target(name: str) -> bool:
    """Whether a source is a server to scrape: canary=URL or control=URL."""
    return name.split("=", 1)[0] in ARMS and "=" in name


def target(name: str) -> tuple[str, str]:
    """(arm, url) of `ARM=URL`."""
    arm, _, url = name.partition("=")
    if arm not in ARMS or not url.startswith(("http://", "https://")):
        raise AnalysisError(f"{name} is not a server to scrape.", hint="Write canary=http://HOST:PORT/metrics.")
    return arm, url


def _text(name: str) -> str:
    if name.startswith(("http://", "https://")):
        return _get(name, sys.maxsize, math.inf)  # records: as long as a file of them may be
    try:
        data = _bytes(name)
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except UnicodeDecodeError:
        raise AnalysisError(
            f"{name} is not text.", hint="Give JSON lines or Prometheus text, gzipped or not."
        ) from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise AnalysisError(f"cannot read {name}: {error}.", hint="Check the path.") from None


def _bytes(name: str) -> bytes:
    """A file whole; or what comes through standard input (`-`) or a pipe of the shell (`<(zcat ...)`) until its end."""
    if name == "-":
        if sys.stdin.isatty():
            raise AnalysisError(
                "standard input is a terminal.", hint="Send the records through a pipe, or name a file."
            )
        return sys.stdin.buffer.read()
    path = Path(name)
    if name.startswith(_OWN_PIPES) and path.is_fifo():
        return path.read_bytes()
    with open_regular(path) as file:
        return file.read()


def _get(url: str, most: int = MOST, patience: float = PATIENCE) -> str:
    try:
        return get_text(url, TIMEOUT, most=most, patience=patience)
    except TooLong as error:
        raise AnalysisError(f"{error}.", hint=error.hint) from None
    except requests.RequestException as error:
        raise AnalysisError(f"cannot read {url}: {error}.", hint="Is the server up, with --enable-metrics?") from None
