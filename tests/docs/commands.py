"""What the documentation tells people to type, taken out of its Markdown."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent.parent.parent
PAGES = sorted(
    [
        HERE / "README.md",
        *(HERE / "docs").glob("*.md"),
        HERE / "checkpoints/README.md",
        HERE / "phases/analysis/README.md",
        *(HERE / "kernels").glob("*/README.md"),
        HERE / "kernels/verify_attn/verify_attn/sglang/README.md",
    ]
)
STAGES = ("tour", "kernel", "clone", "parse")
_FENCE = re.compile(r"(?:^<!-- test: (\w+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One line to type, and the exit code the page says it ends with."""

    line: str
    code: int = 0


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, where it can be run (None: it does not say), its text."""

    page: Path
    language: str
    stage: str | None
    text: str

    @property
    def commands(self) -> list[Command]:
        """Lines after a `$ `; ` # exit 3` behind one is the code it ends with."""
        lines = [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        found = [re.fullmatch(r"(.*?)(?:\s+# exit (\d+))?(?:\s+#.*)?", line) for line in lines]
        return [Command(match[1], int(match[2] or 0)) for match in found if match]


def blocks(page: Path) -> list[Block]:
    return [Block(page, m[2], m[1], m[3]) for m in _FENCE.finditer(page.read_text(encoding="utf-8"))]


def phase_lines(text: str) -> list[list[str]]:
    """Every call of `phase` in code: fenced, indented, or between backquotes; as words, without `phase`."""
    code = re.findall(r"^(?: {4,}|\$ )(.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    found = [
        re.fullmatch(r"(?:- run: |ExecStart=|\{ echo '```'; |code=0; )*(?:\S*/)?phase ([a-z].*)", part.strip())
        for line in code
        for part in line.split(" && ")
    ]
    found += [re.fullmatch(r".*?; (?:\S*/)?phase ([a-z].*?);.*", line) for line in code]
    calls = []
    for match in filter(None, found):
        line = re.split(r" {2,}|\s+#|\|\| |;| \| |…|\s*2?> | &$|→", match[1])[0]
        calls.append(shlex.split(line))
    return [words for words in calls if words and words[0] not in ("and", "is", "alone")]
