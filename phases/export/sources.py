"""The sources of a Solution we export: the kernel's code as it was committed, and the file flashinfer-bench calls."""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any

from phases.harness.contract import Kernel
from phases.harness.definitions import CaseDefinition
from phases.harness.exchange import ExchangeError
from phases.harness.solutions import FOLDER
from phases.ledger.git import Git
from phases.ledger.objects import list_tree, read_objects

_CODE = {".py", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".cu", ".cuh", ".json"}
_SKIPPED = {"tests", "test", FOLDER, "build", "dist"}
_MOST_BYTES = 8 << 20

_ENTRY = '''\
"""{kernel}'s VARIANT, through its own contract module."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import {entry} as contract  # noqa: E402

AXES = {axes}  # axis: input and dimension that carry it, or its constant


def run({arguments}):
    inputs = {{{inputs}}}
    params = {{name: inputs[at[0]].shape[at[1]] if isinstance(at, tuple) else at for name, at in AXES.items()}}
    case = {{"name": "/".join(f"{{name}}{{value}}" for name, value in params.items()), "dtype": {dtype!r}, "params": params}}
    contract.run("VARIANT", case, inputs, {{{outputs}}})
'''


def sources_of(kernel: Kernel, manifest: dict[str, Any], git: Git) -> dict[str, str]:
    """Code files of the kernel's distribution at the checkpoint's source commit, by path below its root.

    Raises:
        ExchangeError: the checkpoint has no source commit, or the commit or the kernel's files are not in this clone.
    """
    commit = manifest["source"].get("commit")
    top = git.text("rev-parse", "--show-toplevel")
    root = os.path.relpath(kernel.root, os.path.realpath(top))
    where = f"{commit}:" + ("" if root == "." else f"{root}")
    if not commit or git.attempt("cat-file", "-e", where) is None:
        raise ExchangeError(
            f"the sources of {kernel.name} at commit {(commit or 'none')[:12]} are not in this repository.",
            hint="Commit before running the phase, and fetch the commit the checkpoint speaks of.",
        )
    entries = [e for e in list_tree(git, where, recursive=True) if _is_code(e.path)]
    contents = read_objects(git, (e.oid for e in entries))
    found = {e.path: contents[e.oid][1].decode(errors="replace") for e in entries if contents[e.oid][1]}
    if sum(map(len, found.values())) > _MOST_BYTES:
        raise ExchangeError(
            f"the sources of {kernel.name} below {kernel.root} exceed {_MOST_BYTES >> 20} MiB.",
            hint="Let `path` in kernel.yaml name the kernel alone.",
        )
    return found


def entry_text(kernel: Kernel, made: CaseDefinition) -> str:
    """The file with `run`, for a kernel whose run() needs nothing but the Definition's tensors, its axes being the case's params."""
    definition = made.definition
    axes: dict[str, Any] = {}
    for name, axis in definition["axes"].items():
        carriers = [
            (key, tensor["shape"].index(name))
            for key, tensor in definition["inputs"].items()
            if name in (tensor["shape"] or ())
        ]
        if axis["type"] == "const" or carriers:
            axes[name] = axis["value"] if axis["type"] == "const" else carriers[0]
    dtype = next(iter(definition["outputs"].values()))["dtype"]
    pairs = {what: ", ".join(f"{name!r}: {name}" for name in definition[what]) for what in ("inputs", "outputs")}
    return _ENTRY.format(
        kernel=kernel.name,
        entry=kernel.entry,
        axes=axes,
        dtype=dtype,
        arguments=", ".join([*definition["inputs"], *definition["outputs"]]),
        **pairs,
    )


def _is_code(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return PurePosixPath(path).suffix in _CODE and not any(
        part in _SKIPPED or part.startswith(".") for part in parts[:-1]
    )
