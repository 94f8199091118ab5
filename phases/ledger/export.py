"""Writing a checkpoint out as a plain directory that verifies on its own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from phases.base.errors import LedgerError
from phases.ledger.checkpoint import MANIFEST, Checkpoint
from phases.ledger.ledger import Ledger
from phases.ledger.verify import verify_directory


def export(ledger: Ledger, checkpoint: Checkpoint, target: Path) -> Path:
    """Write `<target>/<checkpoint name>/`, whole or not at all; the same content already there is left as it is.

    Raises:
        LedgerError: the directory exists with other content, or cannot be written.
    """
    files = ledger.files(checkpoint)
    for path in files:
        if not is_plain(path):  # a hand-made tree may hold `..`
            raise LedgerError(
                f"{checkpoint.name} holds {path!r}, which would be written outside of its directory.",
                hint="Run `phase checkpoint verify`.",
            )
    directory = target / checkpoint.name
    if directory.exists():
        if _read(directory) == files:
            return directory
        raise LedgerError(
            f"{directory} exists and holds something else.", hint="Move it away or export into another directory."
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{checkpoint.name}-", dir=target))
        try:
            for path, data in files.items():
                (scratch / path).parent.mkdir(parents=True, exist_ok=True)
                (scratch / path).write_bytes(data)
            scratch.chmod(0o755)
            os.rename(scratch, directory)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    except OSError as fault:
        raise LedgerError(
            f"{directory} cannot be written: {fault.strerror or fault}.", hint="Choose a writable directory with room."
        ) from fault
    return directory


def read_directory(directory: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Files and manifest of a checkpoint exported as plain files, once it has proved to be unaltered.

    Raises:
        LedgerError: it is none, or was altered.
    """
    problems = verify_directory(directory)
    if problems:
        raise LedgerError(
            f"{directory} was altered: {problems[0]}.", hint=f"See `phase checkpoint verify {directory}`."
        )
    files = _read(directory)
    return files, json.loads(files[MANIFEST])


def is_plain(path: str) -> bool:
    """Whether a path stays below the directory it is joined to."""
    return not path.startswith("/") and all(part not in ("", ".", "..") for part in path.split("/"))


def _read(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
