"""Whether an answer ended as it was asked to. An HTTP status says how an answer began: a stream that began with 200 may end in an abort."""

from __future__ import annotations

from typing import Any

GOOD = ("stop", "length")


def not_as_asked(reason: Any, tokens: int, asked: int, *, exactly: bool) -> str:
    """Why an answer is not what was asked for; empty when it is.

    Args:
        reason: SGLang's `finish_reason`: an object with a `type`, in OpenAI's dialect a word, None where the answer names none.
        tokens: tokens generated. asked: most tokens wanted.
        exactly: so many were wanted, neither fewer nor more: an end of sequence was to be ignored.
    """
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in GOOD:
        message = str(reason.get("message") or "") if isinstance(reason, dict) else ""
        return f"it ended with {kind or 'no finish_reason'}{': ' * bool(message)}{message}"[:200]
    if tokens > asked or tokens < (asked if exactly or kind == "length" else 1):
        return f"it ended with {kind} after {tokens} of {asked} tokens"
    return ""
