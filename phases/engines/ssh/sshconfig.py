"""How `ssh NAME` would log in: asked of OpenSSH itself (`ssh -G`), which knows Match, Include, tokens and defaults.

Where OpenSSH is not installed the library reads the configuration as far as it understands it.
"""

from __future__ import annotations

import functools
import getpass
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko

from phases.engines.ssh.errors import SshConfigError
from phases.engines.ssh.host import Host

SECONDS = 20.0  # for the answer: `Match exec` runs programs, CanonicalizeHostname asks the name service
USER_FILE, SYSTEM_FILE = Path("~/.ssh/config"), Path("/etc/ssh/ssh_config")
KNOWN_HOSTS = (
    Path("~/.ssh/known_hosts"),
    Path("~/.ssh/known_hosts2"),
    Path("/etc/ssh/ssh_known_hosts"),
    Path("/etc/ssh/ssh_known_hosts2"),
)
KEY_FILES = tuple(Path("~/.ssh") / name for name in ("id_rsa", "id_ecdsa", "id_ed25519"))
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Login:
    """Where and how to log in on one machine; empty lists leave it to the library."""

    hostname: str
    port: int
    user: str
    key_files: tuple[Path, ...]
    certificate_files: tuple[Path, ...] = ()
    only_these_keys: bool = False  # of an agent's keys use those alone that key_files name
    agent: str = "SSH_AUTH_SOCK"  # the agent's socket, SSH_AUTH_SOCK for the environment's, "none" for none
    jumps: tuple[str, ...] = ()  # [user@]host[:port], the first to connect to first
    proxy_command: str = ""  # tokens replaced
    known_hosts: tuple[Path, ...] = KNOWN_HOSTS
    key_alias: str = ""
    family: str = "any"  # any, inet or inet6
    bind_address: str = ""
    ciphers: tuple[str, ...] = ()
    macs: tuple[str, ...] = ()
    key_exchanges: tuple[str, ...] = ()
    host_key_algorithms: tuple[str, ...] = ()

    @property
    def known_as(self) -> tuple[str, ...]:
        """Names of the machine in known_hosts, the one to ask for first: ssh takes a key without a port for any port."""
        if self.key_alias:
            return (self.key_alias,)
        return (self.hostname,) if self.port == 22 else (f"[{self.hostname}]:{self.port}", self.hostname)


def login(host: Host, name: str, *, user: str = "", port: int = 0, key_files: tuple[Path, ...] = ()) -> Login:
    """How to log in on `name`: the worker's host, or a bastion on the way to it.

    Args:
        host: whose ssh options choose the configuration file, and whom errors are about.
        user, port, key_files: given elsewhere, before what the configuration says.
    Raises: SshConfigError with OpenSSH's own words.
    """
    program = shutil.which("ssh")
    if program:
        return _from_openssh(program, host, name, user, port, key_files)
    return _from_library(host, name, user, port, key_files)


def _from_openssh(program: str, host: Host, name: str, user: str, port: int, key_files: tuple[Path, ...]) -> Login:
    argv = [program, "-G"]
    argv += ["-F", os.path.expanduser(host.ssh.config_file)] if host.ssh.config_file else []
    argv += ["-l", user] if user else []
    argv += ["-p", str(port)] if port else []
    for path in key_files:
        argv += ["-i", os.path.expanduser(path)]
    argv += ["--", name]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise SshConfigError(
            f"`{shlex.join(argv)}` has not answered within {SECONDS:g} s.",
            hint="See what `Match exec` and CanonicalizeHostname in the ssh configuration wait for.",
            host=host.name,
        ) from None
    if done.returncode != 0:
        said = " ".join(
            line for line in done.stderr.decode("utf-8", "replace").splitlines() if "seudo-terminal" not in line
        )
        if (
            "No user exists for uid" in said
        ):  # a container under a number without a name: OpenSSH does nothing at all there
            return _from_library(host, name, user, port, key_files)
        hint = f"Mend it until `{shlex.join(['ssh', *argv[1:]])}` answers."
        if "Bad owner or permissions" in said:
            hint = "Make the file your own and writable for nobody else, or name it in `config_file`."
        raise SshConfigError(
            f"ssh itself refuses its configuration for {name}: {said.strip()[:400] or f'status {done.returncode}'}.",
            hint=hint,
            host=host.name,
        )
    given: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "surrogateescape").splitlines():
        key, _, value = line.partition(" ")
        given.setdefault(key.lower(), []).append(value)

    def one(key: str) -> str:
        value = given.get(key, [""])[0]
        return "" if value.lower() == "none" else value

    def several(key: str) -> tuple[str, ...]:
        return tuple(one(key).split(",")) if one(key) else ()

    if one("proxyusefdpass") == "yes" and one("proxycommand"):
        raise SshConfigError(
            f"the ssh configuration of {name} has ProxyUseFdpass, which the toolkit cannot do.",
            hint="Use a ProxyCommand without it, or ProxyJump.",
            host=host.name,
        )
    usual = _defaults(program)

    def restricted(key: str) -> tuple[str, ...]:
        """A list of algorithms that somebody has chosen; OpenSSH's own list says nothing about the library's."""
        return () if one(key) == usual.get(key) else several(key)

    tokens = _tokens(name, one("hostname") or name, one("port") or "22", one("user"), one("hostkeyalias"))
    return Login(
        hostname=one("hostname") or name,
        port=int(one("port") or 22),
        user=one("user"),
        key_files=_paths(given.get("identityfile", []), tokens),
        certificate_files=_paths(given.get("certificatefile", []), tokens),
        only_these_keys=one("identitiesonly") == "yes",
        agent=_replaced(given.get("identityagent", ["SSH_AUTH_SOCK"])[0], tokens),
        jumps=several("proxyjump"),
        proxy_command=_replaced(one("proxycommand"), tokens),
        known_hosts=_paths([*_split(one("userknownhostsfile")), *_split(one("globalknownhostsfile"))], tokens),
        key_alias=one("hostkeyalias"),
        family=one("addressfamily") or "any",
        bind_address=one("bindaddress"),
        ciphers=restricted("ciphers"),
        macs=restricted("macs"),
        key_exchanges=restricted("kexalgorithms"),
        host_key_algorithms=restricted("hostkeyalgorithms"),
    )


@functools.cache
def _defaults(program: str) -> dict[str, str]:
    """What OpenSSH would do without any configuration."""
    argv = [program, "-G", "-F", "none", "--", "host"]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {}
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def _from_library(host: Host, name: str, user: str, port: int, key_files: tuple[Path, ...]) -> Login:
    me = _me(host)  # the library asks too, whatever the configuration says
    config = paramiko.SSHConfig()
    files = (host.ssh.config_file,) if host.ssh.config_file else (USER_FILE, SYSTEM_FILE)
    for path in map(Path, map(os.path.expanduser, files)):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            continue
        except OSError as fault:
            raise SshConfigError(
                f"{path} cannot be read: {fault.strerror}.", hint="Check it.", host=host.name
            ) from None
        if re.search(r"(?im)^\s*include\s", text):
            log.warning("%s has Include, which is read only where the OpenSSH client is installed.", path)
        try:
            config.parse(text.splitlines())
        except Exception as fault:  # noqa: BLE001 - the library's own parse error, or what its parser stumbles over
            raise _unread(host, path, fault) from None
    try:
        found = config.lookup(name)
    except Exception as fault:  # noqa: BLE001 - Match exec without its helper, a name that cannot be made canonical
        raise _unread(host, Path(files[0]), fault) from None

    def one(key: str) -> str:
        value = found.get(key) or ""
        return "" if value.lower() == "none" else str(value).strip('"')

    def several(key: str) -> tuple[str, ...]:
        """A list as it stands: what is added to or taken from OpenSSH's own (+, -, ^) is not known here."""
        return tuple(one(key).split(",")) if one(key) and one(key)[0] not in "+-^" else ()

    known = [*_split(one("userknownhostsfile")), *_split(one("globalknownhostsfile"))]
    return Login(
        hostname=one("hostname") or name,
        port=port or int(one("port") or 22),
        user=user or one("user") or me,
        key_files=(*key_files, *(_paths(found.get("identityfile", [])) or (() if key_files else KEY_FILES))),
        only_these_keys=one("identitiesonly").lower() == "yes",
        agent=found.get("identityagent") or "SSH_AUTH_SOCK",
        jumps=several("proxyjump"),
        proxy_command="" if several("proxyjump") else one("proxycommand"),
        known_hosts=_paths(known) if known else KNOWN_HOSTS,
        key_alias=one("hostkeyalias"),
        family=one("addressfamily").lower() or "any",
        bind_address=one("bindaddress"),
        ciphers=several("ciphers"),
        macs=several("macs"),
        key_exchanges=several("kexalgorithms"),
        host_key_algorithms=several("hostkeyalgorithms"),
    )


def _me(host: Host) -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise SshConfigError(
            f"nobody here has the number {os.getuid()}, so there is no name to log in with.",
            hint="Set USER in the environment, or run as a user that has a name.",
            host=host.name,
        ) from None


def _unread(host: Host, path: Path, fault: Exception) -> SshConfigError:
    return SshConfigError(
        f"the ssh configuration ({path}) cannot be read without OpenSSH: {fault}.",
        hint="Install the OpenSSH client on this machine (openssh-client), or name a simpler file in `config_file`.",
        host=host.name,
    )


def _paths(values: Sequence[str], tokens: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    return tuple(Path(_replaced(value, tokens or {})) for value in values if value and value.lower() != "none")


def _split(value: str) -> list[str]:
    """The paths of a list as `ssh -G` prints it: without the quotes that stood around those with blanks."""
    return re.split(r" (?=[/~%$])", value) if value else []


def _tokens(name: str, hostname: str, port: str, user: str, alias: str) -> dict[str, str]:
    """ssh's tokens; it replaces them in these settings only when it connects."""
    here = socket.gethostname()
    home, me = os.path.expanduser("~"), getpass.getuser()
    tokens = {"%": "%", "h": hostname, "n": name, "p": port, "r": user, "d": home, "u": me, "i": str(os.getuid())}
    return {**tokens, "k": alias or name, "l": here, "L": here.partition(".")[0]}


def _replaced(value: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), value)


@dataclass(frozen=True)
class Jump:
    """One host on the way, as ProxyJump and `gateway` name it; port 0 and user "" leave it to the configuration."""

    name: str
    user: str = ""
    port: int = 0


def parse_jump(text: str, host: Host) -> Jump:
    """[user@]host[:port], [user@][address]:port or ssh://...; SshConfigError when it is none of them."""
    match = _JUMP.fullmatch(text.strip())
    if match is None:
        raise SshConfigError(
            f"{text!r} is no host to jump through.", hint="Write it as user@host:port.", host=host.name
        )
    return Jump(match["six"] or match["name"], match["user"] or "", int(match["port"] or 0))


_JUMP = re.compile(
    r"(?:ssh://)?(?:(?P<user>.+)@)?(?:\[(?P<six>[^\]]+)\]|(?P<name>[^@:\[\]/]+|[0-9A-Fa-f:.%]*:[^@/]*:[^@/]*))(?::(?P<port>\d+))?/?"
)
