"""Logging in with what OpenSSH would try, in its order; what cannot be used is told, and the next is tried.

The library's own way ends at the first key file that is missing, offers every key of an agent although the configuration
names the ones to use, and tells of the last attempt alone.
"""

from __future__ import annotations

import base64
import binascii
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.agent import AgentSSH
from paramiko.auth_strategy import AuthStrategy

from phases.engines.ssh.errors import LoginError
from phases.engines.ssh.host import Host
from phases.engines.ssh.sshconfig import Login
from phases.engines.ssh.trust import CERTIFICATE


@dataclass(frozen=True)
class Candidate:
    """A key to try, and where it comes from."""

    key: paramiko.PKey
    source: str


class _Agent(AgentSSH):
    """The agent behind one socket. The library knows only the environment's, and would wait for a stuck one for ever."""

    def __init__(self, path: str, limit: float) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(limit)
        try:
            self._socket.connect(path)
            self._connect(self._socket)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()


class Authentication(AuthStrategy):  # type: ignore[misc]
    """One login: no password, no question, since nobody is there to answer."""

    def __init__(self, host: Host, login: Login) -> None:
        super().__init__(ssh_config=None)
        self.host, self.login = host, login
        self.where = f"{login.user}@{login.hostname}:{login.port}"
        self.tried: list[str] = []
        self._agent: _Agent | None = None

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Try one key after the other.

        Raises: LoginError that tells what was tried and what became of it; what the connection itself ends with.
        """
        try:
            if self._open_to_all(transport):
                return
            for path in self.host.ssh.key_files:  # those of the configuration need not be there
                if not os.path.exists(os.path.expanduser(path)):
                    self.tried.append(f"{path}: does not exist")
            for candidate in self._candidates():
                try:
                    further = transport.auth_publickey(self.login.user, candidate.key)
                except paramiko.AuthenticationException as fault:
                    if not transport.is_active():
                        raise self._refused(f"the host hung up: {getattr(transport, 'goodbye', '') or fault}") from None
                    self.tried.append(f"{candidate.source}: refused")
                    continue
                except paramiko.SSHException as fault:
                    if not transport.is_active():
                        raise
                    self.tried.append(
                        f"{candidate.source}: {fault}"
                    )  # an algorithm that both do not know, a card pulled out
                    continue
                if not further:
                    return
                raise self._refused(
                    f"it took {candidate.source} and wants {' or '.join(further)} besides",
                    "A second factor cannot be given here: set AuthenticationMethods to publickey for this user there.",
                )
            raise self._refused("; ".join(self.tried) or "there is no key to try")
        finally:
            if self._agent is not None and not transport.is_authenticated():
                self._agent.close()

    def _open_to_all(self, transport: paramiko.Transport) -> bool:
        """Ask without a key, as ssh does: some hosts know who comes from the network (Tailscale), others say what they take."""
        try:
            transport.auth_none(self.login.user)
        except paramiko.BadAuthenticationType as fault:
            if "publickey" not in fault.allowed_types:
                raise self._refused(
                    f"it takes no keys, only {', '.join(fault.allowed_types)}",
                    "Set PubkeyAuthentication yes in sshd_config there.",
                ) from None
            return False
        except paramiko.AuthenticationException as fault:
            if not transport.is_active():
                raise self._refused(f"the host hung up: {getattr(transport, 'goodbye', '') or fault}") from None
            return False
        return True

    def _candidates(self) -> Iterator[Candidate]:
        """Keys of the agent that the configuration names, its other keys, then key files: OpenSSH's order."""
        offered = {key.asbytes(): key for key in self._agent_keys()}
        files = [f"{path}{end}" for path in self.login.key_files for end in ("-cert.pub", "")]
        named = [blob for path in (*self.login.certificate_files, *files) if (blob := _public(path)) is not None]
        first = [blob for blob in dict.fromkeys(named) if blob in offered]
        rest = [] if self.login.only_these_keys else [blob for blob in offered if blob not in named]
        for blob in (*first, *rest):
            yield Candidate(offered[blob], f"key {offered[blob].comment or offered[blob].get_name()} of the agent")
        for path in self.login.key_files:
            if _public(path) in offered and _public(f"{path}-cert.pub") is None:
                continue
            key = self._load(path)
            if key is not None:
                yield Candidate(key, str(path))

    def _agent_keys(self) -> tuple[paramiko.AgentKey, ...]:
        path = (
            os.environ.get("SSH_AUTH_SOCK", "")
            if self.login.agent == "SSH_AUTH_SOCK"
            else os.path.expandvars(self.login.agent)
        )
        if not self.host.ssh.agent or not path or path.lower() == "none":
            return ()
        try:
            self._agent = _Agent(os.path.expanduser(path), self.host.timeouts.connect)
        except (OSError, paramiko.SSHException) as fault:
            self.tried.append(f"the agent at {path}: {fault or type(fault).__name__}")
            return ()
        keys = tuple(self._agent.get_keys())
        for key in keys:
            # With an inner key the library sends the bare key of an RSA certificate under the certificate's name; before
            # paramiko 5 it looks for the blob in the inner key, also where there is none.
            if key.get_name().endswith(CERTIFICATE):
                key.inner_key = None
            if key.inner_key is None:
                key.public_blob = None
        return keys

    def _load(self, path: Path) -> paramiko.PKey | None:
        file = Path(os.path.expanduser(path))
        if not file.exists():
            return None
        try:
            key = paramiko.PKey.from_path(file)
        except Exception as fault:  # noqa: BLE001 - two libraries' parsers, with types of their own for each flaw
            self.tried.append(f"{path}: {_why(file, fault)}")
            return None
        for certificate in self.login.certificate_files:
            try:
                key.load_certificate(os.path.expanduser(certificate))
                break
            except Exception:  # noqa: BLE001 - the certificate of another key
                continue
        return key

    def _refused(self, what: str, hint: str = "") -> LoginError:
        if "Too many authentication failures" in what:
            hint = "It counts every key of the agent: name the one to use in `key_files` and set IdentitiesOnly in the ssh configuration."
        return LoginError(
            f"{self.where} refuses the login: {what}.",
            hint=hint
            or "Check `user`, `key_files`, the agent (`ssh-add -l`), and authorized_keys with its permissions there.",
            host=self.host.name,
        )


def _public(path: Path | str) -> bytes | None:
    """The public key that belongs to a key file: beside it, or the file itself where the agent has the private part."""
    name = os.path.expanduser(path)
    for candidate in (f"{name}.pub", name):
        try:
            with open(candidate, "rb") as file:
                fields = file.read(20_000).split()
            if len(fields) >= 2 and fields[0].startswith((b"ssh-", b"ecdsa-", b"sk-")):
                return base64.b64decode(fields[1], validate=True)
        except (OSError, binascii.Error, ValueError):
            continue
    return None


def _why(path: Path, fault: Exception) -> str:
    if isinstance(fault, OSError):
        return fault.strerror or str(fault)
    text = str(fault).lower()
    if isinstance(fault, paramiko.PasswordRequiredException) or "password" in text or "encrypted" in text:
        return "has a passphrase: add it to the agent (`ssh-add`)"
    if _public(path) is not None and b"PRIVATE" not in path.read_bytes():
        return "is a public key whose private part the agent does not have"
    return f"is no private key that can be read here ({type(fault).__name__})"
