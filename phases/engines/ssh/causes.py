"""Why a connection failed, and the cure for that: by errno, by what the other side said, by what both could not agree on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping, Sequence

import paramiko

from phases.base.errors import FleetError
from phases.engines.ssh.errors import LoginError, UnreachableError
from phases.engines.ssh.host import Host
from phases.engines.ssh.stream import silent

AGAIN = "Check the host and the network, then repeat the command: it continues from what the host has."
_LOG = "see sshd's log there (`journalctl -u ssh`)"
_CURES = {
    errno.ECONNREFUSED: "Is sshd running there, and is the port right?",
    errno.EHOSTUNREACH: "There is no way to it from here: check `address`, routes, VPN, and the bastion (`gateway`, ProxyJump).",
    errno.ENETUNREACH: "There is no way to it from here: check `address`, routes, VPN, and the bastion (`gateway`, ProxyJump).",
    errno.ECONNRESET: "sshd, or a filter before it (MaxStartups, fail2ban, a load balancer), cuts connections off: "
    f"{_LOG}; many hosts behind one address want a smaller `at_once`.",
    errno.EADDRNOTAVAIL: "BindAddress of the ssh configuration is no address of this machine.",
    errno.EACCES: "This machine forbids it: see its packet filter and sandbox.",
    errno.EPERM: "This machine forbids it: see its packet filter and sandbox.",
    errno.EMFILE: "This machine has too many open files: raise `ulimit -n` here, or work on fewer hosts at once (`at_once`).",
    errno.ENFILE: "This machine has too many open files: raise fs.file-max here, or work on fewer hosts at once (`at_once`).",
    errno.ENOBUFS: "This machine has no memory for connections left: work on fewer hosts at once (`at_once`).",
}
# What both sides have to agree on: the library's word, sshd_config's word, and where the server's list stands.
_AGREEMENTS = {
    "kex": ("key exchange", "KexAlgorithms", "kex_algo_list"),
    "host key": ("host key algorithm", "HostKeyAlgorithms", "server_key_algo_list"),
    "cipher": ("cipher", "Ciphers", "server_encrypt_algo_list"),
    "mac": ("MAC", "MACs", "server_mac_algo_list"),
}


class Peer(paramiko.Transport):  # type: ignore[misc]
    """The library's transport, which also keeps what the other side said; the library only logs it."""

    goodbye = ""  # its reason for ending the connection
    greeting: tuple[str, ...] = ()  # lines before, or instead of, the line with the protocol
    offered: Mapping[str, Sequence[str]] = {}  # algorithms by the library's name of the list

    def _log(self, level: int, msg: object, *args: object) -> None:
        text = str(msg)
        if text.startswith("Banner: "):
            self.greeting = (*self.greeting[-4:], text.removeprefix("Banner: ").strip()[:200])
        elif text.startswith("Disconnect (code"):
            self.goodbye = text.partition("): ")[2].strip()[:200]
        super()._log(level, msg, *args)

    def _really_parse_kex_init(self, m: paramiko.Message, ignore_first_byte: bool = False) -> dict[str, Sequence[str]]:
        parsed: dict[str, Sequence[str]] = super()._really_parse_kex_init(m, ignore_first_byte)
        if not ignore_first_byte:  # else it is our own, read again
            self.offered = parsed
        return parsed


def not_connected(
    host: Host, where: str, fault: BaseException, peer: paramiko.Transport | None, said: str
) -> FleetError:
    """The error for a connection to `where` that could not be made; `said`: the last line of a ProxyCommand."""
    told = f" (the ProxyCommand says: {said})" if said else ""
    text = str(fault) or type(fault).__name__
    if isinstance(fault, paramiko.ssh_exception.IncompatiblePeer):
        return _no_agreement(host, where, text, peer)
    if isinstance(fault, paramiko.ChannelException):
        return _bastion(host, where, fault)
    if isinstance(fault, socket.gaierror):
        hint = (
            "Check `address`."
            if fault.errno != socket.EAI_AGAIN
            else "The name service does not answer: see /etc/resolv.conf and VPN."
        )
        return UnreachableError(f"the name in {where} cannot be resolved: {fault.strerror}.", hint=hint, host=host.name)
    greeting = " ".join(getattr(peer, "greeting", ()))
    if "Indecipherable" in text or ("banner" in text and greeting and not _full(greeting)):
        greeting = greeting or text.partition('"')[2].strip(' "')
        return _unreachable(
            host, f"what answers at {where} is not ssh: it says {greeting[:200]!r}{told}.", "Is the port right?"
        )
    number = next((each.errno for each in _chain(fault) if isinstance(each, OSError) and each.errno in _CURES), None)
    if number is not None:
        return _unreachable(host, f"cannot connect to {where}: {text}{told}.", _CURES[number])
    if any(isinstance(each, TimeoutError) for each in _chain(fault)) or _timed_out(text):
        return silent(host, f"connecting to {where}{told}", host.timeouts.connect)
    if "banner" in text or any(isinstance(each, EOFError) for each in _chain(fault)):
        return _hung_up(host, where, peer, told)
    if not isinstance(fault, (paramiko.SSHException, OSError)):
        return _unreachable(
            host,
            f"the ssh library failed at {where}: {type(fault).__name__}: {fault}{told}.",
            f"This is a bug, there or here: report it with the versions of the server and of paramiko {paramiko.__version__}.",
        )
    return _unreachable(host, f"cannot connect to {where}: {text}{told}.", AGAIN)


def lost(host: Host, what: str, fault: BaseException, peer: paramiko.Transport | None = None) -> FleetError:
    """The error for a connection that stood and failed at something."""
    reason = getattr(peer, "goodbye", "") or str(fault) or type(fault).__name__
    if isinstance(fault, paramiko.ChannelException):
        return _unreachable(
            host, f"the host refuses a session ({fault.text}).", f"See MaxSessions in sshd_config there; {_LOG}."
        )
    if "Channel closed" in reason and what == OPENING:
        return LoginError(
            "the host lets this user in and refuses to run commands.",
            hint="See ForceCommand and the `command=` of the key there (internal-sftp, git): set another `user` or key.",
            host=host.name,
        )
    hint = next(
        (
            _CURES[each.errno]
            for each in _chain(fault)
            if isinstance(each, OSError) and each.errno in (errno.EMFILE, errno.ENFILE)
        ),
        AGAIN,
    )
    return _unreachable(host, f"the connection broke while {what} ({reason}).", hint)


OPENING = "opening a channel"


def _no_agreement(host: Host, where: str, text: str, peer: paramiko.Transport | None) -> FleetError:
    for sign, (noun, setting, field) in _AGREEMENTS.items():
        if sign in text:
            theirs = ", ".join(getattr(peer, "offered", {}).get(field, ())) or "others"
            ours = ", ".join(_ours(peer, sign))
            return _unreachable(
                host,
                f"{where} and the toolkit have no {noun} in common: it has {theirs}; here there are {ours or 'none'}.",
                f"Allow one of these in {setting} of sshd_config there, and in the ssh configuration here.",
            )
    return _unreachable(host, f"{where} speaks another ssh than the toolkit: {text}.", "Is it an OpenSSH server?")


def _ours(peer: paramiko.Transport | None, sign: str) -> Sequence[str]:
    if peer is None:
        return ()
    options = peer.get_security_options()
    names: Sequence[str] = {
        "kex": options.kex,
        "host key": options.key_types,
        "cipher": options.ciphers,
        "mac": options.digests,
    }[sign]
    return names


def _bastion(host: Host, where: str, fault: paramiko.ChannelException) -> FleetError:
    hints = {
        1: "Set AllowTcpForwarding yes (and PermitOpen) for this user in sshd_config on the bastion.",
        2: "From the bastion the host is not to be reached: check `address`, the port, and the way between them.",
    }
    return _unreachable(
        host,
        f"the bastion does not connect to {where}: {fault.text}.",
        hints.get(fault.code, f"On the bastion, {_LOG}."),
    )


def _hung_up(host: Host, where: str, peer: paramiko.Transport | None, told: str) -> FleetError:
    said = getattr(peer, "goodbye", "") or " ".join(getattr(peer, "greeting", ()))
    hint = f"sshd, or what stands before it (hosts.deny, fail2ban, MaxStartups, a load balancer), refuses this machine: {_LOG}."
    if told:
        hint = "Run the ProxyCommand by hand."
    elif _full(said):
        hint = "sshd takes no more logins at once (MaxStartups, PerSourcePenalties): work on fewer hosts at once (`at_once`), or raise it there."
    return _unreachable(host, f"{where} hung up{f', saying {said!r}' if said else ' without a word'}{told}.", hint)


def _full(said: str) -> bool:
    """What sshd says instead of its name when it takes no more connections."""
    return "MaxStartups" in said or "Not allowed at this time" in said


def _timed_out(text: str) -> bool:
    # "No existing session" is what the library says when the key exchange has not ended in time.
    return any(sign in text.lower() for sign in ("timeout", "timed out", "no existing session"))


def _unreachable(host: Host, message: str, hint: str) -> UnreachableError:
    return UnreachableError(message, hint=hint, host=host.name)


def _chain(fault: BaseException | None) -> Iterator[BaseException]:
    while fault is not None:
        yield fault
        fault = fault.__cause__ or fault.__context__
