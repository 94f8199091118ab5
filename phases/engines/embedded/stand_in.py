"""Stand-in workers for the embedded fleet: real processes that answer as SGLang servers do, without a model, and say that they are none.

`server.python: stand-in` in a playbook chooses them: `phase demo` does, and whoever wants to try kills, suspensions and rollbacks in seconds.
The router before them is the real sglang-router, the only thing that is downloaded: pinned, by hash, without what SGLang needs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phases.base.errors import ServingError

STAND_IN = "stand-in"
HERE = Path(__file__).parent
WORKER = HERE / "standin_worker.py"
# The router is a Rust library behind a Python command. That command also imports a load balancer for tests, and with it a web framework.
ROUTER = (
    "import sys, types; "
    "sys.modules['sglang_router.mini_lb'] = types.SimpleNamespace(MiniLoadBalancer=None); "
    "from sglang_router.launch_router import main; main()"
)
ROUTER_NEEDS = ("sglang-router", "setproctitle")  # all that the router imports beyond Python itself


def stand_in_facts(cache: Path) -> dict[str, Any]:
    """What a release is launched with: as `environment_facts` of a serving environment.

    Args:
        cache: the toolkit's cache directory; what starts a worker is kept there under a digest of its content.
    """
    script = f'#!/bin/sh\n# python -m sglang.launch_server ARGUMENTS...\nshift 2\nexec "{sys.executable}" -E -s "{WORKER}" "$@"\n'
    directory = cache / f"stand-in-{hashlib.sha256(script.encode() + WORKER.read_bytes()).hexdigest()[:12]}"
    python = directory / "python"
    if not python.exists():
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / f".python.{os.getpid()}"
        partial.write_text(script)
        partial.chmod(0o755)
        os.replace(partial, python)
    return {"python": str(python), "model": STAND_IN, "draft_model": ""}


def router_launch(cache: Path, progress: Callable[[str], None]) -> tuple[list[str], dict[str, str]]:
    """Argv and environment variables that start sglang-router with this Python; its own flags come after. Raises as `router_path`."""
    return [sys.executable, "-c", ROUTER], {"PYTHONPATH": str(router_path(cache, progress))}


def router_path(cache: Path, progress: Callable[[str], None]) -> Path:
    """Directory that holds sglang-router for this Python, installed now if it is not there.

    Raises:
        ServingError: it cannot be installed, with pip's last lines.
    """
    requirements = "".join(_pinned((HERE / "requirements.txt").read_text(), name) for name in ROUTER_NEEDS)
    key = hashlib.sha256(f"{requirements}\0{sys.implementation.cache_tag}".encode()).hexdigest()[:12]
    place = cache / f"router-{key}"
    if place.exists():
        return place
    progress("installing sglang-router, once")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="router-", dir=cache) as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(requirements)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input"]
        argv = [*pip, "--no-deps", "--require-hashes", "--target", f"{folder}/site", "-r", str(wanted)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise ServingError(
                f"sglang-router cannot be installed: {said}",
                hint="It comes as a wheel for Linux on x86-64 and Python 3.11 to 3.13, from the package index that pip uses.",
            )
        try:
            os.rename(f"{folder}/site", place)
        except OSError:  # another process was faster
            shutil.rmtree(f"{folder}/site", ignore_errors=True)
    return place


def _pinned(text: str, name: str) -> str:
    """A requirement with its hashes, as the file has it."""
    found = re.search(rf"^{re.escape(name)}==(?:[^\n]*\\\n)*[^\n]*\n", text, re.MULTILINE)
    if found is None:
        raise ServingError(f"{name} is not among the pinned requirements.")
    return found[0]
