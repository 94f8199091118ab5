"""Which MLA and verify kernels a Python environment has, and whether each could do this job here (`phase kernel survey`).

What is installed, its versions and the architectures of its binaries are observed in that environment, by a probe that
imports nothing of it. What each kernel can do in principle is known from its documentation (`survey_facts`).
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phases.base.errors import PhaseError
from phases.harness.fatbin import in_order, runs_on
from phases.harness.survey_facts import FACTS, Fact

_HERE = Path(__file__).parent
_IMPORT_SECONDS = 90.0


class SurveyError(PhaseError):
    stage = "kernel survey"


@dataclass(frozen=True)
class Answer:
    """Yes, no, or None where it cannot be told; always with the reason."""

    ok: bool | None
    why: str


@dataclass(frozen=True)
class Surveyed:
    """One kernel in one environment."""

    name: str
    installed: bool
    version: str  # of the distribution that carries it; empty when not installed
    location: str
    built_for: tuple[str, ...]  # architectures of its binaries; empty when it is compiled on first use or absent
    imports: str  # `ok`, the error's last line, or empty when not tried
    tree: Answer
    page: Answer
    gpu: Answer
    source: str  # where the facts come from

    @property
    def usable(self) -> bool:
        return self.installed and self.imports in ("", "ok") and bool(self.tree.ok and self.page.ok and self.gpu.ok)


@dataclass(frozen=True)
class Survey:
    """All kernels of one environment, for one page size and one GPU."""

    python: str
    torch: str
    page_size: int
    sm: int | None
    gpus: tuple[str, ...]
    kernels: tuple[Surveyed, ...]

    def to_json(self) -> dict[str, Any]:
        rows = [{**dataclasses.asdict(kernel), "usable": kernel.usable} for kernel in self.kernels]
        return {"schema": "phasegate/survey/v1", **{**dataclasses.asdict(self), "kernels": rows}}


def survey(
    python: str,
    *,
    page_size: int = 1,
    sm: int | None = None,
    architectures: Sequence[str] = (),
    try_imports: bool = True,
    facts: Sequence[Fact] = FACTS,
    timeout: float = 180.0,
) -> Survey:
    """Survey the environment of the interpreter `python`.

    Args:
        page_size: KV rows a page of the server that is meant.
        sm: compute capability to judge for, as 90 or 120; that machine's first GPU when None.
        architectures: of kernel.yaml; what verify_attn counts as built for when its objects are not beside it yet.
        try_imports: also import each installed compiled package in a process of its own.

    Raises:
        SurveyError: the interpreter cannot be run, or the probe fails in it.
    """
    seen = _probe(python, facts, timeout)
    here = sm if sm is not None else (seen["gpus"][0][1] if seen["gpus"] else None)
    imports: dict[str, str] = {}
    rows = []
    for fact, row in zip(facts, seen["kernels"], strict=True):
        if row["present"] and try_imports and fact.binaries and fact.package not in imports:
            imports[fact.package] = _import(python, fact.package)
        built = in_order({arch for archs in row["binaries"].values() for arch in archs}) or (
            list(architectures) if fact.package == "verify_attn" else []
        )
        rows.append(_judge(fact, row, built, imports.get(fact.package, "") if row["present"] else "", page_size, here))
    gpus = tuple(f"{name} (sm_{capability})" for name, capability in seen["gpus"])
    return Survey(seen["python"], seen["torch"], page_size, here, gpus, tuple(rows))


def _judge(fact: Fact, row: dict[str, Any], built: list[str], imports: str, page_size: int, sm: int | None) -> Surveyed:
    page_ok = not fact.pages or page_size in fact.pages
    page = Answer(page_ok, fact.pages_why if page_ok else f"page size {page_size}: {fact.pages_why}")
    return Surveyed(
        name=fact.name,
        installed=row["present"],
        version=row["version"] if row["present"] else "",
        location=row["root"] if row["present"] else "",
        built_for=tuple(built),
        imports=imports,
        tree=Answer(fact.tree, fact.tree_why),
        page=page,
        gpu=_gpu(fact, row, built, sm),
        source=fact.source,
    )


def _gpu(fact: Fact, row: dict[str, Any], built: list[str], sm: int | None) -> Answer:
    if sm is None:
        return Answer(None, "no GPU here; name one with its compute capability, such as 90")
    if fact.sms and sm not in fact.sms:
        return Answer(False, f"written for {', '.join(f'sm_{n}' for n in fact.sms)}, not sm_{sm}")
    if not fact.sms and sm < fact.least_sm:
        return Answer(False, f"needs sm_{fact.least_sm} or newer, not sm_{sm}")
    gpu_code = [arch for arch in built if arch.startswith(("sm_", "compute_"))]
    if not row["present"]:
        return Answer(True, f"could run on sm_{sm}, but is not installed")
    if gpu_code and not any(runs_on(arch, sm) for arch in gpu_code):
        return Answer(False, f"its binaries are built for {', '.join(gpu_code)}; none runs on sm_{sm}")
    if fact.binaries and not gpu_code:
        return Answer(
            False if row["binaries"] else None,
            "its binaries hold no GPU code" if row["binaries"] else "no compiled objects are there yet",
        )
    return Answer(True, f"built for {', '.join(gpu_code)}" if gpu_code else f"compiled on first use for sm_{sm}")


def _probe(python: str, facts: Sequence[Fact], timeout: float) -> dict[str, Any]:
    source = (_HERE / "fatbin.py").read_text() + "\n" + (_HERE / "survey_probe.py").read_text()
    question = json.dumps({"facts": [dataclasses.asdict(fact) for fact in facts]})
    try:
        done = subprocess.run(
            [python, "-B", "-c", source], input=question, capture_output=True, text=True, timeout=timeout
        )
    except FileNotFoundError:
        raise SurveyError(
            f"{python} does not exist.", hint="Give the Python interpreter of the environment to look at."
        ) from None
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise SurveyError(f"{python} could not be run: {fault}.") from fault
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise SurveyError(
            f"{python} gave no answer (exit code {done.returncode}): {last}",
            hint="It must be a Python of 3.8 or newer.",
        ) from None


def _import(python: str, package: str) -> str:
    try:
        done = subprocess.run(
            [python, "-B", "-c", f"import {package}"], capture_output=True, text=True, timeout=_IMPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"did not finish in {_IMPORT_SECONDS:g} s"
    if done.returncode == 0:
        return "ok"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
