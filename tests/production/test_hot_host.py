"""The hot fallback on a host: the byte, who may set it, acknowledgements, the guard's use of it, and what a restart makes of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phases.base.errors import FleetError
from phases.engines.ssh.bundle import Bundle, Launch, make_bundle
from phases.engines.ssh.deploy import first_release, push
from phases.engines.ssh.host import Host
from phases.engines.ssh.lease import Lease, read_lease
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.releases import ReleaseStore
from phases.engines.ssh.services import ProcessDriver, restart
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.transport import connect
from tests.engines.ssh.conftest import ready_of
from tests.engines.ssh.sshfleet import end_processes_of, free_port
from tests.engines.ssh.worker import LONG, eventually

HERE = Path(__file__).parent
pytestmark = pytest.mark.fleet


def bundle(name: str, **environment: str) -> Bundle:
    launch = Launch(
        (sys.executable, str(HERE / "hot_ranks.py"), "{port}", "2"), {"PYTHONUNBUFFERED": "1", **environment}
    )
    return make_bundle({"site/name": name.encode()}, launch, {"kernel": "test"})


class Place:
    """A worker of two ranks on an old release, with a newer one pushed, and this run's lock."""

    def __init__(self, root: Path, **environment: str) -> None:
        self.host = Host("here", "local", str(root), python=sys.executable, values={"port": str(free_port())})
        self.session, self.driver = HostSession(connect(self.host)), ProcessDriver(drain=1)
        self.lock = HostLock(self.session, "test")
        self.old, self.new = bundle("old"), bundle("new", **environment)
        for made in (self.old, self.new):
            push(self.session, self.lock, made)
        first_release(self.session, self.lock, self.driver, self.old.digest, ready_of(self.host))
        self.lease = Lease(self.session, self.lock.token)
        self.ready()

    def move(self) -> None:
        """To the newer release, as a kept one would be: no lease."""
        self.session.do(
            ReleaseStore(self.session, self.lock).switching(self.new.digest), self.driver.restarting(self.host)
        )
        self.ready()

    def move_under_lease(self) -> None:
        self.lease.arm(
            self.new.digest,
            self.old.digest,
            LONG,
            self.driver.restart_argv(self.host),
            self.driver.stop_argv(self.host),
        )
        self.session.do(
            ReleaseStore(self.session, self.lock).switching(self.new.digest, lease=self.lease.id),
            self.driver.restarting(self.host),
        )
        self.ready()

    def ready(self) -> None:
        """Both ranks of the service that runs now report."""
        eventually(lambda: [r["release"] for r in self.shown()["ranks"]] == [self.running()] * 2)

    def running(self) -> str:
        return json.loads((self.root / "run/service.json").read_text())["release"]

    def hot(self, to: str, wait: float = 60.0, **arguments: object) -> dict:
        return self.session.do(op("control.switch", to=to, wait=wait, ranks=2, **arguments))[0]

    def shown(self) -> dict:
        return self.session.do(op("control.show"))[0]

    @property
    def root(self) -> Path:
        return Path(self.host.root)

    @property
    def byte(self) -> bytes:
        return (self.root / "control").read_bytes()

    def events(self) -> list[dict]:
        return [json.loads(line) for line in (self.root / "audit.log").read_text().splitlines()]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "worker")
    yield made
    made.session.close()
    end_processes_of(tmp_path / "worker")


def test_every_rank_acknowledges_whether_or_not_it_has_work(place):
    place.move()
    assert place.byte == b"c"
    idle = place.hot("incumbent")
    assert idle["affected"] and not idle["missing"] and [r["choice"] for r in idle["ranks"]] == ["incumbent"] * 2
    assert all(r["confirmed"] is None and r["from_forward"] == 1 for r in idle["ranks"])
    place.session.do(op("control.switch", to="candidate", wait=60, ranks=2, token=place.lock.token))
    (place.root / "busy").touch()
    eventually(lambda: all(r["confirmed"] for r in place.shown()["ranks"]))
    busy = place.hot("incumbent")
    assert not busy["missing"] and all(r["from_forward"] > 1 for r in busy["ranks"])
    eventually(lambda: all(r["confirmed"] and r["confirmed"] >= r["from_forward"] for r in place.shown()["ranks"]))
    assert [e["to"] for e in place.events() if e["event"] == "control"] == ["incumbent", "candidate", "incumbent"]


def test_a_host_on_what_a_rollback_goes_to_is_left_alone(place):
    assert not place.hot("incumbent")["affected"] and place.byte == b"c"
    assert place.hot("incumbent", goal=place.new.digest)["affected"] and place.byte == b"i"  # another target: now it is


def test_forwards_needs_the_lock_and_back_does_not(place):
    place.move()
    stranger = HostSession(connect(place.host))
    with pytest.raises(FleetError):
        stranger.do(op("control.switch", to="candidate", wait=0.1, token="not mine"))
    assert not stranger.do(op("control.switch", to="incumbent", wait=60, ranks=2))[0]["missing"]
    with pytest.raises(FleetError, match="neither candidate nor incumbent"):
        stranger.do(op("control.switch", to="fastest", wait=0.1))
    stranger.close()


def test_a_dead_or_silent_rank_is_named(place):
    place.move()
    victim = json.loads((place.root / "facts/rank-1.json").read_text())["pid"]
    os.kill(victim, signal.SIGSTOP)
    try:
        found = place.hot("incumbent", wait=6)  # so long that the other answers, on a busy machine too
        assert found["missing"] == "rank 1 still says candidate" and place.byte == b"i"
        (place.root / "facts/rank-1.json").touch()
        os.utime(place.root / "facts/rank-1.json", (1, 1))  # as if it had been silent for long
        eventually(lambda: place.hot("incumbent", wait=0.1)["missing"] == "1 of 2 ranks report")
    finally:
        os.kill(victim, signal.SIGCONT)
    assert not place.hot("incumbent")["missing"]


def test_a_server_that_cannot_be_switched_says_why_at_once(tmp_path):
    made = Place(tmp_path / "worker", HOT_REASON="VERIFY_ATTN_HOT is off")
    try:
        made.move()
        found = made.hot("incumbent", wait=60)
        assert found["missing"] == "VERIFY_ATTN_HOT is off" and found["seconds"] == 0 and made.byte == b"c"
    finally:
        made.session.close()
        end_processes_of(tmp_path / "worker")


def test_the_byte_stays_with_its_release(place):
    place.move()
    place.hot("incumbent")
    restart(place.driver, place.session)  # as after a crash
    place.ready()
    assert place.byte == b"i" and place.shown()["ranks"][0]["choice"] == "incumbent"
    (place.root / "control").unlink()  # lost: known to work is what comes back
    restart(place.driver, place.session)
    assert place.byte == b"i"
    place.session.do(
        ReleaseStore(place.session, place.lock).switching(place.old.digest), place.driver.restarting(place.host)
    )
    assert place.byte == b"c"  # another release
    place.move()
    assert place.byte == b"c"  # switched to anew by the toolkit: judged anew


def test_a_record_that_cannot_be_used_keeps_no_service_from_starting(place):
    place.move()
    place.hot("incumbent")
    (place.root / "run/control.json").unlink()
    (place.root / "run/control.json").mkdir()  # as good as a disk that takes nothing
    restart(place.driver, place.session)
    place.ready()
    assert place.byte == b"i"


def test_the_guard_falls_back_before_it_reverts(place):
    place.move_under_lease()
    record = json.loads((place.root / "lease.json").read_text())
    (place.root / "lease.json").write_text(json.dumps({**record, "deadline": 0.0}))  # as if nobody had renewed it
    eventually(lambda: read_lease(place.session).state == "reverted")
    claimed = next(e for e in place.events() if e["event"] == "lease_reverting")
    assert claimed["control"] == "incumbent"  # by the time it is written down that the lease ran out
    place.ready()
    assert place.running() == place.old.digest and place.byte == b"c"  # the previous release serves with its own kernel


def test_a_revert_does_not_touch_the_kernel_of_a_release_that_was_never_left(place):
    place.lease.arm(
        place.new.digest,
        place.old.digest,
        LONG,
        place.driver.restart_argv(place.host),
        place.driver.stop_argv(place.host),
    )
    place.lease.cancel("changed our mind before the switch")
    assert place.byte == b"c" and place.running() == place.old.digest


def test_a_release_that_fell_back_and_comes_back_by_a_revert_stays_fallen_back(place):
    place.hot("incumbent", goal=place.new.digest)
    place.move_under_lease()
    assert place.byte == b"c"
    place.lease.cancel("regressed")
    place.ready()
    assert place.running() == place.old.digest and place.byte == b"i"


def test_a_rank_that_trips_takes_the_host_with_it(place):
    place.move()
    (place.root / "busy").touch()
    (place.root / "trip-1").touch()
    eventually(lambda: [r["choice"] for r in place.shown()["ranks"]] == ["incumbent"] * 2)
    assert place.byte == b"i" and "layer 1 differs" in place.shown()["ranks"][1]["tripped"]


def test_by_hand_on_the_host(place):
    place.move()
    import subprocess

    script = next((place.root / "bin").glob("*/control.py"))
    done = subprocess.run(
        [sys.executable, str(script), "incumbent", str(place.root)], capture_output=True, text=True, check=True
    )
    assert [r["choice"] for r in json.loads(done.stdout)["ranks"]] == ["incumbent"] * 2
    assert (
        subprocess.run(
            [sys.executable, str(script), "nonsense", str(place.root)], capture_output=True, check=False
        ).returncode
        == 2
    )
