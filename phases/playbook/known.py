"""Names that files may use and that can be judged without a compiler, torch or the kernel's own code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from phases.playbook.located import Mistakes, Node, Where, nearest

CPU_ARCHITECTURES = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64", "native")
CUDA_ARCHITECTURES = tuple(
    f"sm_{number}"
    for number in (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
)
_NEWEST_CUDA = 121
DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
    "complex128",
)
_LISTS = ("architectures", "optional_architectures", "archs")
_FREE = ("params", "launch", "env")  # whose keys belong to somebody else


def is_architecture(name: str) -> bool:
    """sm_90, sm_90a ..., an instruction set, or `python` (nothing is compiled). A GPU newer than this list is believed."""
    match = re.fullmatch(r"sm_(\d+)([af]?)", name)
    if match is None:
        return name in CPU_ARCHITECTURES or name == "python"
    return (
        f"sm_{match[1]}" in CUDA_ARCHITECTURES and (not match[2] or int(match[1]) >= 90) or int(match[1]) > _NEWEST_CUDA
    )


def check_architectures(node: Node, mistakes: Mistakes) -> None:
    """Every list of architectures at or below a node."""
    for key, child in node.items():
        if key in _LISTS:
            for element in child.elements():
                if element.kind == "text" and not is_architecture(element.value):
                    guess = nearest(
                        element.value, [*CPU_ARCHITECTURES, *CUDA_ARCHITECTURES, "sm_90a", "sm_100a", "sm_120a"]
                    )
                    mistakes.add(element, f"{element.path}: there is no architecture {element.value!r}{guess}")
        elif key not in _FREE:
            check_architectures(child, mistakes)
    for element in node.elements():
        check_architectures(element, mistakes)


def check_dtype(name: object, at: Node | Where, path: str, mistakes: Mistakes) -> None:
    if isinstance(name, str) and name not in DTYPES:
        mistakes.add(at, f"{path}: there is no dtype {name!r}{nearest(name, DTYPES)}")


def missing_module(name: str, root: Path) -> str:
    """Why no module of that name would be found with `root` first on the path, or "". Nothing is imported."""
    first, *rest = name.split(".")
    if not _holds(root, first):
        try:
            found = find_spec(first) is not None
        except (ImportError, ValueError):
            found = False
        return "" if found else f"there is no module {first} in {root}, and none is installed"
    at = root / first
    for part in rest:
        if not at.is_dir():
            return f"{at.relative_to(root)} in {root} is a module, not a package"
        if not _holds(at, part):
            return f"there is no module {part} in {at}{nearest(part, _modules(at))}"
        at /= part
    return ""


def _holds(folder: Path, name: str) -> bool:
    return (
        (folder / name).is_dir()
        or any((folder / f"{name}{ending}").is_file() for ending in (".py", ".so", ".pyc"))
        or any(folder.glob(f"{name}.*.so"))
    )


def _modules(folder: Path) -> Iterable[str]:
    return [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
