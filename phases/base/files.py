"""Files that are whole or absent, and the system's file errors in words a person can act on."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step; after a power cut the old or the new content is there, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def is_leftover(path: Path) -> bool:
    """Whether this is what a process killed inside `write_atomically` left behind."""
    return re.fullmatch(r"\..+\.\d+\.tmp", path.name) is not None


def write_json(path: Path, value: Any) -> None:
    """`write_atomically` of indented JSON with sorted keys; NaN and infinities are refused (ValueError)."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    write_atomically(path, text.encode() + b"\n")


def sync_directory(path: Path) -> None:
    """Make the creation or the renaming of files in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(fault: OSError) -> tuple[str, str]:
    """What an OSError means and what to do about it: (message, hint)."""
    where = f" at {fault.filename}" if fault.filename else ""
    if fault.errno in _FULL:
        return f"no space left to write{where}.", "Free some space (or raise the quota or file size limit)."
    if fault.errno in _READ_ONLY:
        return (
            f"not allowed to write{where} ({fault.strerror}).",
            "Make it writable for this user, or work in a clone that is.",
        )
    return f"{fault.strerror or fault}{where}.", ""
