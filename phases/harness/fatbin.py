"""Which GPU architectures a shared object carries code for, read from its CUDA fat binaries without any CUDA tool.

A fat binary container starts with the magic word 0xBA55ED50, a version, the size of its header and of its entries. Each
entry's header says whether it is machine code or PTX, the architecture, and in its flags whether that is architecture
specific (`a`) or family specific (`f`). Layout as nvcc 11 to 13 write it; checked against cuobjdump in the tests. Stdlib
only: the survey's probe carries this source into other environments.
"""

import mmap
import struct

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all entries
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")  # kind, -, header bytes, payload bytes, -, -, minor, major, arch, -, -, flags
_PTX, _CUBIN = 1, 2
_SPECIFIC, _FAMILY = 0x00100000, 0x00200000


def architectures(path):
    """Sorted names such as sm_80, sm_90a, compute_120 (PTX) found in a file; empty for a file without device code."""
    with open(path, "rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            return []
        with data:
            return in_order(_scan(data))


def in_order(names):
    """Machine code before PTX, each from the oldest architecture to the newest."""
    return sorted(names, key=lambda name: (not name.startswith("sm_"), _number(name), name))


def _scan(data):
    found = set()
    at = data.find(_MAGIC)
    while at >= 0:
        if at + _CONTAINER.size <= len(data):
            _, version, header, size = _CONTAINER.unpack_from(data, at)
            if version == 1 and header == _CONTAINER.size:
                found |= _entries(data, at + header, min(at + header + size, len(data)))
        at = data.find(_MAGIC, at + 4)
    return found


def _entries(data, at, end):
    found = set()
    while at + _ENTRY.size <= end:
        kind, _, header, payload, _, _, _, _, arch, _, _, flags = _ENTRY.unpack_from(data, at)
        if kind not in (_PTX, _CUBIN) or header < 48 or not 10 <= arch < 1000:
            break  # not an entry: the layout is another one
        suffix = "a" if flags & _SPECIFIC else "f" if flags & _FAMILY else ""
        found.add(("compute_" if kind == _PTX else "sm_") + str(arch) + suffix)
        at += header + payload
    return found


def _number(name):
    return int("".join(c for c in name if c.isdigit()) or 0)


def runs_on(architecture, sm):
    """Whether code for `architecture` (sm_90a, compute_80 ...) runs on a GPU of compute capability `sm` (90, 120 ...)."""
    kind, _, target = architecture.partition("_")
    built, suffix = _number(target), target[-1] if target[-1] in "af" else ""
    if suffix == "a":
        return built == sm
    if kind == "compute" and not suffix:
        return sm >= built
    return built // 10 == sm // 10 and sm >= built
