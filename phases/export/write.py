"""A checkpoint of Phase 1 as a flashinfer-bench dataset: definitions/, solutions/, workloads/, traces/, blob/.

The layout and what each record says follow flashinfer-bench's TraceSet, so that its tools load the directory as it is. An
existing dataset is added to: what is there already is left, and a record of the same name with other content is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phases.base.files import write_atomically
from phases.base.results import BenchmarkRecord, Case, ParityRecord, Results
from phases.export.sources import entry_text, sources_of
from phases.harness import solutions
from phases.harness.contract import Kernel, to_json
from phases.harness.definitions import CaseDefinition, collect
from phases.harness.exchange import ExchangeError, Json, Solution, check_definition
from phases.ledger.git import Git

_NAMESPACE = uuid.UUID("8a1c2b53-6f0e-4f6c-9a57-3d1f1b0f6c11")  # of the workloads' ids: the same case gets the same id
BASELINE = (
    "baseline"  # the author by which flashinfer-bench knows what others are compared with; one Solution a Definition
)


@dataclass
class Exported:
    """What was written, and what has no place in the format.

    Attributes:
        written: paths below the directory that are new or longer.
        left_out: why records are not among them, one line each.
    """

    definitions: list[str] = field(default_factory=list)
    solutions: list[str] = field(default_factory=list)
    workloads: int = 0
    traces: int = 0
    written: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def export(kernel: Kernel, results: Results, manifest: Json, git: Git, directory: Path) -> Exported:
    """Write the kernel and these results.

    Args:
        manifest: of the checkpoint: source commit, author, time, facts.
        git: repository that holds the source commit.

    Raises:
        ExchangeError: the kernel has no Definition for any case, the sources are gone, or the directory holds other
            records of the same names.
    """
    with tempfile.TemporaryDirectory() as scratch:
        cases = list({_identity(r.case): r.case for r in [*results.benchmark, *_failures(results)]}.values())
        asked = dict(zip(map(_identity, cases), collect(kernel, cases, Path(scratch)), strict=True))
        known = {key: made for key, made in asked.items() if made}
        if not known:
            raise ExchangeError(
                f"{kernel.name} has no Definition for any of its {len(cases)} benchmark cases.",
                hint=f"Add definition(case) to {kernel.entry}, as `phase init` writes it (docs/kernel.md).",
            )
        return _Dataset(kernel, results, manifest, git, directory).write(known, cases)


class _Dataset:
    """One export under way."""

    def __init__(self, kernel: Kernel, results: Results, manifest: Json, git: Git, directory: Path) -> None:
        self.kernel, self.results, self.manifest, self.git, self.directory = kernel, results, manifest, git, directory
        self.made = Exported()
        self.sources: dict[str, str] | None = None
        self.solutions: dict[tuple[str, str], Solution] = {}  # by variant and Definition
        timed = {r.variant: r.role for r in results.benchmark if r.samples}
        self.baseline = next(
            (variant for role in ("baseline", "incumbent") for variant, played in timed.items() if played == role), None
        )

    def write(self, known: dict[str, CaseDefinition], cases: Sequence[Case]) -> Exported:
        for case in cases:
            made = known.get(_identity(case))
            if made is None:
                self.made.left_out.append(f"{case.key}: the kernel has no Definition for it")
                continue
            self._definition(
                check_definition(made.definition, f"{self.kernel.entry}: definition() of {case.key}"), made
            )
            self._workload(case, made)
        for record in [*self.results.benchmark, *_failures(self.results)]:
            made = known.get(_identity(record.case))
            if made is not None:
                self._trace(record, made)
        return self.made

    def _definition(self, definition: Json, made: CaseDefinition) -> None:
        missing = [name for name in definition["inputs"] if name not in made.inputs]
        unset = [name for name, axis in definition["axes"].items() if axis["type"] == "var" and name not in made.axes]
        if missing or unset:
            raise ExchangeError(
                f"{self.kernel.entry}: definition() says nothing of {', '.join(missing + unset)} of {definition['name']}."
            )
        if definition["name"] not in self.made.definitions:
            self.made.definitions.append(definition["name"])
            self._once(f"definitions/{definition['op_type']}/{definition['name']}.json", definition)

    def _workload(self, case: Case, made: CaseDefinition) -> None:
        workload = self._workload_of(case, made)
        if made.stored:
            self._bytes(self._blob(made, workload["uuid"]), made.stored.read_bytes())
        op_type, name = made.definition["op_type"], made.definition["name"]
        row = {"definition": name, "workload": workload, "solution": None, "evaluation": None}
        self.made.workloads += self._line(f"workloads/{op_type}/{name}.jsonl", row)

    def _workload_of(self, case: Case, made: CaseDefinition) -> Json:
        name = made.definition["name"]
        number = str(uuid.uuid5(_NAMESPACE, f"{name} {_identity(case)}"))
        stored = {"path": self._blob(made, number)}
        inputs = {
            key: (
                {**made.inputs[key], **stored, "tensor_key": key}
                if made.inputs[key]["type"] == "safetensors"
                else made.inputs[key]
            )
            for key in made.definition["inputs"]
        }
        return {"axes": made.axes, "inputs": inputs, "uuid": number}

    def _blob(self, made: CaseDefinition, number: str) -> str:
        op_type, name = made.definition["op_type"], made.definition["name"]
        return f"blob/workloads/{op_type}/{name}/{name}_{number}.safetensors"

    def _trace(self, record: BenchmarkRecord | ParityRecord, made: CaseDefinition) -> None:
        evaluation = self._evaluation(record)
        if evaluation is None:
            why = record.refused or record.reason or "no samples"
            self.made.left_out.append(f"{record.variant} on {record.case.key}: {why.splitlines()[0]}")
            return
        solution = self._solution(record.variant, made)
        row = {
            "definition": made.definition["name"],
            "workload": self._workload_of(record.case, made),
            "solution": solution.name,
            "evaluation": evaluation,
        }
        self.made.traces += self._line(
            f"traces/{solution.author}/{made.definition['op_type']}/{made.definition['name']}.jsonl", row
        )

    def _evaluation(self, record: BenchmarkRecord | ParityRecord) -> Json | None:
        """flashinfer-bench's evaluation; None for what it has no honest word for: a refusal, a case without a number."""
        facts = {**self.manifest.get("facts", {}), **self.results.facts}
        libs = {key: str(facts[key]) for key in ("torch", "cuda", "nvcc_version", "python", "triton") if facts.get(key)}
        hardware = str(facts.get("gpu") or facts.get("cpu") or facts.get("device") or "unknown").replace(" ", "_")
        common = {"environment": {"hardware": hardware, "libs": libs}, "timestamp": self.manifest["recorded_at"]}
        if isinstance(record, ParityRecord):
            return {
                **common,
                "status": "INCORRECT_NUMERICAL",
                "log": record.reason,
                "correctness": _correctness(record.error, record.max_abs, record.tolerance),
            }
        if not record.samples or not record.parity_after:
            return None
        proof = next(
            (
                p
                for p in self.results.parity
                if p.variant == record.variant and _identity(p.case) == _identity(record.case)
            ),
            None,
        )
        error = record.detail.get("error_after", proof.error if proof else None)
        mean = sum(record.samples) / len(record.samples)
        log = (
            f"{len(record.samples)} samples, median {record.median * 1e3:.6g} ms; checked against float64 before and after timing. "
            f"The reference was not timed: compare with the Solution whose author is {BASELINE!r}. Case {record.case.key}."
        )
        return {
            **common,
            "status": "PASSED",
            "log": log,
            "correctness": _correctness(error, proof.max_abs if proof else None, proof.tolerance if proof else None),
            "performance": {"latency_ms": mean * 1e3, "reference_latency_ms": 0.0, "speedup_factor": 0.0},
        }

    def _solution(self, variant: str, made: CaseDefinition) -> Solution:
        key = (variant, made.definition["name"])
        if key not in self.solutions:
            self.solutions[key] = solution = self._solution_of(variant, made)
            self._once(
                f"solutions/{solution.author}/{made.definition['op_type']}/{solution.definition}/{solution.name}.json",
                solution.to_json(),
            )
            self.made.solutions.append(solution.name)
        return self.solutions[key]

    def _solution_of(self, variant: str, made: CaseDefinition) -> Solution:
        if self.kernel.variants[variant].solution:
            folder = self.kernel.root / solutions.FOLDER / variant
            return solutions.load(variant, folder, to_json(self.kernel)["solutions"][variant]).solution
        if self.sources is None:
            self.sources = sources_of(self.kernel, self.manifest, self.git)
        file = "main.py" if "main.py" not in self.sources else "phasegate_main.py"
        text = (made.main or entry_text(self.kernel, made)).replace("VARIANT", variant)
        hardware = self.results.facts.get("gpu") or "cpu"
        dirty = (
            " The work tree had changes that are not in these sources." if self.manifest["source"].get("dirty") else ""
        )
        author = BASELINE if variant == self.baseline else _plain_author(self.manifest["author"])
        solution = Solution(
            name=variant,
            definition=made.definition["name"],
            author=author,
            language="python",
            target_hardware=(str(hardware).replace(" ", "_"),),
            entry=(file, "run"),
            sources={file: text, **self.sources},
            dependencies=("torch",),
            description=f"{self.kernel.name}'s {variant}, commit {self.manifest['source'].get('commit') or 'none'}.{dirty}",
        )
        return dataclasses.replace(solution, name=f"{solution.definition}_{variant}_{solution.sha256[:8]}")

    # -- files -------------------------------------------------------------------------------------------------------------

    def _once(self, name: str, record: Json) -> None:
        self._bytes(name, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())

    def _bytes(self, name: str, data: bytes) -> None:
        path = self.directory / name
        if path.exists():
            if path.read_bytes() != data:
                raise ExchangeError(f"{path} holds another record of this name.", hint="Export into another directory.")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
        self.made.written.append(name)

    def _line(self, name: str, record: Json) -> bool:
        """Append a line unless it is there; whether it was new."""
        path = self.directory / name
        line = json.dumps(record, ensure_ascii=False)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if line in before.splitlines():
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (before + line + "\n").encode())
        if name not in self.made.written:
            self.made.written.append(name)
        return True


def _failures(results: Results) -> Iterable[ParityRecord]:
    """Wrong numbers are results too."""
    return [r for r in results.parity if not r.ok and not r.refused and r.error is not None]


def _correctness(error: float | None, absolute: float | None, tolerance: float | None) -> Json:
    """Our error is the relative Frobenius error of the worst output, not the largest of elements, which stays unknown (NaN)."""
    extra = {"relative_frobenius_error": error, "tolerance": tolerance}
    return {
        "max_relative_error": "NaN",
        "max_absolute_error": "NaN" if absolute is None else absolute,
        "extra": {k: v for k, v in extra.items() if v is not None},
    }


def _identity(case: Case) -> str:
    return hashlib.sha256(json.dumps([case.name, case.dtype, case.params], sort_keys=True).encode()).hexdigest()


def _plain_author(author: str) -> str:
    """The name without the address, fit for a directory."""
    name = author.partition("<")[0].strip()
    return "".join(char if char.isalnum() or char in "-._" else "-" for char in name).strip(".") or "phasegate"
