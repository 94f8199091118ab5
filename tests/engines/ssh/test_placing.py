"""Whose a router's entries are: ours, foreign, or nobody can tell."""

from __future__ import annotations

import random

import pytest

from phases.engines.ssh.placing import AddressBook, RoutedWorker
from phases.serving.address import Names

KNOWN = {
    "w1.example": {"10.0.0.1"},
    "alias-of-w1": {"10.0.0.1", "2001:db8::1"},
    "other.example": {"10.9.9.9"},
    "router.example": {"10.0.0.1"},
    "gateway": {"10.5.5.5"},
    "gateway-too": {"10.5.5.5"},
    "me": {"192.0.2.10"},
    "my-name": {"127.0.1.1"},  # as Debian writes a machine's own name into its hosts file
}


def lookup(name: str) -> set[str]:
    if name not in KNOWN:
        raise OSError("no such name")
    return KNOWN[name]


def book(workers: dict[str, list[str]], router: str = "") -> AddressBook:
    names = Names(lambda: 0.0, lookup, seconds=30.0)
    return AddressBook(
        workers, names, router=router, own=lambda address: address in ("192.0.2.10", "127.0.0.1", "127.0.1.1")
    )


def place(workers: dict[str, str], *urls: str, router: str = ""):  # noqa: ANN201
    made = book({name: [url] for name, url in workers.items()}, router)
    return made.place([RoutedWorker(url, True, str(n)) for n, url in enumerate(urls)])


FLEET = {"w1": "http://10.0.0.1:30000", "w2": "http://10.0.0.2:30000"}


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:30000",
        "http://10.0.0.1:30000/",
        "http://10.0.0.1:30000@0",
        "http://W1.example.:30000/@3",
        "http://alias-of-w1:30000",
        "https://10.0.0.1:30000",
        "10.0.0.1:30000",
        "http://[::ffff:10.0.0.1]:30000",
    ],
)
def test_any_spelling_is_placed_on_its_worker(url: str) -> None:
    routed = place(FLEET, url)
    assert routed.in_service("w1") is True and routed.listed("w1") is True
    assert routed.in_service("w2") is False and not routed.unplaced and not routed.foreign


def test_ranks_are_one_worker_and_one_healthy_rank_gets_requests() -> None:
    made = book({name: [url] for name, url in FLEET.items()})
    routed = made.place([RoutedWorker(f"http://10.0.0.1:30000@{rank}", rank == 2, str(rank)) for rank in range(4)])
    assert len(routed.entries["w1"]) == 4 and routed.in_service("w1") is True
    sick = made.place([RoutedWorker("http://10.0.0.1:30000@0", False)])
    assert sick.in_service("w1") is False and sick.listed("w1") is True


@pytest.mark.parametrize(
    "url",
    ["http://other.example:30000", "http://10.9.9.9:30000", "http://10.0.0.1:31000", "http://no-such-name:31000@2"],
)
def test_what_is_proved_another_is_foreign_and_hides_nothing(url: str) -> None:
    """A port that no worker of ours has needs no resolving: a worker is an address and a port."""
    routed = place(FLEET, url)
    assert [entry.url for entry in routed.foreign] == [url] and not routed.unplaced
    assert routed.in_service("w1") is False and not routed.told()


@pytest.mark.parametrize(
    "url", ["http://no-such-name:30000", "http://no-such-name:30000@1", "http://[::1", "what is this"]
)
def test_what_may_be_ours_leaves_open_whether_any_of_those_is_in_service(url: str) -> None:
    routed = place(FLEET, "http://10.0.0.2:30000", url)
    assert routed.in_service("w1") is None and routed.listed("w1") is None
    assert routed.in_service("w2") is True and url in routed.doubt("w1") and url in routed.doubt("w2")
    assert url in routed.told() and "router_url" in routed.told()


def test_a_worker_of_ours_that_cannot_be_resolved_may_be_any_entry_with_its_port() -> None:
    routed = place(
        {"w1": "http://10.0.0.1:30000", "w2": "http://nowhere:30001"}, "http://10.0.0.9:30000", "http://10.0.0.9:30001"
    )
    assert [entry.url for entry in routed.foreign] == ["http://10.0.0.9:30000"]
    assert routed.in_service("w1") is False and routed.in_service("w2") is None


def test_workers_behind_one_gateway_are_told_apart_by_name_only() -> None:
    fleet = {"w1": "https://gateway", "w2": "https://gateway-too"}
    routed = place(fleet, "https://gateway-too:443/")
    assert routed.in_service("w2") is True and routed.in_service("w1") is False
    routed = place(fleet, "https://10.5.5.5:443")
    assert routed.in_service("w1") is routed.in_service("w2") is None


def test_localhost_is_the_routers_own_machine() -> None:
    here = place({"w1": "http://127.0.0.1:30000"}, "http://localhost:30000", router="http://[::1]:8000")
    assert here.in_service("w1") is True
    there = place(FLEET, "http://127.0.0.1:30000", router="http://router.example:8000")
    assert there.in_service("w1") is True and there.in_service("w2") is False
    tunnel = place(FLEET, "http://127.0.0.1:30000", router="http://127.0.0.1:8000")
    assert tunnel.in_service("w1") is None, "behind a tunnel it is another machine than it seems"


def test_this_machine_is_known_by_its_address_too() -> None:
    assert place({"w1": "http://127.0.0.1:30000"}, "http://me:30000").in_service("w1") is True
    assert place({"w1": "http://192.0.2.10:30000"}, "http://localhost:30000").in_service("w1") is True
    assert place({"w1": "http://192.0.2.10:30000"}, "http://my-name:30000").in_service("w1") is True


@pytest.mark.parametrize("seed", range(100))
def test_every_entry_ends_in_exactly_one_place(seed: int) -> None:
    rng = random.Random(seed)
    hosts = [*KNOWN, "no-such-name", "10.0.0.1", "10.0.0.2", "[2001:db8::1]", "localhost", "[::1]", "x y"]
    text = lambda: f"http://{rng.choice(hosts)}:{rng.choice(['1', '2', 'x'])}{rng.choice(['', '/', '@0'])}"  # noqa: E731
    fleet = {f"w{n}": text() for n in range(4)}
    listed = [text() for _ in range(6)]
    routed = place(fleet, *listed, router=rng.choice(["", "http://router.example:1", "http://127.0.0.1:1"]))
    placed = [e.id for entries in routed.entries.values() for e in entries]
    assert sorted([*placed, *(u.entry.id for u in routed.unplaced), *(e.id for e in routed.foreign)]) == list("012345")
    assert all(one.candidates for one in routed.unplaced), "an entry that can be nobody's is foreign"
