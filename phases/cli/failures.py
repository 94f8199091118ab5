"""How a command ends when it fails: one paragraph on stderr and the right exit code, never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from typing import Any

import click

from phases.base.errors import Exit, PhaseError
from phases.cli.common import note
from phases.run import stop

INTERRUPTED = "interrupted: nothing done so far is lost; give the command again (a run goes on with --resume)."


def run_and_exit(command: click.Command, arguments: list[str]) -> None:
    """Run a click command and leave the process with its exit code."""
    stop.install()
    _mend_streams()
    try:
        code = _run(command, arguments)
    except KeyboardInterrupt:
        stop.uninstall()
        code = _say(INTERRUPTED, Exit.OPERATIONAL, "--json" in arguments)
    _leave(code if isinstance(code, int) else 0)


def _mend_streams() -> None:
    """Let output be lost where nobody takes it, rather than fail a command."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if (
            getattr(sys, name) is None
        ):  # closed by whoever started us: no file may get its number, which children would write to
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal of another encoding than UTF-8 shows ? where it has no such character


def _run(command: click.Command, arguments: list[str]) -> Any:
    try:
        return command.main(arguments, prog_name="phase", standalone_mode=False)
    except SystemExit as ended:
        return ended.code
    except Exception as fault:
        return report(fault, as_json="--json" in arguments)


def report(fault: BaseException, as_json: bool) -> int:
    """Print what went wrong; return the exit code."""
    if isinstance(fault, click.exceptions.Exit):
        return fault.exit_code
    if isinstance(fault, click.Abort) and isinstance(fault.__cause__, KeyboardInterrupt):  # not at a question
        return _say(INTERRUPTED, Exit.OPERATIONAL, as_json)
    if isinstance(fault, click.Abort):
        return _say("aborted: nothing was done.", Exit.OPERATIONAL, as_json)
    if isinstance(fault, click.exceptions.NoArgsIsHelpError):
        click.echo(fault.format_message(), err=True)
        return Exit.USAGE
    if isinstance(fault, click.ClickException):
        usage = fault.ctx.get_usage() + "\n" if isinstance(fault, click.UsageError) and fault.ctx else ""
        hint = f" See `{fault.ctx.command_path} --help`." if isinstance(fault, click.UsageError) and fault.ctx else ""
        text = fault.format_message()
        return _say(f"{usage}usage: {text}{'' if text.endswith('.') else '.'}{hint}", Exit.USAGE, as_json)
    if isinstance(fault, PhaseError):
        rows = [{"file": file, "line": line, "text": text} for file, line, text in getattr(fault, "mistakes", ())]
        return _say(str(fault), fault.exit_code, as_json, {"mistakes": rows} if rows else {})
    if isinstance(fault, BrokenPipeError):
        return 0
    if isinstance(fault, OSError):
        from phases.base.files import explain

        return _say("system: " + " ".join(filter(None, explain(fault))), Exit.OPERATIONAL, as_json)
    where = _write_traceback(fault)
    return _say(
        f"internal error: {type(fault).__name__}: {fault}. The traceback is in {where}; please report it.",
        Exit.OPERATIONAL,
        as_json,
    )


def _say(text: str, code: int, as_json: bool, more: dict[str, Any] | None = None) -> int:
    with contextlib.suppress(OSError):  # whoever read it may be gone
        note(text)
        if as_json:
            value: dict[str, Any] = {"error": text, "exit": int(code), **(more or {})}
            print(json.dumps(value), flush=True)
    return int(code)


def _write_traceback(fault: BaseException) -> str:
    handle, path = tempfile.mkstemp(prefix="phase-traceback-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as out:
        traceback.print_exception(fault, file=out)
    return path


def _leave(code: int) -> None:
    stop.uninstall()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by whoever started us
        try:
            stream.flush()
        except (
            OSError
        ):  # nobody reads it any more, or its disk is full: said already, and Python would say it again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
