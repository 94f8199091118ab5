"""One owner of capacity: leaves are given by what serves at that moment, never under the floor, and every way out of service asks for one."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from phases.base.clock import SystemClock
from phases.engines.ssh.host import Host
from phases.engines.ssh.placing import Routed, RoutedWorker, Unplaced
from phases.engines.ssh.settings import FleetSettings, HostSettings
from phases.fleet.shared_steps import batches_under_floor
from phases.production.capacity import Capacity, CapacityError
from phases.production.production import Production
from phases.production.service import Service
from phases.production.settings import Amount, LivenessSettings, ProductionSettings
from phases.serving.settings import SideSettings
from tests.engines.ssh.test_router import FakeWorker
from tests.production.test_hot_fleet import Router

HOSTS = [Host(f"w{n}", "local", f"/srv/w{n}") for n in range(6)]


class World:
    """Who is in the router, and who answers."""

    def __init__(self, serving: int, floor: int) -> None:
        self.routed = {host.name for host in HOSTS[:serving]}
        self.answering = set(self.routed)
        self.unplaced: tuple[Unplaced, ...] = ()
        self.silent = ""
        self.hanging: set[str] = set()
        self.below_floor = False
        self.capacity = Capacity(floor, self.look, lambda: self.below_floor)

    def look(self, needed: bool) -> Service:
        entries = {host.name: (RoutedWorker("u", True),) for host in HOSTS if host.name in self.routed}
        routed = Routed(silent=self.silent) if self.silent else Routed(entries, self.unplaced)
        return Service(routed, frozenset(self.answering), frozenset(self.hanging))

    def granted(self, *numbers: int, certain: bool = True) -> list[int]:
        hosts = self.capacity.grant([HOSTS[n] for n in numbers], certain=certain)
        return [HOSTS.index(host) for host in hosts]


def test_as_many_leave_as_the_floor_allows_and_leaves_add_up() -> None:
    world = World(serving=4, floor=2)
    assert world.granted(0, 1, 2, 3) == [0, 1]
    assert world.granted(2, 3) == [], "the router still lists those that have leave, and they do not count"
    world.capacity.require(HOSTS[0])
    with pytest.raises(CapacityError, match="w2 still serves, and 2 workers must"):
        world.capacity.require(HOSTS[2])
    world.capacity.back(HOSTS[0])
    assert world.granted(2, 3) == [2]


def test_what_serves_nobody_is_free_and_what_did_not_come_back_takes_room() -> None:
    world = World(serving=4, floor=2)
    assert world.granted(4, 5, 0, 1, 2) == [4, 5, 0, 1]
    world.capacity.back(HOSTS[1])
    world.answering -= {"w0"}  # it failed, and another one died meanwhile
    world.routed -= {"w3"}
    assert world.granted(1, 2) == [], "two are left, and two must serve"


def test_who_hangs_is_no_capacity_for_others_and_goes_first_but_is_not_free() -> None:
    world = World(serving=4, floor=2)
    world.hanging = {"w2", "w3"}
    assert world.granted(0) == [] and world.granted(0, 1) == []
    assert world.granted(0, 1, 2, 3) == [2, 3], "those that serve go on serving"
    world = World(serving=4, floor=2)
    world.hanging = {"w0", "w1", "w2", "w3"}
    assert world.granted(0, 1, 2, 3) == [0, 1], "a fleet whose queues are full is not restarted at once"


def test_a_rollback_counts_those_that_may_serve_and_stops_at_the_floor_too() -> None:
    world = World(serving=3, floor=2)
    world.silent = "the router does not answer."
    assert world.granted(0, 1, 2, certain=False) == [0] and world.granted(1, 2, certain=False) == []
    world.below_floor = True
    assert world.granted(1, 2, certain=False) == [1], "one at a time, because a person said so"
    world = World(serving=3, floor=2)
    world.routed -= {"w0"}
    world.unplaced = (Unplaced(RoutedWorker("http://x:1", True), "x cannot be resolved here", frozenset({"w0"})),)
    assert world.granted(0, 1, certain=False) == [0] and world.granted(1, 2, certain=False) == []


@pytest.mark.parametrize("seed", range(50))
def test_never_fewer_than_the_floor_serve_whatever_fails_and_whoever_asks_at_once(seed: int) -> None:
    rng = random.Random(seed)
    floor, count = rng.randint(0, 3), 6
    world = World(serving=count, floor=floor)

    def move(host: Host) -> None:
        try:
            world.capacity.require(host, certain=certain)
        except CapacityError:
            return
        world.routed.discard(host.name)
        serving.append(len(world.routed & world.answering))
        if chance[host.name] < 0.5:  # else it does not come back
            world.routed.add(host.name)
            world.capacity.back(host)

    for _ in range(5):
        chance, certain, serving = {host.name: rng.random() for host in HOSTS}, rng.random() < 0.5, [count]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(move, HOSTS))
        assert min(serving) >= floor


ROOT = Path(__file__).parents[2] / "phases"
# What takes a worker out of service, drains or restarts it; and what asks the capacity for leave.
ENDS = {"drain", "guarded_switch", "switch_back", "first_release", "restarting", "_empty"}
ASKS = {"take_out", "require", "grant"}
# Whoever is called by them alone, or acts where nothing serves.
EXEMPT = {
    ("production/production.py", "_empty"): "the end of take_out and go_back, which have asked",
    ("engines/embedded/fleet.py", "_start_worker"): "starts what was just seen not to serve",
}


def calls(function: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name == "remove" and isinstance(called, ast.Attribute) and "router" in ast.unparse(called.value):
                name = "drain"
            yield node.lineno, name


def test_every_way_out_of_service_asks_first() -> None:
    """The engines' own rooms say how a worker is moved; whoever makes it move, above them, asks before."""
    seen = set()
    for path in sorted(ROOT.rglob("*.py")):
        where = str(path.relative_to(ROOT))
        if where.startswith(("engines/ssh/", "ledger/")):
            continue
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            found = sorted(calls(function))
            ends = [line for line, name in found if name in ENDS]
            asks = [line for line, name in found if name in ASKS]
            if ends:
                seen.add((where, function.name))
            if ends and (where, function.name) not in EXEMPT:
                assert asks and min(asks) < min(ends), f"{where}: {function.name} takes a worker out and asks nobody"
    assert EXEMPT.keys() <= seen and len(seen) >= 6, seen


def test_a_worker_that_is_healthy_and_answers_nothing_is_no_capacity() -> None:
    """Field failure: /health says well, nothing is answered; counted as serving, it let the last good ones be restarted."""
    workers = [FakeWorker() for _ in range(3)]
    try:
        hosts = tuple(
            HostSettings(f"w{n}", "local", f"/srv/w{n}", worker.server.server_port) for n, worker in enumerate(workers)
        )
        settings = ProductionSettings(
            incumbent=SideSettings("x"), min_available=Amount(count=2), liveness=LivenessSettings(within=1.0)
        )
        router = Router([worker.url for worker in workers])
        with Production(settings, FleetSettings(hosts), router, "x", "test", SystemClock(), print) as production:
            workers[1].held.clear()
            assert production.service().serving == {"w0", "w1", "w2"}, "each answers /health"
            with pytest.raises(CapacityError, match="w0 still serves"):
                production.take_out(production.workers[0], 1.0)
            assert workers[0].url in router.urls
            assert [host.name for host in production.capacity.grant(production.workers)] == ["w1"]
            workers[1].held.set()
            production.capacity.back(production.workers[1])
            assert [host.name for host in production.capacity.grant(production.workers)] == ["w0"]
    finally:
        for worker in workers:
            worker.close()


def test_batches_are_chosen_one_by_one_by_what_has_come_back() -> None:
    world = World(serving=4, floor=2)
    production = SimpleNamespace(capacity=world.capacity)
    batches = batches_under_floor(production, HOSTS[:4])  # type: ignore[arg-type]
    assert next(batches) == (HOSTS[0], HOSTS[1])
    world.routed -= {"w0"}  # failed, and stays out
    world.capacity.back(HOSTS[1])
    assert next(batches) == (HOSTS[2],), "one has not come back, so one may go"
    with pytest.raises(CapacityError, match="w3 cannot be taken out: 2 workers must serve"):
        next(batches)
