"""Opening what a user named as a file, without waiting for ever on what is none."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class NotAFile(OSError):
    """What was named is a directory, a pipe, a device or a socket."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file (or a link to one) for reading.

    Raises:
        NotAFile: it is something else. A pipe nobody writes to would wait, a device might never end.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            raise NotAFile(f"is {_KINDS.get(kind, 'something else')}, not a file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
