"""Why the agent on a host ended, by its exit status and what was said last; and the cure for each."""

from __future__ import annotations

from phases.base.errors import FleetError
from phases.engines.ssh.errors import CommandError, LoginError, UnreachableError
from phases.engines.ssh.host import Host


def exit_error(host: Host, code: int | None, said: str) -> FleetError:
    """The error for an agent that ended unasked.

    Args:
        code: its exit status as the shell tells it; None when the connection ended instead.
        said: the last line of what it, the shell or sudo said.
    """
    if code is None:
        return UnreachableError(
            f"the connection ended while the host worked ({said}).",
            hint="Check the host and the network, then repeat the command: it continues from what the host has.",
            host=host.name,
        )
    kind, hint = _cause(host, code, said)
    return kind(f"the session on the host ended with status {code} ({said}).", hint=hint, host=host.name)


def _cause(host: Host, code: int, said: str) -> tuple[type[FleetError], str]:
    text = said.lower()
    if "sudo:" in text or "sorry, user" in text:
        return UnreachableError, _sudo(host, text)
    if "not available" in text or "nologin" in text:
        return LoginError, "This user may not log in there (its shell is nologin): set another `user`."
    if any(sign in text for sign in ("password has expired", "password change required", "account has expired")):
        return LoginError, "The account or its password has expired: see `chage -l` there."
    if "resource temporarily unavailable" in text or "cannot allocate memory" in text:
        return (
            CommandError,
            "The host can start no further process: see `free`, `ulimit -u` and the pids limit of the user's slice.",
        )
    if "error while loading shared libraries" in text:
        return UnreachableError, f"{host.python} lacks a library there: set `python` of this host to one that runs."
    if code == 127 or (code == 1 and "command not found" in text):  # csh says it with status 1
        more = ", one path, without arguments" if " " in host.python else ""
        return UnreachableError, f"Set `python` of this host to a Python 3.8 or newer{more} (now {host.python!r})."
    if code == 126:
        return (
            UnreachableError,
            f"{host.python} is there but cannot be run: check its permissions, and `noexec` in /proc/mounts.",
        )
    if code > 128:
        return (
            CommandError,
            f"Signal {code - 128} ended it: see `dmesg` there (out of memory?) and who else ends processes.",
        )
    return UnreachableError, f"Try `ssh` with the command `{host.python} -V`, and see what the login scripts there do."


def _sudo(host: Host, text: str) -> str:
    if "not found" in text:
        return "sudo is not installed there: install it, or remove `sudo`."
    if "must have a tty" in text:
        return "Take `requiretty` out of sudoers for this user."
    if any(sign in text for sign in ("password", "not allowed", "not in the sudoers", "may not run")):
        return f"Allow {host.python} for this user in sudoers with NOPASSWD, or remove `sudo`."
    return f"Check `sudo: {host.sudo}` of this host and sudoers there (NOPASSWD for {host.python}), or remove `sudo`."
