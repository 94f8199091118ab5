"""When a lease counts as lost. The thread's own clock is not waited for: renewals are asked for one by one."""

from __future__ import annotations

from pathlib import Path

from phases.engines.ssh.host import Host, SshOptions
from phases.production.renewer import Renewer, Turns
from tests.engines.ssh.sshfleet import PYTHON, free_port


def test_one_missed_renewal_is_no_loss_but_what_the_host_says_is(tmp_path: Path) -> None:
    hosts = [
        Host("here", "local", str(tmp_path / "here"), python=PYTHON),  # answers, and has no such lease
        Host(
            "gone",
            "127.0.0.1",
            str(tmp_path / "gone"),
            ssh=SshOptions(port=free_port(), agent=False, config_file=Path("/dev/null")),
        ),  # nobody listens there
    ]
    renewer = Renewer(hosts, window=3600.0, turns=Turns(1, 60.0))
    try:
        for name in ("here", "gone"):
            renewer.add(name, "a-lease")
        renewer.renew({"here": "a-lease", "gone": "a-lease"}, deadline=120.0)
        assert list(renewer.lost()) == ["here"] and "no lease a-lease" in renewer.lost()["here"]
        renewer.renew({"gone": "a-lease"}, deadline=120.0)
        assert set(renewer.lost()) == {"here", "gone"}
        renewer.drop("gone")
        renewer.add("gone", "the-next-lease")
        renewer.renew({"gone": "a-lease"}, deadline=120.0)  # an answer that was on its way when the lease ended
        renewer.renew({"gone": "the-next-lease"}, deadline=120.0)
        assert set(renewer.lost()) == {"here"}
    finally:
        renewer.stop()


def test_hosts_left_alone_restart_in_groups() -> None:
    assert [Turns(at_once=2, apart=90.0).of(position) for position in range(5)] == [0.0, 0.0, 90.0, 90.0, 180.0]
