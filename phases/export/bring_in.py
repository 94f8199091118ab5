"""A flashinfer-bench Solution as a variant of a kernel: its files into the kernel's distribution, its digest into kernel.yaml.

Nothing of the Solution runs here. It runs in Phase 1's worker processes, with the rights of whoever runs them: read it first.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from phases.base.errors import PhaseError
from phases.base.files import write_atomically
from phases.base.reading import open_regular
from phases.harness import contract, solutions
from phases.harness.contract import Kernel
from phases.harness.definitions import every
from phases.harness.exchange import LANGUAGES, ExchangeError, Json, Solution, check_definition
from phases.playbook.located import Mistakes
from phases.playbook.located import load as load_yaml

_MOST_BYTES = 16 << 20
SUPPORTED = tuple(name for name in LANGUAGES if name != "tilelang")


@dataclass(frozen=True)
class Brought:
    """What an import did."""

    variant: str
    solution: Solution
    directory: Path
    files: tuple[Path, ...]
    again: bool  # it was there already, the same


def read_record(path: Path) -> Json:
    """The JSON object in a file of flashinfer-bench's. Raises ExchangeError."""
    try:
        with open_regular(path) as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ExchangeError(f"{path} is over {_MOST_BYTES >> 20} MiB.")
        data = json.loads(text)
    except (OSError, ValueError) as fault:
        raise ExchangeError(f"{path} cannot be read as JSON: {fault}.") from None
    except RecursionError:
        raise ExchangeError(f"{path} cannot be read as JSON: it is nested too deep.") from None
    if not isinstance(data, dict):
        raise ExchangeError(f"{path} holds no JSON object.", hint="Give the .json file of one record.")
    return data


def import_solution(
    kernel: Kernel, solution: Solution, definition: Json, *, covers_all: bool, variant: str, role: str, device: str
) -> Brought:
    """Make `solution` a variant.

    Args:
        definition: the Definition it implements; gives the order of its arguments.
        covers_all: every case of the kernel is that Definition (it came from a file, the kernel itself names none).

    Raises:
        ExchangeError: the language is not one of ours, or the variant exists and is another.
    """
    if solution.language not in SUPPORTED:
        raise ExchangeError(
            f"{solution.name} is written in {solution.language}; imported can be: {', '.join(SUPPORTED)}."
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", variant):
        raise ExchangeError(
            f"{variant!r} cannot be the name of a variant.", hint="Give --as with lower-case letters, digits and _."
        )
    directory = kernel.root / solutions.FOLDER / variant
    existing = kernel.variants.get(variant)
    if existing is not None:
        if existing.solution != solution.sha256:
            raise ExchangeError(
                f"{kernel.name} has a variant {variant!r} already, and it is another.",
                hint="Give another name with --as.",
            )
        return Brought(variant, solution, directory, (), again=True)
    record = solutions.record_of(
        solution, list(definition["inputs"]), list(definition["outputs"]), "" if covers_all else definition["name"]
    )
    files = _write(directory, solution, record)
    try:
        _name_in_kernel_yaml(kernel, variant, role, device, solution.sha256)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return Brought(variant, solution, directory, tuple(files), again=False)


def definition_for(kernel: Kernel, name: str, given: Json | None, where: str) -> tuple[Json, bool]:
    """The Definition called `name`, the kernel's own or the one given, and whether it covers every case.

    Raises:
        ExchangeError: it is not that one, or there is none.
    """
    own = every(kernel)
    if name in own:
        return check_definition(own[name], f"{kernel.entry}: definition()"), False
    if given is None:
        known = f"it has {', '.join(own)}" if own else "it has none (definition() of its contract module)"
        raise ExchangeError(
            f"the Solution implements {name!r}, which is no Definition of {kernel.name}; {known}.",
            hint="Give the Definition's file with --definition when its inputs and outputs are named as this kernel's.",
        )
    checked = check_definition(given, where)
    if checked["name"] != name:
        raise ExchangeError(f"{where} defines {checked['name']!r}; the Solution implements {name!r}.")
    return checked, True


def _write(directory: Path, solution: Solution, record: Json) -> list[Path]:
    """All files, or none: written beside, then renamed."""
    if directory.exists():
        raise ExchangeError(
            f"{directory} exists, but kernel.yaml does not name it.", hint="Remove it, or give another name with --as."
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=directory.parent) as scratch:
        made = Path(scratch) / "made"
        for path, text in solution.sources.items():
            target = made / solutions.SOURCES / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode())
        (made / solutions.RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        made.rename(directory)
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _name_in_kernel_yaml(kernel: Kernel, variant: str, role: str, device: str, sha256: str) -> None:
    """One line below the last variant; every other byte of the file stays. The file is read again to be sure."""
    before = kernel.file.read_bytes()
    mistakes = Mistakes()
    whole = load_yaml(kernel.file, mistakes)
    variants = whole.get("variants")
    lines = before.decode().splitlines(keepends=True)
    if variants is None or any(where.line <= whole.keys["variants"].line for where in variants.keys.values()):
        raise ExchangeError(
            f"{kernel.file}: `variants` is not written as a block, one variant a line.",
            hint="Write it so, then import again.",
        )
    last = max(where.line for where in variants.keys.values())
    indent = lines[last - 1][: len(lines[last - 1]) - len(lines[last - 1].lstrip())]
    end = last
    while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > len(indent)):
        end += 1
    while not lines[end - 1].strip():
        end -= 1
    if not lines[end - 1].endswith("\n"):
        lines[end - 1] += "\n"
    lines.insert(end, f"{indent}{variant}: {{role: {role}, device: {device}, solution: {sha256}}}\n")
    write_atomically(kernel.file, "".join(lines).encode())
    try:
        read = contract.load(kernel.file).variants[variant]
        if (read.role, read.solution) != (role, sha256):
            raise ExchangeError(f"{kernel.file} could not be extended.")
    except (PhaseError, KeyError):
        write_atomically(kernel.file, before)
        raise
