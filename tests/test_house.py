"""The house keeps its shape: no circles of files, click and fabric in their own rooms, nothing new imported inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "phases").rglob("*.py"))
}
# Still to be taken apart; take out what no longer stands, add nothing.
LAZY = {
    "build_parity": 8,
    "engines": 4,
    "fleet": 5,
    "harness": 15,
    "production": 1,
    "rollback": 11,
    "run": 6,
    "status": 8,
}  # by room; none elsewhere


def _target(name: str) -> str | None:
    while name and name not in PATHS:
        name = name.rpartition(".")[0]
    return name or None


def _imports(tree: ast.AST, package: str, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Names imported, and whether inside a function; what only types need is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", inside) for alias in node.names)
        yield from _imports(node, package, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


IMPORTS = {
    module: list(
        _imports(
            ast.parse(path.read_text(encoding="utf-8")),
            module if path.name == "__init__.py" else module.rpartition(".")[0],
        )
    )
    for module, path in PATHS.items()
}


def _circles(edges: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Groups of names that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        todo, seen = [start], set()
        while todo:
            for name in edges.get(todo.pop(), ()):
                if name not in seen:
                    seen.add(name)
                    todo.append(name)
        reach[start] = seen
    groups = {
        tuple(sorted(n for n in reach[name] if name in reach.get(n, ()))) for name in edges if name in reach[name]
    }
    return {group for group in groups if len(group) > 1}


def test_the_search_for_circles_sees_one():
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {("a", "b", "c")}


def test_no_circle_of_files():
    edges = {
        module: {target for name, _ in rows if (target := _target(name)) and target not in ("phases", module)}
        for module, rows in IMPORTS.items()
    }
    assert not _circles(edges)


def test_own_modules_are_imported_lazily_only_by_the_command_line():
    counts: dict[str, int] = {}
    for module, rows in IMPORTS.items():
        room = (module.split(".") + [""])[1]
        names = {
            (name.rpartition(".")[0], line) for line, (name, inside) in enumerate(rows) if inside and _target(name)
        }
        counts[room] = counts.get(room, 0) + len(names)
    worse = {room: count for room, count in counts.items() if room != "cli" and count > LAZY.get(room, 0)}
    assert not worse


def test_click_and_fabric_stay_in_their_rooms():
    for module, rows in IMPORTS.items():
        used = {name.split(".")[0] for name, _ in rows}
        assert "click" not in used or module.startswith(("phases.cli", "phases.demo")), module
        assert "fabric" not in used or module.startswith("phases.engines.ssh."), module
