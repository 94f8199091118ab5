"""Secrets out of what is kept: logs of servers end in checkpoints, which are pushed and shown."""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"""((?:api[-_]?key|hf_token|auth[-_]?token|secret|password)['"]?(?:\s*[=:]\s*|\s+)['"]?|Bearer\s+)[^\s'",]{4,}""",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """The text with `***` in place of what looks like a key, a token or a password."""
    return _SECRET.sub(r"\1***", text)
