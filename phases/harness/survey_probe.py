"""Looks at the environment it runs in and prints JSON. Stdlib only, any Python from 3.8 on; imports none of what it looks at.

Run by `phases.harness.survey` as source text (with `phases/harness/fatbin.py` in front), the question as JSON on stdin.
"""

import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys


def main():
    sys.path[:] = [path for path in sys.path if path]  # not the directory we happen to be in
    question = json.load(sys.stdin)
    answer = {"python": platform.python_version(), "executable": sys.executable, "gpus": gpus()}
    answer["torch"] = version(["torch"])
    answer["kernels"] = [look(fact) for fact in question["facts"]]
    print(json.dumps(answer))


def look(fact):
    root = package_root(fact["package"])
    markers = [file for pattern in fact["markers"] for file in found(root, pattern)]
    files = [file for pattern in fact["binaries"] for file in found(root, pattern)]
    if fact["cached"]:
        files += found(cache_of(fact["package"]), "*/*.so")
    binaries = {}
    for file in files:
        try:
            binaries[file] = architectures(file)  # noqa: F821  from fatbin.py in front
        except (OSError, ValueError) as fault:
            binaries[file] = ["unreadable: " + str(fault)]
    return {
        "name": fact["name"],
        "version": version(fact["distributions"]),
        "root": root or "",
        "present": bool(markers),
        "binaries": binaries,
    }


def package_root(package):
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or []) if spec else []
    return places[0] if places else (os.path.dirname(spec.origin) if spec and spec.origin else None)


def cache_of(package):
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get(package.upper() + "_CACHE") or os.path.join(base, package)


def found(root, pattern):
    return sorted(glob.glob(os.path.join(glob.escape(root), pattern))) if root else []


def version(names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def gpus():
    """[(name, compute capability as 90, 120 ...)] as the driver tells."""
    argv = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        lines = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        return [
            [line.split(",")[0].strip(), int(line.split(",")[1].strip().replace(".", ""))]
            for line in lines
            if "," in line
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


if __name__ == "__main__":
    main()
