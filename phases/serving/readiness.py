"""When a server is ready: our own completions come back, several times. A green /health proves less than that."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phases.base.clock import Clock
from phases.base.errors import ServingError
from phases.serving.client import Client
from phases.serving.host import Server, ServingHost

COMPLETIONS = 3  # in a row
POLL_SECONDS = 0.5
EVIDENCE_LINES = 40
PLUGIN_FAULT = re.compile(r"Failed to (?:execute|load).*plugin:?\s*(\S+)")
FAULT = re.compile(r"^(\w+\.)*\w*(Error|Exception)\b.*")
USAGE = re.compile(r"^(usage: |\s+\[--)")  # hundreds of lines in front of argparse's one line of reason
# Lines that say why a server ended, most telling first; the last match of the first pattern that matches is shown.
REASONS = (
    re.compile(r"(UnsupportedError|KernelBuildError|OutOfMemoryError|MemoryError)\b.*"),
    re.compile(r".*(out of memory|Not enough memory|can't allocate memory).*", re.IGNORECASE),
    re.compile(r".*(invalid choice|address already in use|error: argument|unrecognized arguments).*", re.IGNORECASE),
    FAULT,
)


@dataclass(frozen=True)
class Readiness:
    """How a server came up, or why it did not."""

    ready: bool
    seconds: float
    reason: str = ""
    evidence: tuple[str, ...] = ()  # the last lines of its log


def await_ready(host: ServingHost, server: Server, client: Client, within: float, clock: Clock) -> Readiness:
    """Wait until the server completes requests, ends, or the time is over."""
    started = clock.monotonic()
    healthy_since: float | None = None
    last_refusal = ""
    while (waited := clock.monotonic() - started) < within:
        if not host.alive(server):
            return _not_ready(
                host,
                server,
                waited,
                f"{server.name} ended while starting ({_status(host, server)}): {why(host, server)}",
            )
        if client.health():
            healthy_since = waited if healthy_since is None else healthy_since
            try:
                for _ in range(COMPLETIONS):
                    _complete(client)
                return Readiness(True, clock.monotonic() - started)
            except ServingError as fault:
                last_refusal = fault.message
        clock.sleep(POLL_SECONDS)
    if healthy_since is not None:
        reason = f"{server.name} answers /health since {healthy_since:.0f} s but completes nothing: {last_refusal}"
    else:
        reason = f"{server.name} did not come up within {within:g} s"
    return _not_ready(host, server, waited, reason)


def why(host: ServingHost, server: Server) -> str:
    """The line of its log that says why it ended; a plugin that failed is named too, since SGLang goes on without it."""
    lines = [line.strip() for line in host.log_lines(server)]
    plugin = _failed_plugin(lines)
    return f"{plugin}; then {_reason(lines)}" if plugin else _reason(lines)


def evidence(lines: list[str]) -> tuple[str, ...]:
    """The last lines of a log, without command line help."""
    return tuple([line for line in lines if not USAGE.match(line)][-EVIDENCE_LINES:])


def _reason(lines: list[str]) -> str:
    for pattern in REASONS:
        found = [match.group(0) for line in lines if (match := pattern.search(line))]
        if found:
            return found[-1][:300]
    return next((line for line in reversed(lines) if line), "its log is empty")


def _failed_plugin(lines: list[str]) -> str:
    """`plugin X failed: its error`, or ""."""
    for number, line in enumerate(lines):
        found = PLUGIN_FAULT.search(line)
        if found:
            fault = next((later for later in lines[number + 1 :] if FAULT.match(later)), "it says nothing")
            return f"plugin {found.group(1)} failed: {fault[:200]}"
    return ""


def _complete(client: Client) -> None:
    answer = client.generate("ready?", 4)
    if len(answer.tokens) != 4:
        raise ServingError(f"{client.name} returned {len(answer.tokens)} tokens of 4.", hint="See its log.")


def _not_ready(host: ServingHost, server: Server, seconds: float, reason: str) -> Readiness:
    return Readiness(False, seconds, reason, evidence(host.log_lines(server)))


def _status(host: ServingHost, server: Server) -> str:
    code = host.exit_code(server)
    return "exit status unknown" if code is None else f"signal {-code}" if code < 0 else f"exit {code}"
