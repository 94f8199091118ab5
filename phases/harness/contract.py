"""The kernel contract: what kernel.yaml says, as value types. Reading it needs no torch.

kernel.yaml names the contract module (`entry`), a plain Python module under `path` whose functions make inputs, allocate
outputs, compute the float64 reference and run a variant. Which functions it must have, and their parameters, stands in
`phases.harness.entry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from phases.base.errors import KernelContractError, UsageError
from phases.base.results import Case
from phases.playbook.known import DTYPES, check_architectures, check_dtype, missing_module
from phases.playbook.located import Mistakes, Node, nearest
from phases.playbook.located import load as load_yaml
from phases.playbook.typed import json_schema, read, setting

SCHEMA = "phasegate/kernel/v1"
ROLES = ("reference", "baseline", "incumbent", "candidate")
DEVICES = ("cpu", "cuda", "any")
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"


@dataclass(frozen=True)
class Variant:
    """One implementation of the kernel."""

    role: str = setting(choices=ROLES, help="reference, baseline, incumbent or candidate")
    device: str = setting("any", choices=DEVICES, help="cpu, cuda, or any")
    solution: str = setting(
        "",
        pattern=r"([0-9a-f]{64})?",
        help="sha256 of an imported flashinfer-bench Solution; `phase kernel import` writes it",
    )


@dataclass(frozen=True)
class CaseSetting:
    """One case written out in kernel.yaml."""

    name: str = setting(not_empty=True, help="such as q9/16384/s1")
    dtype: str = setting(not_empty=True, help="float32, bfloat16, float16 ...")
    params: dict[str, Any] = setting(factory=dict, help="what the kernel needs to make the inputs")


@dataclass(frozen=True)
class ParitySection:
    tolerances: dict[str, float] = setting(
        not_empty=True, help="largest relative Frobenius error, by dtype of the case"
    )
    cases: tuple[CaseSetting, ...] = setting((), help="parity cases; the contract module's parity_cases() when absent")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        for dtype, value in self.tolerances.items():
            if not 0 < value < 1:
                mistakes.add(
                    (node.get("tolerances") or node).get(dtype) or node,
                    f"tolerance of {dtype} must lie between 0 and 1, not {value:g}",
                )


@dataclass(frozen=True)
class BenchmarkSection:
    cases: tuple[CaseSetting, ...] = setting(
        (), help="benchmark cases; the contract module's benchmark_cases() when absent"
    )


@dataclass(frozen=True)
class SglangSection:
    backend: str = setting("", help="name of the SGLang attention backend that the kernel's plugin registers")


@dataclass(frozen=True, kw_only=True)
class KernelFile:
    """kernel.yaml."""

    schema: str = setting(choices=(SCHEMA,), help="version of this file's layout")
    name: str = setting(pattern=r"[a-z][a-z0-9_-]*", help="name of the kernel")
    package: str = setting(pattern=_MODULE, help="import name of the kernel's distribution")
    path: Path = setting(
        Path("."), help="root of the distribution, relative to this file; put on sys.path of the workers"
    )
    entry: str = setting(pattern=_MODULE, help="import path of the contract module")
    variants: dict[str, Variant] = setting(not_empty=True, help="variants and their roles")
    parity: ParitySection = setting(help="what counts as right")
    architectures: tuple[str, ...] = setting((), help="targets to build for: x86-64-v3, sm_90 ...")
    benchmark: BenchmarkSection = setting(factory=BenchmarkSection)
    sglang: SglangSection = setting(factory=SglangSection)

    def check(self, node: Node, mistakes: Mistakes) -> None:
        for key in ("parity", "benchmark"):
            section = node.get(key)
            keys = [
                item.plain() for item in (section.get("cases").elements() if section and section.get("cases") else [])
            ]
            for number, item in enumerate(keys):
                if item in keys[:number]:
                    mistakes.add(section.get("cases").elements()[number], f"case {item.get('name')!r} is given twice")
        check_architectures(node, mistakes)
        self._dtypes(node, mistakes)

    def _dtypes(self, node: Node, mistakes: Mistakes) -> None:
        """Every dtype named exists, and every case's has a tolerance."""
        tolerances = node.get("parity").get("tolerances")
        for name, _ in tolerances.items():
            check_dtype(name, tolerances.keys[name], tolerances.path, mistakes)
        for section in filter(None, (node.get("parity"), node.get("benchmark"))):
            for case in section.get("cases").elements() if section.get("cases") else ():
                dtype = case.get("dtype")
                check_dtype(dtype.value, dtype, dtype.path, mistakes)
                if dtype.value in DTYPES and dtype.value not in self.parity.tolerances:
                    mistakes.add(dtype, f"{dtype.path}: parity.tolerances has none for {dtype.value}")


@dataclass(frozen=True)
class Kernel:
    """A kernel as its kernel.yaml describes it.

    Attributes:
        file: kernel.yaml, absolute.
        root: root of the distribution, absolute; workers put it on sys.path.
        entry: import path of the contract module.
        variants: by name, in the order of the file.
        tolerances: largest relative Frobenius error, by dtype.
        parity_cases, benchmark_cases: cases listed in the file; empty when the contract module makes them.
        backend: SGLang backend name, or empty.
    """

    file: Path
    name: str
    package: str
    root: Path
    entry: str
    variants: dict[str, Variant]
    architectures: tuple[str, ...]
    tolerances: dict[str, float]
    parity_cases: tuple[Case, ...] = ()
    benchmark_cases: tuple[Case, ...] = ()
    backend: str = ""

    def variants_for(self, device: str, wanted: Sequence[str] | None = None) -> tuple[str, ...]:
        """Names of the variants that run on `device` (cpu, cuda), in file order, limited to `wanted` when given.

        Raises:
            UsageError: a wanted variant does not exist.
        """
        for name in wanted or ():
            if name not in self.variants:
                raise UsageError(
                    f"kernel {self.name} has no variant {name!r}{nearest(name, self.variants)}",
                    hint=f"See {self.file}.",
                )
        kind = device.partition(":")[0]
        return tuple(
            name
            for name, variant in self.variants.items()
            if variant.device in (kind, "any") and (wanted is None or name in wanted)
        )


def load(path: Path | str) -> Kernel:
    """Read kernel.yaml, or the kernel.yaml in a directory.

    Raises:
        PlaybookError: every mistake of the file at once, each with file:line.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "kernel.yaml"
    mistakes = Mistakes()
    node = load_yaml(file, mistakes)
    mistakes.raise_if_any("kernel file")
    parsed = read(KernelFile, node, mistakes)
    if not (isinstance(parsed.path, Path) and isinstance(parsed.entry, str)):
        mistakes.raise_if_any("kernel file")
    root = (file.parent / parsed.path).resolve()
    if not root.is_dir():
        mistakes.add(node.get("path") or node, f"path: {root} is not a directory")
    elif missing := missing_module(parsed.entry, root):
        mistakes.add(node.get("entry") or node, f"entry: {missing}")
    mistakes.raise_if_any("kernel file")
    return Kernel(
        file=file.resolve(),
        name=parsed.name,
        package=parsed.package,
        root=root,
        entry=parsed.entry,
        variants=parsed.variants,
        architectures=parsed.architectures,
        tolerances=parsed.parity.tolerances,
        parity_cases=_cases(parsed.parity.cases),
        benchmark_cases=_cases(parsed.benchmark.cases),
        backend=parsed.sglang.backend,
    )


def schema() -> dict[str, Any]:
    """JSON Schema of kernel.yaml, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA, **json_schema(KernelFile)}


def _cases(settings: Iterable[CaseSetting]) -> tuple[Case, ...]:
    return tuple(Case(item.name, item.dtype, dict(item.params)) for item in settings)


# -- handing a kernel to a worker process ---------------------------------------------------------------------------------


def to_json(kernel: Kernel) -> dict[str, Any]:
    """What a worker needs to know of the kernel, as plain JSON."""
    return {
        "file": str(kernel.file),
        "name": kernel.name,
        "root": str(kernel.root),
        "entry": kernel.entry,
        "variants": {name: variant.role for name, variant in kernel.variants.items()},
        "tolerances": kernel.tolerances,
        "solutions": {name: variant.solution for name, variant in kernel.variants.items() if variant.solution},
    }


def case_json(case: Case) -> dict[str, Any]:
    return {"name": case.name, "dtype": case.dtype, "params": case.params}


def describe(kernel: Kernel, device: str) -> dict[str, Any]:
    """Import the contract module in a worker, check it, and ask for its cases.

    Returns:
        {"parity": (Case, ...), "benchmark": (Case, ...), "facts": {torch, device name, threads ...}}

    Raises:
        KernelContractError: the module cannot be imported or does not keep the contract.
    """
    key = (str(kernel.file), device, _content(kernel))
    if key not in _described:
        _described[key] = _describe(kernel, device)
    return _described[key]


_described: dict[
    tuple[str, str, int], dict[str, Any]
] = {}  # a worker takes seconds to start: ask once for the same files


def _content(kernel: Kernel) -> int:
    """Changes when kernel.yaml or the contract module's file does."""
    files = [kernel.file, kernel.root / Path(*kernel.entry.split(".")).with_suffix(".py")]
    return hash(tuple(file.read_bytes() if file.is_file() else b"" for file in files))


def _describe(kernel: Kernel, device: str) -> dict[str, Any]:
    from phases.harness import process

    answers: list[dict[str, Any]] = []
    death = process.run({"op": "describe", "kernel": to_json(kernel), "device": device}, answers.append, silence=120.0)
    described = next((answer for answer in answers if answer["type"] == "described"), None)
    if death or described is None:
        why = death.reason if death else "it ended without an answer"
        raise KernelContractError(
            f"{kernel.entry} could not be examined: {why}", hint=f"Import it by hand with {kernel.root} on PYTHONPATH."
        )
    made = {kind: tuple(Case(**case) for case in described[kind]) for kind in ("parity", "benchmark")}
    return {
        "parity": kernel.parity_cases or made["parity"],
        "benchmark": kernel.benchmark_cases or made["benchmark"],
        "facts": described["facts"],
    }


def select(cases: Sequence[Case], wanted: Sequence[Case | str] | None, what: str) -> tuple[Case, ...]:
    """The cases wanted: all when None, else the Cases given, and those whose key or name matches a pattern given.

    Raises:
        UsageError: a pattern matches no case.
    """
    if wanted is None:
        return tuple(cases)
    chosen: dict[str, Case] = {}
    for item in wanted:
        matches = (
            [item]
            if isinstance(item, Case)
            else [c for c in cases if fnmatchcase(c.key, item) or fnmatchcase(c.name, item)]
        )
        if not matches:
            raise UsageError(f"no {what} case matches {item!r}{nearest(str(item), {c.key for c in cases})}")
        chosen.update({_identity(case): case for case in matches})
    return tuple(chosen.values())


def _identity(case: Case) -> str:
    return f"{case.key} {sorted(case.params.items(), key=str)}"


def silent(_: str) -> None:
    """The progress callback of those who do not listen."""


Progress = Callable[[str], None]
