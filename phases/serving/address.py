"""Where a worker answers: one identity for a worker, whatever a playbook, a router and a resolver call it.

A worker is a listening socket: an address and a port. The scheme only says which port is meant where none is written: one socket has one listener.
Two spellings may be proved the same, proved different, or neither (a name that cannot be resolved here): then nothing may rest on it.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

PORTS = {"http": 80, "https": 443}
RESOLVE_SECONDS = 3.0  # for all names together: a resolver that hangs must not hold up a rollback
LOOPBACK = "127.0.0.1"

Lookup = Callable[[str], Collection[str]]  # a name to its numeric addresses; OSError when it has none


@dataclass(frozen=True)
class WorkerAddress:
    """One worker's address. Equal when written the same but for case, brackets, default port, slashes, trailing dot and rank; whether two
    different spellings are one worker is `same`.

    Attributes:
        scheme: lower case. host: as written, lower case, a literal in its shortest form, without brackets; its zone behind `%`.
        resolved: numeric addresses of the host; empty where it is not resolved.
        rank: of a router that lists every rank of a worker for itself (`--dp-aware`: URL@RANK). written: what it was read from, without the rank.
    """

    scheme: str
    host: str
    port: int
    resolved: frozenset[str] = field(default=frozenset(), compare=False)
    rank: int | None = field(default=None, compare=False)
    written: str = field(default="", compare=False)

    @staticmethod
    def parse(text: str) -> WorkerAddress:
        """Read an address such as `http://[2001:db8::7]:30000/` or `http://w1:30000@3`; without a scheme it is http.

        Raises:
            ValueError: it names no host and port.
        """
        base, rank = _without_rank(text.strip())
        parts = urlsplit(base if "://" in base else f"http://{base}")
        scheme = parts.scheme.lower()
        port = parts.port or PORTS.get(scheme)  # .port raises ValueError for what is none
        host = _host(parts.hostname or "")
        if any(ch.isspace() for ch in parts.netloc) or not host or port is None:
            raise ValueError(f"{text!r} names no host and port")
        return WorkerAddress(scheme, host, port, rank=rank, written=base).numeric()

    @staticmethod
    def of(host: str, port: int) -> WorkerAddress:
        """The address of a plain http server, from a host name or literal, with or without brackets. ValueError as `parse`."""
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        address = WorkerAddress("http", _host(bare), port)
        return WorkerAddress.parse(address.url)

    @property
    def url(self) -> str:
        """Base address for requests: brackets around an IPv6 literal, no slash at the end, no rank."""
        host = f"[{self.host.replace('%', '%25')}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def numeric(self) -> WorkerAddress:
        """Resolved without asking anybody: where the host is a literal, or `localhost`."""
        if self.host == "localhost":
            return self.at({LOOPBACK})
        return self.at({self.host}) if _is_literal(self.host) else self

    def at(self, addresses: Iterable[str]) -> WorkerAddress:
        """The same address, resolved to these."""
        return WorkerAddress(
            self.scheme, self.host, self.port, frozenset(map(_plain_address, addresses)), self.rank, self.written
        )

    @property
    def loopback(self) -> bool:
        """Whether it says "this machine", whichever that is for who says it."""
        return LOOPBACK in self.resolved

    def same(self, other: WorkerAddress) -> bool | None:
        """Whether both are one worker; None where nobody can tell, because a host is not resolved."""
        if self.port != other.port:
            return False
        if self.host == other.host or (
            self.resolved and other.resolved and any(_meet(a, b) for a in self.resolved for b in other.resolved)
        ):
            return True
        return False if self.resolved and other.resolved else None

    def refuses(self, seconds: float) -> bool:
        """Whether nothing listens there: connecting is refused at once. A worker that is only busy or out of reach does not refuse."""
        try:
            socket.create_connection((self.host, self.port), seconds).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


def canonical(url: str) -> str:
    """One text for every spelling of an address; a text that is none stays as it is, without a slash at its end."""
    try:
        return WorkerAddress.parse(url).url
    except ValueError:
        return url.strip().rstrip("/")


class Names:
    """Resolves hosts, in threads and with a limit on waiting; remembers what it learned, an answer for a minute, a failure for some seconds.

    Args:
        lookup: numeric addresses of a name. now: monotonic seconds.
    """

    KEPT, KEPT_FAILURE = 60.0, 10.0

    def __init__(
        self, now: Callable[[], float], lookup: Lookup | None = None, *, seconds: float = RESOLVE_SECONDS
    ) -> None:
        self._now, self._lookup, self._seconds = now, lookup or _system_lookup, seconds
        self._answers: dict[str, tuple[float, frozenset[str]]] = {}  # (kept until, addresses)
        self._lock = threading.Lock()

    def resolve(self, addresses: Collection[WorkerAddress]) -> list[WorkerAddress]:
        """The same addresses in the same order, resolved as far as that can be done in time."""
        wanted = {address.host for address in addresses if not address.resolved}
        with self._lock:
            missing = [host for host in wanted if not self._fresh(host)]
        threads = [threading.Thread(target=self._ask, args=(host,), daemon=True) for host in missing]
        for thread in threads:
            thread.start()
        until = time.monotonic() + self._seconds  # a resolver does not follow a clock that is passed in
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            for host in missing:
                if not self._fresh(host):
                    self._answers[host] = (self._now() + self.KEPT_FAILURE, frozenset())
            return [a if a.resolved else a.at(self._answers[a.host][1]) for a in addresses]

    def _fresh(self, host: str) -> bool:
        return host in self._answers and self._answers[host][0] > self._now()

    def _ask(self, host: str) -> None:
        try:
            found, kept = frozenset(self._lookup(host)), self.KEPT
        except OSError:
            found, kept = frozenset(), self.KEPT_FAILURE
        with self._lock:
            self._answers[host] = (self._now() + kept, found)


def of_this_machine(address: str) -> bool:
    """Whether a numeric address is one of this machine's own: only such can be bound to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(socket.getaddrinfo(address, 0, family, socket.SOCK_DGRAM)[0][4])
    except OSError:
        return False
    return True


def _system_lookup(name: str) -> Collection[str]:
    try:
        return {str(row[4][0]) for row in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except UnicodeError as fault:  # a label too long, or none
        raise OSError(str(fault)) from None


def _without_rank(text: str) -> tuple[str, int | None]:
    ranked = re.fullmatch(r"(.*)@(\d{1,6})/*", text, re.DOTALL)
    return (ranked[1], int(ranked[2])) if ranked else (text, None)


def _host(name: str) -> str:
    bare = unquote(name) if "%" in name else name
    address, percent, zone = bare.partition("%")
    address = address.lower().removesuffix(".")
    return f"{_shortest(address) if _is_literal(address) else address}{percent}{zone}"


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _shortest(address: str) -> str:
    return str(ipaddress.ip_address(address))


def _plain_address(address: str) -> str:
    """One text for each address: IPv4 in IPv6 is IPv4, and this machine is 127.0.0.1, by which version and wildcard ever."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped:
        found = found.ipv4_mapped
    return LOOPBACK if found.is_unspecified or str(found) == "::1" else str(found)


def _meet(one: str, other: str) -> bool:
    """Whether two numeric addresses are one. A zone that only one of them names, or names in another way, tells nothing apart."""
    (a, _, zone), (b, _, other_zone) = one.partition("%"), other.partition("%")
    apart = zone and other_zone and zone != other_zone and zone.isdigit() == other_zone.isdigit()
    return a == b and not apart
