"""Every setting of a playbook or of kernel.yaml is read by something: one that has no effect is a promise that is not kept."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PHASES = Path(__file__).parents[2] / "phases"


def _sources() -> list[tuple[str, ast.Module]]:
    return [(path.relative_to(PHASES).as_posix(), ast.parse(path.read_text())) for path in sorted(PHASES.rglob("*.py"))]


def _settings(modules: list[tuple[str, ast.Module]]) -> list[tuple[str, str, str]]:
    """(file, class, field) of everything that a file of ours declares as a setting."""
    return [
        (path, node.name, line.target.id)
        for path, module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(line.value, ast.Call)
        and isinstance(line.value.func, ast.Name)
        and line.value.func.id.endswith("setting")
    ]


def _unread(modules: list[tuple[str, ast.Module]]) -> list[str]:
    """Settings whose name nobody reads as an attribute; reading it while the settings themselves are checked counts for nothing."""
    own = {id(part) for _, m in modules for n in ast.walk(m) if _checks(n) for part in ast.walk(n)}
    read = {
        node.attr
        for _, module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in own
    }
    return [f"{path}: {name}.{field}" for path, name, field in _settings(modules) if field not in read]


def _checks(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in ("check", "__post_init__")


def test_every_setting_is_read() -> None:
    modules = _sources()
    assert len(_settings(modules)) > 200, "settings are declared otherwise now: look for them there"
    assert not _unread(modules)


@pytest.mark.parametrize("use", ["", "def check(self): return self.bake"])
def test_a_setting_that_only_its_own_check_reads_is_noticed(use: str) -> None:
    text = f"class A:\n    bake: float = setting(1.0)\n    {use or 'pass'}\n"
    assert _unread([("a.py", ast.parse(text))]) == ["a.py: A.bake"]
    assert not _unread([("a.py", ast.parse(text)), ("b.py", ast.parse("x.bake"))])
