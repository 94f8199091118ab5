"""`phase` on a machine that is not Linux, as far as a Linux machine can play one (a fake: there is no Mac here).

/proc and /sys are absent, prctl and what else only Linux has is gone from Python; then the command line runs as always.
Used as a script: laptop.py ARGUMENT...
"""

from __future__ import annotations

import os
import select
import sys
import time

LINUX = {
    os: ("memfd_create", "sched_getaffinity", "sched_setaffinity", "pidfd_open", "eventfd", "getrandom"),
    time: ("CLOCK_BOOTTIME",),
    select: ("epoll",),
}
TREES = ("/proc", "/sys")


def absent(path: object) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    text = os.path.normpath(os.fsdecode(path))
    return any(text == tree or text.startswith(f"{tree}/") for tree in TREES)


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: whatever opens or lists a file, and whatever asks a library for a function."""
    if event in ("open", "os.listdir", "os.scandir", "os.chdir") and absent(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))
    if event == "ctypes.dlsym" and arguments[1] == "prctl":
        raise AttributeError("prctl")


def without(function):
    def asked(path, *arguments, **named):
        if absent(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *arguments, **named)

    return asked


def leave_linux() -> None:
    for module, names in LINUX.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in ("stat", "lstat", "readlink"):
        setattr(os, name, without(getattr(os, name)))
    sys.addaudithook(refuse)


if __name__ == "__main__":
    leave_linux()
    from phases.cli.main import main

    main()
