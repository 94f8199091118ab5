"""From one release to another and back, as the phases do it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from phases.engines.ssh.deploy import Windows, guarded_switch, push, switch_back
from phases.engines.ssh.errors import LeaseError, ServiceError, SilentHostError
from phases.engines.ssh.host import Host
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.releases import ReleaseStore
from phases.engines.ssh.services import ProcessDriver
from tests.engines.ssh.conftest import ready_of, service_bundle
from tests.engines.ssh.worker import LONG, Worker, eventually


@pytest.fixture
def worker(local: Host, driver: ProcessDriver) -> Iterator[Worker]:
    made = Worker(local, driver)
    yield made
    made.session.close()


def test_guarded_switch_and_back(worker: Worker) -> None:
    ready = ready_of(worker.host)
    lease = guarded_switch(worker.session, worker.lock, worker.driver, worker.new.digest, ready, Windows(300, 300))
    assert worker.served() == worker.new.digest
    lock = HostLock(lease.session, "test", token=worker.lock.token)
    assert switch_back(lease.session, lock, worker.driver, ready) == worker.old.digest
    assert worker.served() == worker.old.digest
    assert switch_back(lease.session, lock, worker.driver, ready) == worker.old.digest, "again: nothing to do"
    lease.session.close()


@pytest.mark.parametrize(
    "fault, message",
    [({"crash": True}, "ended at once|while it was waited for"), ({"sick": True}, "did not answer 200")],
)
def test_a_release_that_does_not_come_up_goes_back_at_once_with_its_log(
    worker: Worker, fault: dict[str, object], message: str
) -> None:
    """Field failure: activation fails at once but the tool waits for the whole timeout; failing hosts show no logs."""
    bad = service_bundle(**fault)
    push(worker.session, worker.lock, bad)
    with pytest.raises(ServiceError, match=message) as caught:
        guarded_switch(
            worker.session, worker.lock, worker.driver, bad.digest, ready_of(worker.host, 5), Windows(LONG, LONG)
        )
    assert f"back on {worker.old.digest[:12]}" in caught.value.hint
    if "crash" in fault:
        assert "no kernel image is available" in str(caught.value)
    eventually(lambda: worker.served() == worker.old.digest)


def test_a_window_shorter_than_a_start_may_take_is_refused(worker: Worker) -> None:
    with pytest.raises(LeaseError, match="would run out before"):
        guarded_switch(
            worker.session, worker.lock, worker.driver, worker.new.digest, ready_of(worker.host, 30), Windows(20, 60)
        )


def test_hanging_up_in_the_middle_of_a_restart_does_not_leave_the_service_down(worker: Worker) -> None:
    """The batch is on the host: it runs to its end whatever becomes of the connection."""
    slow = service_bundle(drain=1.5)
    store = ReleaseStore(worker.session, worker.lock)
    push(worker.session, worker.lock, slow)
    store.switch(slow.digest)
    worker.session.do(worker.driver.restarting(worker.host))
    eventually(lambda: worker.served() == slow.digest)
    with pytest.raises(SilentHostError):
        worker.session.do(store.switching(worker.new.digest), worker.driver.restarting(worker.host), timeout=0.3)
    eventually(lambda: worker.served() == worker.new.digest)
