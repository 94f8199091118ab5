"""The ssh transport against real sshd, and the local one where it must behave alike."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from phases.engines.ssh.errors import CommandError, HostKeyError, LoginError, SilentHostError, UnreachableError
from phases.engines.ssh.host import Host, SshOptions, Timeouts
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.session import HostSession
from phases.engines.ssh.stream import Transport, as_user, run
from phases.engines.ssh.transport import connect
from tests.engines.ssh.sshfleet import SshFleet, free_port

SHORT = Timeouts(connect=8, channel=8, command=8, keepalive=1)
MUTE = Timeouts(connect=2, channel=2, command=2)  # for who never answers: nothing has to come in time


@pytest.fixture(params=["local", "ssh"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    name = "remote" if request.param == "ssh" else "local"
    if request.param == "ssh":
        request.getfixturevalue("sshd")
    made = connect(request.getfixturevalue(name))
    yield made
    made.close()


def test_arguments_arrive_as_they_were_given(transport: Transport) -> None:
    argv = ["printf", "%s|", "a b", "$HOME", "it's", "`id`", "*", "", "new\nline", 'quote"d', "–ü"]
    done = run(transport, argv)
    assert done.out == "|".join(argv[2:]) + "|" and done.code == 0


def test_status_and_both_outputs_come_back(transport: Transport) -> None:
    done = run(transport, ["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (done.code, done.out, done.err) == (7, "out\n", "err\n")
    with pytest.raises(CommandError, match="status 7: err"):
        done.check()


def test_megabytes_pass_both_ways_and_a_flood_of_errors_does_not_block(transport: Transport) -> None:
    data = os.urandom(3_000_000).hex().encode()
    done = run(transport, ["sh", "-c", "head -c 5000000 /dev/zero >&2; cat | wc -c"], stdin=data)
    assert int(done.out) == len(data)


def test_a_command_that_hangs_is_given_up(transport: Transport) -> None:
    with pytest.raises(SilentHostError, match="did not answer within"):
        run(transport, ["sleep", "60"], timeout=0.5)


def test_a_connection_is_reused_and_made_again_after_a_break(sshd: SshFleet, remote: Host) -> None:
    transport = connect(remote)
    show = ["sh", "-c", "echo $SSH_CONNECTION"]
    first = run(transport, show).out
    assert run(transport, show).out == first
    transport.close()
    assert run(transport, show).out != first
    transport.close()


def test_an_unknown_host_key_is_refused_and_the_cure_named(remote: Host, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.touch()
    host = dataclasses.replace(remote, ssh=dataclasses.replace(remote.ssh, known_hosts=(empty,)))
    with pytest.raises(
        HostKeyError, match=rf"on {remote.name}: no host key is known for .*{remote.ssh.port}.*ssh-keyscan"
    ):
        run(connect(host), ["true"])
    assert empty.read_text() == "", "a refused key must not be remembered"


def test_a_changed_host_key_is_refused(sshd: SshFleet) -> None:
    victim = sshd.hosts[3]
    old = victim.host_key
    sshd.new_host_key(victim)
    sshd.restart(victim)
    try:
        with pytest.raises(HostKeyError, match="another host key than the known one .*ssh-keygen -R"):
            run(connect(sshd.host(3)), ["true"])
    finally:
        victim.host_key = old
        sshd.restart(victim)
    assert run(connect(sshd.host(3)), ["echo", "ok"]).out == "ok\n"


def test_a_refused_login_names_the_cure(remote: Host, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    host = dataclasses.replace(remote, ssh=dataclasses.replace(remote.ssh, key_files=(other,)))
    before = set(threading.enumerate())
    with pytest.raises(LoginError, match="refuses the login.*key_files"):
        run(connect(host), ["true"])
    left = [
        thread for thread in threading.enumerate() if isinstance(thread, paramiko.Transport) and thread not in before
    ]
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left), "a refused connection is closed"


def test_nobody_listening_and_no_such_name(remote: Host) -> None:
    host = dataclasses.replace(remote, address="127.0.0.1", ssh=dataclasses.replace(remote.ssh, port=free_port()))
    with pytest.raises(UnreachableError, match="cannot connect.*sshd"):
        run(connect(host), ["true"])
    with pytest.raises(UnreachableError, match="cannot be resolved.*address"):
        run(connect(dataclasses.replace(remote, address="no-such-host.invalid")), ["true"])


def test_a_server_that_accepts_and_says_nothing(remote: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ssh = dataclasses.replace(remote.ssh, port=server.getsockname()[1])
        host = dataclasses.replace(remote, address="127.0.0.1", ssh=ssh, timeouts=MUTE)
        with pytest.raises(SilentHostError, match="connecting to"):
            run(connect(host), ["true"])


def test_a_server_that_stops_in_the_key_exchange(remote: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            peer, _ = server.accept()
            peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            held.append(peer)

        held: list[socket.socket] = []
        threading.Thread(target=greet, daemon=True).start()
        ssh = dataclasses.replace(remote.ssh, port=server.getsockname()[1])
        host = dataclasses.replace(remote, address="127.0.0.1", ssh=ssh, timeouts=MUTE)
        with pytest.raises(UnreachableError, match=r"on h00"):
            run(connect(host), ["true"])


def test_a_stopped_sshd_does_not_hold_a_command_a_new_channel_or_an_upload(sshd: SshFleet) -> None:
    """Field failure: the host dies between commands, and the next one hangs for an hour (open_session without a limit)."""
    host = sshd.host(2, timeouts=SHORT)
    transport, uploading = connect(host), connect(host)
    assert run(transport, ["echo", "ok"]).out == "ok\n"
    stream = uploading.open(["cat"])
    sshd.hosts[2].signal(signal.SIGSTOP)
    try:
        with pytest.raises(SilentHostError):
            run(transport, ["true"])
        with pytest.raises(SilentHostError, match="on h02.*did not answer"):
            for _ in range(64):
                stream.write(bytes(1 << 20), 2)
    finally:
        sshd.hosts[2].signal(signal.SIGCONT)
    assert run(transport, ["echo", "again"]).out == "again\n"
    transport.close()


def test_a_cut_cable_ends_a_command_and_mending_it_is_enough(namespaced: SshFleet) -> None:
    host = namespaced.host(1, timeouts=SHORT)
    transport = connect(host)
    run(transport, ["true"])
    namespaced.hosts[1].cut()
    try:
        with pytest.raises(UnreachableError, match="on h01"):
            run(transport, ["true"])
    finally:
        namespaced.hosts[1].mend()
    assert run(transport, ["echo", "back"], timeout=30).out == "back\n"
    transport.close()


def test_lost_packets_only_slow_it_down(namespaced: SshFleet) -> None:
    transport = connect(namespaced.host(1, timeouts=Timeouts(connect=20, channel=20, command=30)))
    namespaced.hosts[1].drop(0.1)
    try:
        assert run(transport, ["wc", "-c"], stdin=bytes(300_000)).out.strip() == "300000"
    finally:
        namespaced.hosts[1].undrop()
        transport.close()


def test_through_a_bastion_whose_key_is_checked_too(sshd: SshFleet, remote: Host, tmp_path: Path) -> None:
    bastion = sshd.hosts[1]
    ssh = dataclasses.replace(remote.ssh, gateway=f"{remote.ssh.user}@{bastion.address}:{bastion.port}")
    transport = connect(dataclasses.replace(remote, ssh=ssh))
    came_from = run(transport, ["sh", "-c", "echo $SSH_CONNECTION"]).out.split()[0]
    transport.close()
    assert came_from
    only_target = tmp_path / "only_target"
    only_target.write_text(
        "".join(line for line in sshd.known_hosts.read_text().splitlines(True) if f":{remote.ssh.port} " in line)
    )
    distrusting = dataclasses.replace(remote, ssh=dataclasses.replace(ssh, known_hosts=(only_target,)))
    with pytest.raises(HostKeyError, match=f"no host key is known for .*{bastion.port}"):
        run(connect(distrusting), ["true"])


def test_keys_of_an_agent(sshd: SshFleet, remote: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        monkeypatch.setenv("HOME", str(tmp_path))
        add = ["sh", "-c", f"for i in 1 2 3 4 5 6 7 8 9; do ssh-add -q {sshd.key} && exit 0; sleep 0.2; done; exit 1"]
        subprocess.run(add, check=True)
        host = dataclasses.replace(remote, ssh=dataclasses.replace(remote.ssh, key_files=(), agent=True))
        transport = connect(host)
        assert run(transport, ["echo", "ok"]).out == "ok\n"
        transport.close()
    finally:
        agent.terminate()
        agent.wait()


def test_the_ssh_configuration_is_honoured(sshd: SshFleet, remote: Host, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host worker-alias\n  HostName {remote.address}\n  Port {remote.ssh.port}\n  User {remote.ssh.user}\n  IdentityFile {sshd.key}\n"
    )
    ssh = SshOptions(known_hosts=(sshd.known_hosts,), agent=False, config_file=config)
    transport = connect(dataclasses.replace(remote, address="worker-alias", ssh=ssh))
    assert run(transport, ["echo", "ok"]).out == "ok\n"
    transport.close()


def test_sudo_stands_in_front_and_never_asks(local: Host) -> None:
    assert as_user(dataclasses.replace(local, sudo="serving"), ["id"]) == ["sudo", "-n", "-u", "serving", "--", "id"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("sudo"), reason="needs root and sudo")
def test_sudo_for_real(sshd: SshFleet, remote: Host, tmp_path: Path) -> None:
    """Everything below the root belongs to the user the worker runs as, and a user that sudo does not know is explained."""
    root = tmp_path / "w"
    root.mkdir()
    shutil.chown(root, "nobody")
    mine = [
        parent for parent in tmp_path.parents if parent.stat().st_mode & 0o077 == 0
    ]  # a worker of xdist has one more
    for parent in [*mine, tmp_path]:
        parent.chmod(0o755)
    with HostSession(connect(dataclasses.replace(remote, root=str(root), sudo="nobody"))) as session:
        HostLock(session, "test").acquire()
        assert (root / "lock.json").owner() == "nobody"
    with pytest.raises(UnreachableError, match=r"on h00: .*sudo.*sudoers"):
        HostSession(connect(dataclasses.replace(remote, sudo="no-such-user"))).do({"op": "hello"})
