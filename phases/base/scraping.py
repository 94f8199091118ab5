"""The text of a /metrics page, read as a stream and no further than a limit: what answers there may be sick, or something else."""

from __future__ import annotations

import time
from collections.abc import Iterator

import requests
import urllib3

MOST = 16 << 20  # bytes; a page of SGLang or its router has some hundred thousand
PATIENCE = 6.0
_CHUNK = 1 << 16


class TooLong(requests.RequestException):
    """A page that goes on beyond its limit."""

    hint = "Does a label there take ever new values, or is it another program that answers?"

    def __init__(self, url: str, most: int) -> None:
        super().__init__(f"{url} is longer than {most >> 20} MiB and was read no further")


def get_text(
    url: str, timeout: float, session: requests.Session | None = None, *, most: int = MOST, patience: float = PATIENCE
) -> str:
    """The page behind `url`. `timeout` in seconds is for connecting and for each part, `patience` times that for all of them, `most` in bytes.

    Raises:
        requests.RequestException: no answer, one that is not 2xx, or one cut short; ReadTimeout: also one that trickles; TooLong: more than can
            be metrics.
    """
    until = time.monotonic() + timeout * patience
    with (session or requests).get(url, timeout=timeout, stream=True) as answer:
        answer.raise_for_status()
        read = bytearray()
        for part in _parts(answer):
            read += part
            if len(read) > most:
                raise TooLong(url, most)
            if time.monotonic() > until:
                raise requests.ReadTimeout(f"{url} was not there whole within {timeout * patience:g} s")
    return read.decode("utf-8", "replace")


def _parts(answer: requests.Response) -> Iterator[bytes]:
    """What has come, however little: `iter_content` waits until a part is full, which one that trickles never is."""
    read = getattr(answer.raw, "read1", answer.raw.read)  # before urllib3 2.2 there is only the one that waits
    try:
        while part := read(_CHUNK, decode_content=True):
            yield part
    except urllib3.exceptions.ReadTimeoutError as fault:
        raise requests.ReadTimeout(str(fault)) from fault
    except urllib3.exceptions.HTTPError as fault:
        raise requests.ConnectionError(fault) from fault
