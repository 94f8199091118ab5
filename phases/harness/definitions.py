"""A kernel's cases in flashinfer-bench's words, asked of its contract module in a worker.

The module's definition(case) gives, or nothing for a case that has none:

    {"definition": {...},   flashinfer-bench's Definition, the same for all cases it covers; its inputs and outputs are
                            named as those of inputs() and outputs()
     "axes": {name: int},   the value of each variable axis
     "inputs": {name: "random" | number | tensor},   data of each input; a tensor is stored (index tensors, masks)
     "main": str}           optional: text of a main.py with run(*inputs, *outputs) for an exported Solution, in which
                            VARIANT stands for the variant's name
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phases.base.errors import KernelContractError
from phases.base.results import Case
from phases.harness.contract import Kernel, case_json, to_json

if TYPE_CHECKING:
    from phases.harness.channel import Channel

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class CaseDefinition:
    """One case in flashinfer-bench's words.

    Attributes:
        inputs: by name `{"type": "random"}`, `{"type": "scalar", "value": ...}` or `{"type": "safetensors"}`.
        stored: safetensors file with the inputs of that last kind; None without any.
        main: text of the Solution's entry file, or empty.
    """

    definition: dict[str, Any]
    axes: dict[str, int]
    inputs: dict[str, dict[str, Any]]
    stored: Path | None = None
    main: str = ""


def collect(kernel: Kernel, cases: Sequence[Case], folder: Path) -> list[CaseDefinition | None]:
    """Ask for the Definition of each case; None for those that have none. Stored tensors go into `folder`.

    Raises:
        KernelContractError: the contract module does not keep its word, or died.
    """
    found = _ask(kernel, {"cases": [case_json(case) for case in cases], "folder": str(folder)})
    return [
        made
        and CaseDefinition(
            made["definition"], made["axes"], made["inputs"], made["stored"] and Path(made["stored"]), made["main"]
        )
        for made in found
    ]


def every(kernel: Kernel) -> dict[str, dict[str, Any]]:
    """All Definitions of a kernel by name: of the cases in kernel.yaml and those its module has for the CPU and for CUDA.

    Raises:
        KernelContractError: as `collect`.
    """
    listed = [case_json(case) for case in (*kernel.parity_cases, *kernel.benchmark_cases)]
    return {
        made["definition"]["name"]: made["definition"]
        for made in _ask(kernel, {"cases": listed, "folder": None})
        if made
    }


def _ask(kernel: Kernel, job: dict[str, Any]) -> list[Any]:
    from phases.harness import process

    found: list[Any] = []
    death = process.run(
        {"op": "definitions", "kernel": to_json(kernel), **job}, lambda message: found.append(message["made"])
    )
    if death:
        raise KernelContractError(f"{kernel.entry}: definition() {death.reason}.")
    return found


def describe(job: dict[str, Any], channel: Channel) -> None:
    """The worker's side: each case of the job; without a folder also every case of the module, and no tensor is kept."""
    from phases.harness.entry import Entry

    entry = Entry(job["kernel"])
    folder, cases = job["folder"], list(job["cases"])
    if folder is None:
        cases += [
            case for kind in ("parity", "benchmark") for device in ("cpu", "cuda") for case in entry.cases(kind, device)
        ]
    for number, case in enumerate(cases):
        made = entry.definition(case)
        channel.send(
            "definition",
            made=_plain(made, folder and Path(folder) / f"{number}.safetensors", entry, case) if made else None,
        )


def _plain(made: dict[str, Any], file: Path | None, entry: Any, case: dict[str, Any]) -> dict[str, Any]:
    """The answer as JSON, its tensors in a file."""
    import torch

    tensors = {name: value for name, value in made["inputs"].items() if isinstance(value, torch.Tensor)}
    inputs: dict[str, Any] = {}
    for name, value in made["inputs"].items():
        if name in tensors:
            inputs[name] = {"type": "safetensors"}
        elif value == "random":
            inputs[name] = {"type": "random"}
        elif isinstance(value, (bool, int, float)):
            inputs[name] = {"type": "scalar", "value": value}
        else:
            raise entry.broken(
                f'definition() gives input {name!r} as {value!r}; give "random", a number or a tensor', case
            )
    if tensors and file:
        file.write_bytes(safetensors(tensors))
    return {
        "definition": made["definition"],
        "axes": made["axes"],
        "inputs": inputs,
        "stored": str(file) if tensors and file else None,
        "main": made.get("main", ""),
    }


def safetensors(tensors: dict[str, Any]) -> bytes:
    """Tensors in the safetensors format: length of the header (8 bytes, little-endian), JSON header, the bytes of each tensor."""
    import torch

    header: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _CODES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)
