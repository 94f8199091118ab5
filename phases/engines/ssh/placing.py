"""Which of a fleet's workers a router's entries are: every entry is placed on one worker, foreign, or cannot be placed.

Foreign is an entry that is proved to be none of ours: its port is no worker's, or its host and those of all workers with that port are
resolved and differ (a router may serve other fleets too). What is neither ours nor foreign is unplaced, with the workers that it may be:
for those nothing may be claimed about their traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phases.base.clock import Clock
from phases.base.errors import joined
from phases.engines.ssh.host import Host
from phases.serving.address import LOOPBACK, Names, WorkerAddress, canonical, of_this_machine

CURE = "Set `router_url` of that worker to the address the router has for it, or make the name known here."


@dataclass(frozen=True)
class RoutedWorker:
    """A worker as the router sees it. A router started with --dp-aware has one entry for each rank."""

    url: str
    healthy: bool
    id: str = ""
    load: int = 0


@dataclass(frozen=True)
class Unplaced:
    """An entry that may be one of ours. `candidates`: names of the workers that it may be."""

    entry: RoutedWorker
    why: str
    candidates: frozenset[str]

    def __str__(self) -> str:
        return f"{self.entry.url} ({self.why})"


@dataclass(frozen=True)
class Routed:
    """One reading of the router.

    Attributes:
        entries: of each worker, by name. foreign: proved to be other fleets'.
        silent: why the router could not be asked, else empty; then nothing is known of anybody.
    """

    entries: Mapping[str, tuple[RoutedWorker, ...]] = field(default_factory=dict)
    unplaced: tuple[Unplaced, ...] = ()
    foreign: tuple[RoutedWorker, ...] = ()
    silent: str = ""

    def in_service(self, name: str) -> bool | None:
        """Whether the router sends requests to a worker; None where that cannot be told."""
        if any(entry.healthy for entry in self.entries.get(name, ())):
            return True
        return None if self.doubt(name) else False

    def listed(self, name: str) -> bool | None:
        """Whether the router has a worker at all: one that it finds unhealthy may get requests in the next moment."""
        return True if self.entries.get(name) else None if self.doubt(name) else False

    def doubt(self, name: str) -> str:
        """Why it is not certain that a worker has no other entries than those placed on it; else empty."""
        mine = [str(one) for one in self.unplaced if name in one.candidates]
        return self.silent or (f"the router lists {joined(mine)}, which may be it" if mine else "")

    def told(self) -> str:
        """The entries that cannot be placed, for people; else empty."""
        return (
            f"the router lists what cannot be placed: {joined(map(str, self.unplaced))}. {CURE}"
            if self.unplaced
            else ""
        )


class AddressBook:
    """The addresses of a fleet's workers, as the router may write them.

    Args:
        workers: by name, addresses as text; what is no address is left out.
        router: address of the router: what it calls localhost is its own machine. Empty: this one.
        names: resolves. own: whether a numeric address is this machine's.
    """

    def __init__(
        self,
        workers: Mapping[str, Sequence[str]],
        names: Names,
        *,
        router: str = "",
        own: Callable[[str], bool] = of_this_machine,
    ) -> None:
        self._names, self._own = names, own
        self.workers = {name: _parsed(urls) for name, urls in workers.items()}
        self._router = next(iter(_parsed([router])), None)

    @staticmethod
    def of(hosts: Iterable[Host], clock: Clock, *, router: str = "") -> AddressBook:
        """The book of these hosts: each by its `router_url`, and by where we reach it unless that is a way of our own (a tunnel)."""
        return AddressBook({host.name: _texts(host) for host in hosts}, Names(clock.monotonic), router=router)

    def name_of(self, url: str) -> str:
        """Which worker's address this is, by how it is written; empty for none of them."""
        try:
            wanted = WorkerAddress.parse(url)
        except ValueError:
            return ""
        return next((name for name, addresses in self.workers.items() if wanted in addresses), "")

    def place(self, listed: Iterable[RoutedWorker]) -> Routed:
        """Every entry of one reading of the router."""
        entries: dict[str, list[RoutedWorker]] = {name: [] for name in self.workers}
        unplaced: list[Unplaced] = []
        foreign: list[RoutedWorker] = []
        known: list[tuple[RoutedWorker, WorkerAddress]] = []
        for entry in listed:
            try:
                known.append((entry, WorkerAddress.parse(entry.url)))
            except ValueError:
                unplaced.append(Unplaced(entry, "it is no address", frozenset(self.workers)))
        router, workers, addresses = self._resolved([address for _, address in known])
        for (entry, _), address in zip(known, addresses, strict=True):
            names, why = _whose(self._seen_from(router, address), workers, self._own)
            if names is None:
                foreign.append(entry)
            elif why:
                unplaced.append(Unplaced(entry, why, frozenset(names)))
            else:
                entries[names[0]].append(entry)
        return Routed({name: tuple(found) for name, found in entries.items()}, tuple(unplaced), tuple(foreign))

    def _resolved(
        self, listed: Sequence[WorkerAddress]
    ) -> tuple[WorkerAddress | None, dict[str, list[WorkerAddress]], list[WorkerAddress]]:
        """Everything resolved at once; only what is not written alike on both sides is asked for."""
        ours = [address for addresses in self.workers.values() for address in addresses]
        ports = {address.port for address in ours}
        strange = [a for a in listed if a.port in ports and (a not in ours or (a.loopback and self._router))]
        ask = bool(strange)
        router = [self._router] if self._router and ask else []
        found = iter(self._names.resolve([*router, *ours, *strange]) if ask else ours)
        seen_router = next(found) if router else self._router
        workers = {name: [next(found) for _ in addresses] for name, addresses in self.workers.items()}
        return seen_router, workers, [next(found) if address in strange else address for address in listed]

    def _seen_from(self, router: WorkerAddress | None, address: WorkerAddress) -> WorkerAddress:
        """What the router calls its own machine, as it is called from here."""
        if router is None or not address.loopback or router.loopback or any(map(self._own, router.resolved)):
            return address
        return WorkerAddress(address.scheme, router.host, address.port, router.resolved)


def _whose(
    entry: WorkerAddress, workers: Mapping[str, Sequence[WorkerAddress]], own: Callable[[str], bool]
) -> tuple[list[str] | None, str]:
    """(worker it is, ""), (workers it may be, why that is open) or, for a foreign one, None.

    The closest likeness counts: written alike, then one address, then one machine (this one, under any of its addresses).
    """
    mine = [name for name, addresses in workers.items() if any(entry.port == address.port for address in addresses)]
    likenesses: tuple[Callable[[WorkerAddress], bool], ...] = (
        lambda address: entry == address,
        lambda address: entry.same(address) is True,
        lambda address: _folded(entry, own).same(_folded(address, own)) is True,
    )
    for alike in likenesses:
        names = [name for name in mine if any(map(alike, workers[name]))]
        if names:
            return names, "" if len(names) == 1 else f"it is the address of {' and '.join(names)}"
    if entry.loopback and mine:  # reached through a tunnel, a router's own machine is another than it seems
        return mine, "it is the router's own machine"
    unsure = [name for name in mine if any(entry.same(address) is None for address in workers[name])]
    if not unsure:
        return None, ""
    mute = entry.host if not entry.resolved else f"the address of {' and '.join(unsure)}"
    return unsure, f"{mute} cannot be resolved here"


def _folded(address: WorkerAddress, own: Callable[[str], bool]) -> WorkerAddress:
    return address.at({*address.resolved, LOOPBACK}) if any(map(own, address.resolved)) else address


def _texts(host: Host) -> list[str]:
    ours = _parsed([host.url])
    if host.router_url:
        return [host.router_url, *([] if any(address.loopback for address in ours) else [host.url])]
    return [host.url]


def _parsed(urls: Iterable[str]) -> list[WorkerAddress]:
    found = []
    for url in urls:
        try:
            found.append(WorkerAddress.parse(url))
        except ValueError:
            continue
    return found


def entries_of(book: AddressBook, listed: Sequence[RoutedWorker], url: str) -> tuple[list[RoutedWorker], str]:
    """A worker's entries by one of its addresses, and what is in doubt about them. An address the book does not have is compared as written."""
    name = book.name_of(url)
    if not name:
        return [entry for entry in listed if canonical(entry.url) == canonical(url)], ""
    routed = book.place(listed)
    return list(routed.entries[name]), routed.doubt(name)
