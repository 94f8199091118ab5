"""Is the serving environment what the release was made for? Checked on the target, before any server is started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from phases.base.errors import ServingError
from phases.harness.contract import Kernel
from phases.serving.host import ServingHost

PROBE_SECONDS = 180.0

_VERSIONS = """
import importlib.metadata as m, json, platform, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
import torch
facts = {"python": platform.python_version(), "sglang": version("sglang"), "torch": torch.__version__,
         "torch_cuda": torch.version.cuda, "cxx11_abi": torch.compiled_with_cxx11_abi(), "transformers": version("transformers"),
         "triton": version("triton"), "machine": platform.machine(), "gpu": None, "capability": None}
if torch.cuda.is_available():
    facts["gpu"] = torch.cuda.get_device_name(0)
    facts["capability"] = list(torch.cuda.get_device_capability(0))
print("PHASEGATE " + json.dumps(facts))
"""

# Loads every shared object of the release and imports the kernel's package, in a process of its own: one that crashes
# or misses a symbol ends this process, not a server.
_IMPORT = """
import ctypes, importlib, json, os, pathlib, sys
package, objects = sys.argv[1], pathlib.Path(sys.argv[2])
import torch
importlib.import_module(package)
loaded = []
for path in sorted(objects.rglob("*.so")):
    try:
        ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as fault:
        sys.exit(f"{path.relative_to(objects)}: {fault}")
    loaded.append(str(path.relative_to(objects)))
print("PHASEGATE " + json.dumps({"loaded": loaded}))
"""


@dataclass(frozen=True)
class Problem:
    """Why a release cannot be served here."""

    reason: str
    evidence: tuple[str, ...] = ()


def versions(host: ServingHost, python: str) -> dict:
    """Versions of what decides whether a release runs: Python, SGLang, torch and its ABI, GPU.

    Raises:
        ServingError: that Python has no SGLang or no torch.
    """
    done = host.run([python, "-c", _VERSIONS], {}, PROBE_SECONDS)
    facts = _answer(done.out)
    if done.code or facts is None:
        raise ServingError(
            f"{python} cannot import torch: {_last(done.err)}", hint="Check `server.python` in the playbook."
        )
    if not facts["sglang"]:
        raise ServingError(f"{python} has no SGLang.", hint="Install it there, or set `server.python: embedded`.")
    return facts


def import_objects(
    host: ServingHost, python: str, kernel: Kernel, release: Path, environment: dict[str, str]
) -> Problem | dict:
    """Import the kernel and load its objects inside the serving environment; what was loaded, or the problem."""
    variables = {**environment, "PYTHONPATH": str(release / "site")}
    done = host.run([python, "-c", _IMPORT, kernel.package, str(release / "objects")], variables, PROBE_SECONDS)
    answer = _answer(done.out)
    if done.code == 0 and answer is not None:
        return answer
    died = f"died of signal {-done.code}" if done.code < 0 else f"exit {done.code}"
    lines = tuple(done.err.strip().splitlines()[-8:])
    return Problem(f"the release cannot be loaded in the serving environment ({died}): {_last(done.err)}", lines)


def missing_libraries(host: ServingHost, release: Path, objects: list[str]) -> list[str]:
    """Shared libraries the objects want and the target lacks, by `ldd`: `object: library`."""
    missing = []
    for name in objects:
        done = host.run(["ldd", str(release / "objects" / name)], {}, 30.0)
        missing += [f"{name}: {line.split()[0]}" for line in done.out.splitlines() if "not found" in line]
    return missing


def wrong_architecture(archs: list[str], capability: list[int] | None, machine: str) -> str:
    """Why none of the built architectures runs on the target, or "".

    An object for sm_80 runs on 8.x from 8.0; sm_90a (architecture-specific) on 9.0 only.
    """
    if capability is None:
        if any(arch.replace("-", "_").startswith(machine) for arch in archs):
            return ""
        return f"the release has objects for {', '.join(archs) or 'nothing'}, the target is {machine}"
    major, minor = capability
    for arch in archs:
        number = arch.removeprefix("sm_")
        exact, digits = number[-1:] in "af", number.rstrip("af")
        if not arch.startswith("sm_") or not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if built == (major, minor) or (not exact and built[0] == major and built[1] <= minor):
            return ""
    return f"the release has objects for {', '.join(archs) or 'nothing'}, the target's GPU is sm_{major}{minor}"


def _answer(out: str) -> dict | None:
    for line in reversed(out.splitlines()):
        if line.startswith("PHASEGATE "):
            return json.loads(line.removeprefix("PHASEGATE "))
    return None


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it said nothing"
