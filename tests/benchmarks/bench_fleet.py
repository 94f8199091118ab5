"""Rolling deployment to many hosts: phasegate beside Ansible and pyinfra, the same work at the same concurrency.

    python tests/benchmarks/bench_fleet.py --hosts 8 32 64 --at-once 16

Every host is a real sshd on a loopback port with a running small service. The work: upload 5 MB, verify its hash on the host,
switch a symlink atomically, restart the service, wait until it answers. `phasegate` does just that; `phasegate, guarded` also
takes the host's lock, arms a lease, confirms it over a new connection and keeps it. Ansible runs with pipelining, persistent
connections and no fact gathering. Both others come from PyPI into a temporary environment. Wall time is the whole command,
start-up included; CPU is that of the command's own processes, and
that of everything the hosts' sshd ran; memory the largest sum of proportional set sizes seen.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.engines.ssh.sshfleet import PYTHON, SshFleet, end_processes_of, free_port  # noqa: E402

PAYLOAD = 5 << 20
PACKAGES = ["ansible-core", "pyinfra"]

SERVER = """
import os, socket, sys
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen()
while True:
    peer, _ = listener.accept()
    with peer:
        peer.recv(4096)
        peer.sendall(b"HTTP/1.0 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
"""

# What the shell-based tools run on a host: stop the service by its pid file, start it again from `current`.
RESTART = """#!/bin/sh
cd "$1" || exit 1
[ -f pid ] && kill "$(cat pid)" 2>/dev/null && while kill -0 "$(cat pid)" 2>/dev/null; do sleep 0.02; done
PHASEGATE_ROOT="$1" setsid PYTHON -E -s -S current/server.py "$2" >service.log 2>&1 </dev/null &
echo $! >pid
"""


@dataclass(frozen=True)
class Measured:
    wall: float
    cpu: float  # of the command and what it started here
    hosts_cpu: float  # of all sshd and what they ran
    memory: float  # bytes


@dataclass(frozen=True)
class Place:
    """Where one simulated host keeps things, for each tool alike."""

    name: str
    ssh_port: int
    root: Path
    port: int


def measure(argv: list[str], log: Path, environment: dict[str, str], fleet: SshFleet) -> Measured:
    """Run a command to its end; RuntimeError with its last lines when it fails."""
    before, hosts_before = resource.getrusage(resource.RUSAGE_CHILDREN), _hosts_cpu(fleet)
    started = time.perf_counter()
    peak, stop = [0.0], threading.Event()
    with open(log, "wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
        sampler = threading.Thread(target=_sample, args=(process.pid, peak, stop))
        sampler.start()
        code = process.wait()
    wall = time.perf_counter() - started
    stop.set()
    sampler.join()
    if code != 0:
        raise RuntimeError(f"{argv[0]} ended with status {code}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Measured(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, _hosts_cpu(fleet) - hosts_before, peak[0])


def _hosts_cpu(fleet: SshFleet) -> float:
    """Seconds of processor time of the sshd, their sessions still open, and all that has ended below them."""
    ticks = 0
    for host in fleet.hosts:
        assert host.process
        for pid in _tree(host.process.pid):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _sample(pid: int, peak: list[float], stop: threading.Event) -> None:
    while not stop.wait(0.5):
        peak[0] = max(peak[0], sum(_pss(child) for child in _tree(pid)))


def _tree(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        try:
            todo += [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
        except OSError:
            continue
    return found


def _pss(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return 0.0


class Bench:
    """The simulated hosts, and one deployment by each tool."""

    def __init__(self, work: Path, count: int, at_once: int, tools: Path | None) -> None:
        self.work, self.at_once, self.tools = work, at_once, tools
        self.fleet = SshFleet(work / "fleet", count)
        self.places = [Place(host.name, host.port, host.root, free_port()) for host in self.fleet.hosts]
        (work / "server.py").write_text(SERVER)
        (work / "restart.sh").write_text(RESTART.replace("PYTHON", PYTHON))
        (work / "home").mkdir()
        self.environment = {**os.environ, "HOME": str(work / "home"), "PYTHONPATH": str(HERE.parents[1])}

    def payload(self) -> Path:
        """A fresh 5 MB file: nothing of an earlier run can be reused."""
        path = self.work / f"payload-{secrets.token_hex(4)}"
        path.write_bytes(secrets.token_bytes(PAYLOAD))
        return path

    def clear(self) -> None:
        """End the services of the previous tool and empty the hosts."""
        for place in self.places:
            end_processes_of(place.root)
            shutil.rmtree(place.root, ignore_errors=True)
            place.root.mkdir(parents=True)

    def begin(self) -> None:
        """An older release and its running service on every host, as the shell-based tools keep them."""
        self.clear()
        for place in self.places:
            old = place.root / "releases/old"
            old.mkdir(parents=True)
            shutil.copy(self.work / "server.py", old)
            shutil.copy(self.work / "restart.sh", place.root)
            (place.root / "current").symlink_to("releases/old")
            subprocess.run(["sh", str(place.root / "restart.sh"), str(place.root), str(place.port)], check=True)

    def phasegate(self, action: str) -> Measured:
        hosts = [{"name": p.name, "ssh_port": p.ssh_port, "root": str(p.root), "port": p.port} for p in self.places]
        plan = {
            "hosts": hosts, "key": str(self.fleet.key), "known_hosts": str(self.fleet.known_hosts), "python": PYTHON,
            "at_once": self.at_once, "payload": str(self.payload()), "server": str(self.work / "server.py"), "action": action,
        }  # fmt: skip
        (self.work / "plan.json").write_text(json.dumps(plan))
        argv = [sys.executable, str(HERE / "bench_fleet_phasegate.py"), str(self.work / "plan.json")]
        return measure(argv, self.work / "phasegate.log", self.environment, self.fleet)

    def ansible(self) -> Measured:
        assert self.tools
        payload = self.payload()
        (self.work / "inventory.ini").write_text("[fleet]\n" + "".join(
            f"{p.name} ansible_host=127.0.0.1 ansible_port={p.ssh_port} root={p.root} service_port={p.port}\n" for p in self.places
        ))  # fmt: skip
        (self.work / "deploy.yml").write_text(ANSIBLE)
        (self.work / "ansible.cfg").write_text(
            f"[defaults]\nforks={self.at_once}\ninventory={self.work}/inventory.ini\nhost_key_checking=True\ngathering=explicit\n"
            f"private_key_file={self.fleet.key}\ninterpreter_python={PYTHON}\nretry_files_enabled=False\n"
            f"[ssh_connection]\npipelining=True\nssh_args=-F /dev/null -o UserKnownHostsFile={self.fleet.known_hosts} "
            "-o ControlMaster=auto -o ControlPersist=60s -o IdentitiesOnly=yes\n"
        )
        facts = {"payload": str(payload), "digest": _sha256(payload), "release": payload.name, "server": str(self.work / "server.py"), "restart": str(self.work / "restart.sh")}
        argv = [str(self.tools / "bin/ansible-playbook"), str(self.work / "deploy.yml"), "-e", json.dumps(facts)]
        return measure(argv, self.work / "ansible.log", {**self.environment, "ANSIBLE_CONFIG": str(self.work / "ansible.cfg")}, self.fleet)

    def pyinfra(self) -> Measured:
        assert self.tools
        payload = self.payload()
        ssh = {"ssh_user": "root", "ssh_key": str(self.fleet.key), "ssh_strict_host_key_checking": "yes", "ssh_known_hosts_file": str(self.fleet.known_hosts)}
        hosts = [(p.name, {"ssh_hostname": "127.0.0.1", "ssh_port": p.ssh_port, "root": str(p.root), "service_port": p.port, **ssh}) for p in self.places]
        facts = {"payload": str(payload), "digest": _sha256(payload), "release": payload.name, "server": str(self.work / "server.py"), "restart": str(self.work / "restart.sh")}
        (self.work / "inventory.py").write_text(f"fleet = {hosts!r}\n")
        (self.work / "deploy.py").write_text(f"FACTS = {facts!r}\n" + PYINFRA)
        argv = [str(self.tools / "bin/pyinfra"), "-y", "--parallel", str(self.at_once), str(self.work / "inventory.py"), str(self.work / "deploy.py")]
        return measure(argv, self.work / "pyinfra.log", self.environment, self.fleet)

    def close(self) -> None:
        for place in self.places:
            end_processes_of(place.root)
        self.fleet.close()


ANSIBLE = """
- hosts: fleet
  gather_facts: false
  remote_user: root
  tasks:
    - file: {path: "{{ root }}/releases/{{ release }}", state: directory}
    - copy: {src: "{{ item.src }}", dest: "{{ root }}/{{ item.dest }}"}
      loop:
        - {src: "{{ payload }}", dest: "releases/{{ release }}/blob"}
        - {src: "{{ server }}", dest: "releases/{{ release }}/server.py"}
        - {src: "{{ restart }}", dest: "restart.sh"}
    - shell: echo "{{ digest }}  {{ root }}/releases/{{ release }}/blob" | sha256sum -c
    - shell: ln -sfn releases/{{ release }} {{ root }}/new && mv -T {{ root }}/new {{ root }}/current
    - command: sh {{ root }}/restart.sh {{ root }} {{ service_port }}
    - uri: {url: "http://127.0.0.1:{{ service_port }}/health"}
      register: answer
      until: answer.status == 200
      retries: 50
      delay: 1
"""

PYINFRA = """
from pyinfra import host
from pyinfra.operations import files, server

root, port, release = host.data.root, host.data.service_port, FACTS["release"]
files.directory(path=f"{root}/releases/{release}")
files.put(src=FACTS["payload"], dest=f"{root}/releases/{release}/blob")
files.put(src=FACTS["server"], dest=f"{root}/releases/{release}/server.py")
files.put(src=FACTS["restart"], dest=f"{root}/restart.sh")
server.shell(commands=[f"echo '{FACTS['digest']}  {root}/releases/{release}/blob' | sha256sum -c"])
server.shell(commands=[f"ln -sfn releases/{release} {root}/new && mv -T {root}/new {root}/current"])
server.shell(commands=[f"sh {root}/restart.sh {root} {port}"])
server.shell(commands=[f"curl --silent --fail --retry 50 --retry-delay 1 --retry-connrefused http://127.0.0.1:{port}/health"])
"""


def _sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def install_tools(work: Path) -> Path:
    """Ansible and pyinfra in an environment of their own."""
    place = work / "tools"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    subprocess.run([str(place / "bin/pip"), "install", "-q", "--disable-pip-version-check", *PACKAGES], check=True)
    shown = subprocess.run([str(place / "bin/pip"), "list", "--format=freeze"], check=True, capture_output=True, text=True).stdout
    print("against", ", ".join(line for line in shown.split() if line.split("==")[0] in PACKAGES))
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--at-once", type=int, default=16, help="hosts at the same time, for every tool")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each tool; the median is shown")
    parser.add_argument("--only", choices=["phasegate", "pyinfra", "Ansible"], nargs="+", default=["phasegate", "pyinfra", "Ansible"], help="leave other tools out")
    parser.add_argument("--tools", type=Path, help="environment that has the other tools already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as directory:
        work = Path(directory)
        tools = options.tools if options.tools or options.only == ["phasegate"] else install_tools(work)
        print(f"{os.cpu_count()} cores, {PAYLOAD >> 20} MB to each host, {options.at_once} hosts at once, median of {options.repeat}")
        print(f"{'hosts':>5}  {'tool':<26}{'wall s':>8}{'CPU s':>8}{'hosts CPU s':>13}{'MB':>7}   wall / phasegate")
        for count in options.hosts:
            (work / f"n{count}").mkdir()
            bench = Bench(work / f"n{count}", count, options.at_once, tools)
            try:
                report(bench, count, options.repeat, options.only)
            finally:
                bench.close()


def report(bench: Bench, count: int, repeat: int, only: list[str]) -> None:
    """Every tool in turn on the same hosts, and the switch back of all of them."""
    runs = {"phasegate": lambda: bench.phasegate("plain"), "phasegate, guarded": lambda: bench.phasegate("guarded")}
    runs |= {"pyinfra": bench.pyinfra, "Ansible": bench.ansible}
    runs = {name: act for name, act in runs.items() if name.partition(",")[0] in only}
    found: dict[str, list[Measured]] = {name: [] for name in [*runs, "phasegate, switch back"]}
    for _ in range(repeat):  # tool by tool within each round, so that a busy minute of this machine meets all of them
        for name, act in runs.items():
            if name.startswith("phasegate"):
                bench.clear()
                act()  # the release before, so that the measured one is an update of a running service
            else:
                bench.begin()
            found[name].append(act())
            if name == "phasegate, guarded":
                found["phasegate, switch back"].append(bench.phasegate("back"))
    base = statistics.median(one.wall for one in found["phasegate"]) if found.get("phasegate") else 0.0
    for name, measured in found.items():
        if measured:
            show(count, name, measured, base)


def show(count: int, name: str, found: list[Measured], base: float) -> None:
    wall, cpu, hosts, memory = (statistics.median(getattr(one, field) for one in found) for field in ("wall", "cpu", "hosts_cpu", "memory"))
    ratio = f"   {wall / base:.2f}" if base else ""
    print(f"{count:>5}  {name:<26}{wall:>8.2f}{cpu:>8.2f}{hosts:>13.2f}{memory / 1e6:>7.0f}{ratio}", flush=True)


if __name__ == "__main__":
    main()
