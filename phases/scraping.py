"""The text of a /metrics page, read as a stream and no further than a limit: what answers there may be sick, or something else."""

from __future__ import annotations

import requests

MOST = 16 << 20  # bytes; a page of SGLang or its router has some hundred thousand
_CHUNK = 1 << 16


class TooLong(requests.RequestException):
    """A page that goes on beyond its limit."""

    hint = "Does a label there take ever new values, or is it another program that answers?"

    def __init__(self, url: str, most: int) -> None:
        super().__init__(f"{url} is longer than {most >> 20} MiB and was read no further")


def get_text(url: str, timeout: float, session: requests.Session | None = None, *, most: int = MOST) -> str:
    """The page behind `url`. `timeout` in seconds is for connecting and for each part, `most` in bytes.

    Raises:
        requests.RequestException: no answer, one that is not 2xx, or one cut short; TooLong: more than can be metrics.
    """
    with (session or requests).get(url, timeout=timeout, stream=True) as answer:
        answer.raise_for_status()
        read = bytearray()
        for part in answer.iter_content(_CHUNK):
            read += part
            if len(read) > most:
                raise TooLong(url, most)
    return read.decode("utf-8", "replace")
