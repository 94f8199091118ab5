"""Located YAML: every mistake at once, with its line, and nothing clever in the values."""

from __future__ import annotations

import os

import pytest

from phases.base.errors import PlaybookError
from phases.playbook.located import Mistakes, load, load_text


def texts(text: str) -> list[str]:
    mistakes = Mistakes()
    load_text(text, "a.yaml", mistakes)
    return [str(mistake) for mistake in mistakes]


def plain(text: str) -> object:
    mistakes = Mistakes()
    node = load_text(text, "a.yaml", mistakes)
    assert not mistakes, list(map(str, mistakes))
    return node.plain()


def test_values_follow_yaml_1_2_core():
    text = "a: no\nb: 22:22\nc: 1e-3\nd: 010\ne: 0x10\nf: 2024-01-01\ng: true\nh: ~\ni: '3'\nj: .inf\nk: 1.5\nl: [1, x]\nm:\n"
    assert plain(text) == {
        "a": "no",
        "b": "22:22",
        "c": 1e-3,
        "d": 10,
        "e": 16,
        "f": "2024-01-01",
        "g": True,
        "h": None,
        "i": "3",
        "j": float("inf"),
        "k": 1.5,
        "l": [1, "x"],
        "m": None,
    }


def test_each_node_knows_its_line_and_path():
    node = load_text("a:\n  - b: 1\n  -\n    c: 2\n", "a.yaml", Mistakes())
    second = node.get("a").elements()[1].get("c")
    assert (str(second.where), second.path) == ("a.yaml:4", "a[1].c")


def test_all_mistakes_in_line_order():
    found = texts("a: !!python/object:os.system x\nb: 1\nb: 2\nc: {<<: {x: 1}}\n? [1]\n: 2\n")
    assert [text.split(":")[1] for text in found] == ["1", "3", "4", "5"]
    assert "tag" in found[0] and "already stands at a.yaml:2" in found[1] and "merge" in found[2]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: [1\nb: 2\n", 2, "not valid YAML"),
        ("a:\n\t- 1\n", 2, "tab"),
        ("", 1, "empty"),
        ("- 1\n", 1, "must be a mapping"),
        ("a: &x [*x]\n", 1, "alias"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("a: " + "[" * 3000, 1, ""),
        ("a: 1\x00\n", 1, "not valid YAML"),
    ],
)
def test_broken_documents(text, line, words):
    found = texts(text)
    assert len(found) == 1
    assert found[0].startswith(f"a.yaml:{line}: ") and words in found[0]


def test_alias_bomb_is_refused():
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert any("too many values" in text for text in texts("\n".join(rows)))


def test_files_that_are_none_and_files_without_end(tmp_path):
    mistakes = Mistakes()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for path in (tmp_path / "loop.yaml", "a\0b", "/dev/zero"):
        load(path, mistakes)
    assert [
        words in str(mistake)
        for mistake, words in zip(mistakes.found, ("symbolic links", "null byte", "is a device"), strict=True)
    ] == [True] * 3


def test_unreadable_files(tmp_path):
    mistakes = Mistakes()
    load(tmp_path / "missing.yaml", mistakes)
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xe9\n")
    load(tmp_path / "latin.yaml", mistakes)
    with pytest.raises(PlaybookError) as caught:
        mistakes.raise_if_any("playbook")
    assert "missing.yaml:1: cannot be read: No such file" in str(caught.value)
    assert "latin.yaml:2: is not UTF-8 text" in str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [("pipe", "a named pipe"), ("link", "a named pipe"), ("folder", "a directory"), ("/dev/zero", "a device")],
)
def test_what_is_no_file_is_refused_at_once(tmp_path, what, text):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    mistakes = Mistakes()
    assert load(tmp_path / what, mistakes).value == {}
    assert f"{what}:1: is {text}, not a file" in str(*mistakes)
