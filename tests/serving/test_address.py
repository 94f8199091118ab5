"""One identity for a worker, whatever it is called."""

from __future__ import annotations

import ipaddress
import random
import socket
import threading

import pytest

from phases.serving.address import Names, WorkerAddress, canonical, of_this_machine


def spelled(rng: random.Random, host: str, port: int, scheme: str = "http") -> str:
    """One of the ways in which an address can be written."""
    if ":" in host:
        address, percent, zone = host.partition("%")
        forms = [address, address.upper(), ipaddress.ip_address(address).exploded]
        host = f"[{rng.choice(forms)}{'%25' + zone if percent else ''}]"
    elif not host[-1].isdigit():
        host = rng.choice([host, host.upper(), f"{host}.", host.title()])
    shown = "" if (scheme, port) in (("http", 80), ("https", 443)) and rng.random() < 0.5 else f":{port}"
    rank = rng.choice(["", "@0", "@7", "/@3"])
    prefix = rng.choice([scheme, scheme.upper()])
    return f"{prefix}://{host}{shown}{rng.choice(['', '/', '//'])}{rank}{rng.choice(['', '/'])}"


HOSTS = [
    "w1",
    "w2.example",
    "localhost.example.com",
    "10.0.0.7",
    "10.0.0.8",
    "2001:db8::7",
    "2001:db8::8",
    "fe80::1%eth0",
    "fe80::1%eth1",
    "localhost",
]


@pytest.mark.parametrize("seed", range(300))
def test_every_spelling_of_an_address_is_one_and_another_address_is_another(seed: int) -> None:
    rng = random.Random(seed)
    host, port, scheme = rng.choice(HOSTS), rng.choice([80, 443, 30000, 30001]), rng.choice(["http", "https"])
    one, other = (WorkerAddress.parse(spelled(rng, host, port, scheme)) for _ in range(2))
    assert one == other and hash(one) == hash(other) and one.same(other) is True and one.url == other.url
    assert WorkerAddress.parse(one.url) == one, "what is composed is read as the same"
    different = WorkerAddress.parse(spelled(rng, rng.choice([h for h in HOSTS if h != host]), port, scheme))
    assert one.same(different) is not True and one != different
    assert one.same(different) is different.same(one), "the same from both sides"
    literal = [address for address in (one, different) if address.resolved]
    assert one.same(different) is (False if len(literal) == 2 else None), "a name that nobody resolved is open"
    elsewhere = WorkerAddress.parse(spelled(rng, host, port + 1, scheme))
    assert one.same(elsewhere) is False and one != elsewhere


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://[2001:DB8::7]:30000/", "http://[2001:db8::7]:30000"),
        ("http://[2001:db8:0:0::7]:30000@3", "http://[2001:db8::7]:30000"),
        ("http://[fe80::1%25eth0]:1", "http://[fe80::1%25eth0]:1"),
        ("https://W1.Example./", "https://w1.example:443"),
        ("http://w1/", "http://w1:80"),
        ("w1:30000", "http://w1:30000"),
    ],
)
def test_what_is_composed(text: str, url: str) -> None:
    assert WorkerAddress.parse(text).url == canonical(text) == url


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("2001:db8::7", "http://[2001:db8::7]:30000"),
        ("[2001:db8::7]", "http://[2001:db8::7]:30000"),
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:30000"),
        ("w1.example", "http://w1.example:30000"),
    ],
)
def test_a_host_and_a_port_make_an_address(address: str, url: str) -> None:
    assert WorkerAddress.of(address, 30000).url == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://",
        "http://:30000",
        "http://w1:http",
        "http://2001:db8::7:30000",
        "http://a b:1",
        "grpc://w1",
        "http://[::1",
        "http://./",
        "http://w1:70000",
    ],
)
def test_what_names_no_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        WorkerAddress.parse(text)
    canonical(text)  # and never an error of another kind


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:1",
        "http://127.0.0.1:1",
        "http://[::1]:1",
        "http://0.0.0.0:1",
        "http://[::]:1",
        "http://[::ffff:127.0.0.1]:1",
    ],
)
def test_this_machine_has_many_names(text: str) -> None:
    assert WorkerAddress.parse(text).same(WorkerAddress.parse("http://127.0.0.1:1")) is True
    assert WorkerAddress.parse(text).same(WorkerAddress.parse("http://127.0.0.2:1")) is False


def test_zones_tell_apart_only_where_both_are_named_in_one_way() -> None:
    plain, eth0, eth1, second = (
        WorkerAddress.parse(f"http://[fe80::1{zone}]:1") for zone in ("", "%25eth0", "%25eth1", "%252")
    )
    assert eth0.same(eth1) is False
    assert eth0.same(plain) is eth0.same(second) is True, "they may be one, and two links with one address are rare"


def test_names_are_resolved_and_failures_and_hanging_resolvers_leave_them_open() -> None:
    hang = threading.Event()
    asked: list[str] = []
    at = [0.0]

    def lookup(name: str) -> set[str]:
        asked.append(name)
        if name == "mute":
            hang.wait(60)
        if name == "unknown":
            raise OSError("no such name")
        return {"10.0.0.7", "2001:db8::7"}

    names = Names(lambda: at[0], lookup, seconds=0.3)
    addresses = [WorkerAddress.parse(f"http://{host}:1") for host in ("w1", "unknown", "mute", "10.0.0.7")]
    w1, unknown, mute, literal = names.resolve(addresses)
    assert w1.same(literal) is True and w1.same(WorkerAddress.parse("http://10.0.0.8:1")) is False
    assert unknown.same(literal) is mute.same(literal) is None
    names.resolve(addresses)
    assert asked.count("w1") == asked.count("unknown") == 1
    at[0] = 11.0
    names.resolve(addresses)
    assert asked.count("w1") == 1 and asked.count("unknown") == 2, "a failure is asked again sooner"
    hang.set()


def test_only_own_addresses_are_of_this_machine() -> None:
    assert of_this_machine("127.0.0.1") and not of_this_machine("192.0.2.1")


def test_nobody_listening_refuses_and_a_busy_worker_does_not() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert WorkerAddress.of("127.0.0.1", port).refuses(5.0)
        listening.listen()
        assert not WorkerAddress.of("127.0.0.1", port).refuses(5.0)
