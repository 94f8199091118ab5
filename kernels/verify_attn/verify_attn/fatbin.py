"""Reads which GPU architectures a shared object holds machine code for, without the CUDA tools.

Layout, as cuobjdump shows it and as is stable since CUDA 9: a fat binary starts with magic 0xBA55ED50, version,
header size and body size; its body is a chain of entries, each with a kind (1 PTX, 2 machine code), its own header
size, payload size and, at byte 28, the architecture number. Whether an entry is of the architecture-specific kind
(sm_90a) stands only in its payload, which may be compressed; `cuobjdump --list-elf` tells, when there is one.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CODE = 2


def embedded_archs(path: Path) -> frozenset[str]:
    """Architectures (sm_80, sm_90a ...) with machine code in the object; empty when it holds none.

    Where only the number is known, both the plain and the `a`/`f` names of it are returned.
    """
    tool = shutil.which("cuobjdump")
    if tool:
        listed = subprocess.run([tool, "--list-elf", str(path)], capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            return frozenset(re.findall(r"\.(sm_\d+[af]?)\.", listed.stdout))
    return frozenset(name for number in _numbers(path.read_bytes()) for name in (f"sm_{number}", f"sm_{number}a", f"sm_{number}f"))


def _numbers(data: bytes) -> set[int]:
    found: set[int] = set()
    start = data.find(_MAGIC)
    while start >= 0:
        header, body = struct.unpack_from("<HQ", data, start + 6)
        at, end = start + header, min(start + header + body, len(data))
        while at + 32 <= end:
            kind, _, entry_header, size = struct.unpack_from("<HHIQ", data, at)
            if entry_header < 32:
                break
            if kind == _CODE:
                found.add(struct.unpack_from("<I", data, at + 28)[0])
            at += entry_header + size
        start = data.find(_MAGIC, start + 4)
    return found
