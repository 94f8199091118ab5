"""Whether the machine that answered is the one that was meant: its key against known_hosts, and certificates of host keys."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import paramiko

from phases.engines.ssh.errors import HostKeyError
from phases.engines.ssh.host import Host
from phases.engines.ssh.known_hosts import AUTHORITY, REVOKED, KnownHosts, KnownKey
from phases.engines.ssh.sshconfig import Login

CERTIFICATE = "-cert-v01@openssh.com"
# Fields of the key itself in a certificate, between the nonce and the serial number.
_KEY_FIELDS = {
    "ssh-rsa": 2,
    "ssh-ed25519": 1,
    "ecdsa-sha2-nistp256": 2,
    "ecdsa-sha2-nistp384": 2,
    "ecdsa-sha2-nistp521": 2,
}
_HOST = 2  # the type of a certificate for a host
_RSA = ("rsa-sha2-512", "rsa-sha2-256")


@dataclass(frozen=True)
class Certificate:
    """What a certificate of a host key says; times are seconds since 1970."""

    kind: str
    for_host: bool
    name: str
    principals: tuple[str, ...]
    after: int
    before: int
    critical: bool  # has options that whoever does not know them must refuse
    authority: bytes  # the signing key, as a blob
    signed: bool  # the signature is the authority's

    def flaw(self, host: str, now: float) -> str:
        """Why it does not vouch for this host now; "" when it does."""
        if not self.signed:
            return "its signature is wrong, or of an algorithm that is no longer trusted"
        if not self.for_host:
            return "it is for a user, not for a host"
        if not any(fnmatch.fnmatchcase(host.lower(), name.lower()) for name in self.principals):
            return f"it is for {', '.join(self.principals) or 'no host by name'}"
        if now < self.after:
            return f"it is valid from {_day(self.after)} on"
        if now >= self.before:
            return f"it expired on {_day(self.before)}"
        return "it has critical options" if self.critical else ""


def read_certificate(blob: bytes) -> Certificate:
    """Parse an OpenSSH certificate; ValueError when it is none."""
    message = paramiko.Message(blob)
    kind = message.get_text()
    plain = kind.removesuffix(CERTIFICATE)
    if kind == plain or plain not in _KEY_FIELDS:
        raise ValueError(f"{kind} is no certificate")
    for _ in range(1 + _KEY_FIELDS[plain]):  # the nonce first
        message.get_string()
    message.get_int64()  # serial number
    usage, name = message.get_int(), message.get_text()
    principals, after, before = _texts(message.get_string()), message.get_int64(), message.get_int64()
    critical = bool(message.get_string())
    message.get_string()  # extensions
    message.get_string()  # reserved
    authority = message.get_string()
    body = message.get_so_far()
    return Certificate(
        plain,
        usage == _HOST,
        name,
        principals,
        after,
        before,
        critical,
        authority,
        _signed(authority, body, message.get_string()),
    )


def _signed(authority: bytes, body: bytes, signature: bytes) -> bool:
    try:
        key = paramiko.PKey.from_type_string(paramiko.Message(authority).get_text(), authority)
        return bool(key.verify_ssh_sig(body, paramiko.Message(signature)))
    except Exception:  # noqa: BLE001 - whatever the library says of a key made to confuse it: it vouches for nothing
        return False


def _texts(data: bytes) -> tuple[str, ...]:
    message, texts = paramiko.Message(data), []
    while message.get_remainder():
        texts.append(message.get_text())
    return tuple(texts)


class Trust(paramiko.MissingHostKeyPolicy):
    """The library's question about a key it does not know, answered as ssh with StrictHostKeyChecking would.

    The library itself is given no keys, so it asks about every one.
    """

    def __init__(self, host: Host, login: Login, known: KnownHosts) -> None:
        self.host, self.login, self.known = host, login, known
        self.names = login.known_as

    def order(self, supported: Sequence[str]) -> tuple[str, ...]:
        """Host key algorithms to ask for: those first for which something is known, or the host shows another of its keys."""
        authorities = self.known.about(self.names, AUTHORITY)
        mine = {
            algorithm
            for key in self.known.about(self.names)
            for algorithm in (_RSA if key.kind == "ssh-rsa" else (key.kind,))
        }
        first = [name + CERTIFICATE for name in supported] if authorities else []
        wanted = [
            *first,
            *(name for name in supported if name in mine),
            *(name for name in supported if name not in mine),
        ]
        allowed = set(self.login.host_key_algorithms) or set(wanted)
        return tuple(name for name in wanted if name in allowed)

    def missing_host_key(self, client: object, hostname: str, key: paramiko.PKey) -> None:
        """Raises: HostKeyError unless the key is known, or certified by a known authority, and not revoked."""
        flaw = self._certified(key)
        if flaw is None:
            return
        blob, known = key.asbytes(), self.known.about(self.names)
        self._not_revoked(blob, "key")
        if any(each.blob == blob for each in known):
            return
        raise self._unknown(key, known, flaw)

    def _certified(self, key: paramiko.PKey) -> str | None:
        """None when a certificate vouches for the key, else why there is none that does ("" without a certificate)."""
        if key.public_blob is None:
            return ""
        try:
            certificate = read_certificate(key.public_blob.key_blob)
        except Exception as fault:  # noqa: BLE001 - the bytes are the other side's: whatever they do to the parser
            return f"the certificate it shows cannot be read ({fault})"
        self._not_revoked(certificate.authority, "authority of the certificate")
        self._not_revoked(key.asbytes(), "key")
        if all(each.blob != certificate.authority for each in self.known.about(self.names, AUTHORITY)):
            return f"the certificate it shows ({certificate.name}) is signed by {_print(certificate.authority)}, which is no authority here"
        flaw = certificate.flaw(self.login.key_alias or self.login.hostname, time.time())
        return f"the certificate it shows ({certificate.name}) does not hold: {flaw}" if flaw else None

    def _not_revoked(self, blob: bytes, what: str) -> None:
        for line in self.known.about(self.names, REVOKED):
            if line.blob == blob:
                raise HostKeyError(
                    f"the {what} that {self.names[0]} shows ({_print(blob)}) is revoked in {line.at}.",
                    hint="Whoever has that key may not be trusted: find out why it was revoked before anything else.",
                    host=self.host.name,
                )

    def _unknown(self, key: paramiko.PKey, known: Sequence[KnownKey], flaw: str) -> HostKeyError:
        name, shown = self.names[0], _print(key.asbytes())
        same = [line for line in known if line.kind == key.get_name()]
        extra = f" ({flaw})" if flaw else ""
        if same:
            return HostKeyError(
                f"{name} shows another host key than the known one ({shown} instead of {_print(same[0].blob)}, {same[0].at}){extra}.",
                hint=f"If the host was reinstalled, remove the old key (`ssh-keygen -R '{name}'`) and add the new one after "
                "comparing fingerprints; otherwise somebody may be in between.",
                host=self.host.name,
            )
        scan = f"`ssh-keyscan -p {self.login.port} {self.login.hostname}`"
        add = f"Get it with {scan}, compare the fingerprint with the host's own, and add it to known_hosts."
        if known:
            kinds = ", ".join(sorted({f"{line.kind} ({line.at})" for line in known}))
            return HostKeyError(
                f"no {key.get_name()} key is known for {name}, only {kinds}, and it shows {shown}{extra}.",
                hint=add,
                host=self.host.name,
            )
        skipped = sum(1 for line in self.known.unreadable)
        note = f" ({skipped} unreadable lines in {', '.join(self.known.files)})" if skipped else ""
        return HostKeyError(f"no host key is known for {name}{note}{extra}.", hint=add, host=self.host.name)


def _print(blob: bytes) -> str:
    """A key as `ssh-keygen -l` shows it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"{paramiko.Message(blob).get_text()} SHA256:{digest}"


def _day(moment: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(min(moment, 253402300799)))
