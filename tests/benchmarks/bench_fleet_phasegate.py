"""phasegate's part of bench_fleet.py: one rolling deployment, or the way back, by the fleet code as phases use it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from phases.engines.ssh.bundle import Launch, make_bundle
from phases.engines.ssh.deploy import Ready, Windows, guarded_switch, push, switch_back
from phases.engines.ssh.fleet import Fleet
from phases.engines.ssh.host import Host, SshOptions
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.releases import NEVER, ReleaseStore, read_inventory
from phases.engines.ssh.services import ProcessDriver, waiting
from phases.engines.ssh.session import HostSession, op


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    hosts = [_host(plan, entry) for entry in plan["hosts"]]
    launch = Launch(("{python}", "-E", "-s", "-S", "{release}/server.py", "{port}"))
    bundle = make_bundle({"blob": Path(plan["payload"]), "server.py": Path(plan["server"])}, launch)
    driver = ProcessDriver(drain=5)

    def plain(session: HostSession) -> None:
        lock, ready = HostLock(session, "benchmark"), _ready(session)
        push(session, lock, bundle)
        steps = [ReleaseStore(session, lock).switching(bundle.digest), driver.restarting(session.host), waiting(driver, ready.port, ready.path, ready.timeout)]
        session.do(*steps, op("lock.release", token=lock.token))
        session.close()

    def guarded(session: HostSession) -> None:
        lock, ready = HostLock(session, "benchmark"), _ready(session)
        push(session, lock, bundle)
        if read_inventory(session).current == NEVER:
            steps = [ReleaseStore(session, lock).switching(bundle.digest), driver.restarting(session.host), waiting(driver, ready.port, ready.path, ready.timeout)]
            session.do(*steps, op("release.good", digest=bundle.digest, token=lock.token), op("lock.release", token=lock.token))
        else:
            lease = guarded_switch(session, lock, driver, bundle.digest, ready, Windows(60, 60))
            lease.session.do(op("lease.keep", lease_id=lease.id), op("lock.release", token=lock.token))
            lease.session.close()
        session.close()

    def back(session: HostSession) -> None:
        lock = HostLock(session, "benchmark")
        found = read_inventory(session)
        other = next(digest for digest in found.releases if digest != found.current)
        switch_back(session, lock, driver, _ready(session), target=other)
        session.close()

    started = time.perf_counter()
    limit = len(hosts) if plan["action"] == "back" else plan["at_once"]  # going back sends nothing: all at once
    with Fleet(hosts, limit=limit) as fleet:
        fleet.each({"plain": plain, "guarded": guarded, "back": back}[plan["action"]], deadline=300).check()
    print(f"{plan['action']}: {len(hosts)} hosts in {time.perf_counter() - started:.2f} s without start-up")


def _ready(session: HostSession) -> Ready:
    return Ready(int(session.host.values["port"]), timeout=30)


def _host(plan: dict, entry: dict) -> Host:
    ssh = SshOptions("root", entry["ssh_port"], (Path(plan["key"]),), (Path(plan["known_hosts"]),), agent=False, config_file=Path("/dev/null"))
    return Host(entry["name"], "127.0.0.1", entry["root"], plan["python"], ssh=ssh, values={"port": str(entry["port"])})


if __name__ == "__main__":
    main()
