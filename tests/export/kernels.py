"""A repository with the kernel that `phase init` makes, and Solutions of others for it."""

from __future__ import annotations

import dataclasses
import json

from phases.base.results import BenchmarkRecord, Case, ParityRecord, Results
from phases.cli.init import _scaffold
from phases.harness import contract
from tests.run.conftest import git

RETURNING = {
    "name": "Norm v1 by Eve",
    "definition": "norm_float32",
    "author": "eve",
    "spec": {
        "language": "python",
        "target_hardware": ["cpu"],
        "entry_point": "pkg/main.py::run",
        "destination_passing_style": False,
        "dependencies": ["torch"],
    },
    "sources": [
        {"path": "pkg/main.py", "content": "from .parts import scale\n\n\ndef run(x):\n    return x * scale(x)\n"},
        {
            "path": "pkg/parts.py",
            "content": "import torch\n\n\ndef scale(x):\n    return torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)\n",
        },
    ],
}


def solution(**changes):
    made = json.loads(json.dumps(RETURNING))
    spec = changes.pop("spec", {})
    return {**made, **changes, "spec": {**made["spec"], **spec}}


def in_place(text, name="in_place"):
    return solution(
        name=name,
        spec={"entry_point": "main.py::run", "destination_passing_style": True},
        sources=[{"path": "main.py", "content": text}],
    )


def repository(directory):
    """The scaffolded kernel `norm`, committed."""
    directory.mkdir()
    _scaffold(directory, "norm")
    git(directory, "init", "-q")
    git(directory, "config", "user.name", "Ada")
    git(directory, "config", "user.email", "ada@example.org")
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "start")
    return contract.load(directory)


def case(rows=4, columns=8):
    return Case(f"{rows}x{columns}", "float32", {"rows": rows, "columns": columns})


def results(*more):
    parity = (ParityRecord(case(), "vectorised", "cpu", True, error=1e-7, tolerance=1e-5, max_abs=2e-7),)
    benchmark = (
        BenchmarkRecord(case(), "rows", "baseline", "cpu", (2e-3, 3e-3, 4e-3), parity_after=True),
        BenchmarkRecord(case(), "vectorised", "candidate", "cpu", (1e-3, 1e-3, 4e-3), parity_after=True),
        BenchmarkRecord(case(9, 9), "vectorised", "candidate", "cpu", refused="too odd"),
    )
    made = Results(
        "build-parity", "norm", parity=parity, benchmark=benchmark, facts={"cpu": "Test CPU", "torch": "2.13"}
    )
    return dataclasses.replace(made, **dict(more))


def manifest(kernel, dirty=False):
    commit = git(kernel.file.parent, "rev-parse", "HEAD")
    return {
        "author": "Ada <ada@example.org>",
        "recorded_at": "2026-01-02T03:04:05Z",
        "source": {"commit": commit, "dirty": dirty},
        "facts": {},
    }
