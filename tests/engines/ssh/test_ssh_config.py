"""ssh_config as `ssh` takes it: OpenSSH is asked, and where it is not installed the library reads what it can."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phases.base.errors import FleetError
from phases.engines.ssh import sshconfig
from phases.engines.ssh.errors import LoginError, SshConfigError, UnreachableError
from phases.engines.ssh.host import Host, SshOptions, Timeouts
from phases.engines.ssh.sshconfig import Jump, Login, login, parse_jump
from phases.engines.ssh.stream import run
from phases.engines.ssh.transport import connect
from tests.engines.ssh.sshfleet import SshFleet

needs_ssh = pytest.mark.skipif(not shutil.which("ssh"), reason="needs the OpenSSH client")


@pytest.fixture(params=["OpenSSH", "the library"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who reads the configuration."""
    if request.param == "the library":
        monkeypatch.setattr(sshconfig.shutil, "which", lambda name: None)
    elif not shutil.which("ssh"):
        pytest.skip("needs the OpenSSH client")
    return str(request.param)


@pytest.fixture
def configured(sshd: SshFleet, remote: Host, tmp_path: Path) -> Callable[..., Host]:
    """The first sshd as `worker`, and whatever else the text says ({port}, {address}, {key}, {user}, {bastion})."""

    def make(text: str, **ssh: object) -> Host:
        bastion = sshd.hosts[1]
        values = {"address": remote.address, "port": remote.ssh.port, "key": sshd.key, "user": remote.ssh.user}
        values |= {
            "bastion": f"{bastion.address}:{bastion.port}",
            "bastion_address": bastion.address,
            "bastion_port": bastion.port,
        }
        base = "\nHost worker\n  HostName {address}\n  Port {port}\n  User {user}\n"
        config = tmp_path / "config"
        config.write_text((text + base).format(**values))
        options = SshOptions(known_hosts=(sshd.known_hosts,), agent=False, config_file=config)
        return dataclasses.replace(remote, address="worker", ssh=dataclasses.replace(options, **ssh))

    return make


def came_from(host: Host) -> str:
    """Where the connection came from, as the host sees it."""
    transport = connect(host)
    try:
        return run(transport, ["sh", "-c", "echo $SSH_CONNECTION"]).out.split()[0]
    finally:
        transport.close()


# ---- what ssh takes, on real connections


def test_proxyjump_none_means_none(reader: str, configured: Callable[..., Host]) -> None:
    """It was a host called "none", and the message blamed another one."""
    host = configured("Host worker\n  ProxyJump none\n  IdentityFile {key}\nHost *\n  ProxyJump nowhere.invalid\n")
    assert came_from(host)


def test_proxycommand_none_means_none(reader: str, configured: Callable[..., Host]) -> None:
    assert came_from(
        configured("Host worker\n  ProxyCommand none\n  IdentityFile {key}\nHost *\n  ProxyCommand false\n")
    )


def test_jumping_as_the_configuration_says(reader: str, configured: Callable[..., Host], sshd: SshFleet) -> None:
    text = (
        "Host hop\n  HostName {bastion_address}\n  Port {bastion_port}\n  User {user}\n  ProxyJump none\n  IdentityFile {key}\n"
        "Host worker\n  ProxyJump {jump}\nHost *\n  IdentityFile {key}\n"
    )
    for jump in ("hop", "{user}@{bastion}", "{user}@{bastion},hop", "ssh://{user}@{bastion}"):
        host = configured(text.replace("{jump}", jump))
        transport = connect(host)
        assert run(transport, ["echo", "ok"]).out == "ok\n"
        assert len(transport._route.hops) == 1 + jump.count(",") + 1  # type: ignore[attr-defined]
        transport.close()


def test_a_hop_with_a_way_of_its_own_and_a_way_that_leads_back(configured: Callable[..., Host]) -> None:
    hop = "\n  HostName {bastion_address}\n  Port {bastion_port}\n  User {user}\n  IdentityFile {key}\n"
    text = f"Host one{hop}  ProxyJump none\nHost two{hop}  ProxyJump one\nHost worker\n  ProxyJump two\n  IdentityFile {{key}}\n"
    transport = connect(configured(text))
    assert run(transport, ["echo", "ok"]).out == "ok\n"
    assert [each.login.port for each in transport._route.hops].count(transport._route.hops[0].login.port) == 2  # type: ignore[attr-defined]
    transport.close()
    with pytest.raises(SshConfigError, match="jumps through"):
        came_from(configured(text.replace("ProxyJump none", "ProxyJump two")))


@needs_ssh
def test_a_proxy_command_is_a_shell_line_with_tokens(configured: Callable[..., Host], tmp_path: Path) -> None:
    program = tmp_path / "through it.py"
    program.write_text(
        "import os, socket, sys, threading\n"
        "peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def forth():\n"
        "    while data := os.read(0, 65536): peer.sendall(data)\n"
        "threading.Thread(target=forth, daemon=True).start()\n"
        "while data := peer.recv(65536): os.write(1, data)\n"
    )
    text = f'Host worker\n  IdentityFile {{key}}\n  ProxyCommand sh -c \'exec python3 "{program}" "$0" "$1"\' %h %p 2>/dev/null\n'
    transport = connect(configured(text))
    assert run(transport, ["wc", "-c"], stdin=bytes(400_000)).out.strip() == "400000"
    process = transport._route.hops[0].proxy._process  # type: ignore[attr-defined]
    transport.close()
    assert process.poll() is not None, "it ends with the connection"


@needs_ssh
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("echo this is a portal >&2; exit 3", "the ProxyCommand says: this is a portal"),
        ("no-such-program %h", "the ProxyCommand says: .*no-such-program"),
        ("exec sleep 30", "did not answer within"),
        ("echo HTTP/1.1 400 Bad Request; sleep 1", "is not ssh: it says 'HTTP/1.1 400"),
    ],
)
def test_a_proxy_command_that_fails_says_why(configured: Callable[..., Host], command: str, told: str) -> None:
    host = configured(f"Host worker\n  IdentityFile {{key}}\n  ProxyCommand sh -c '{command}'\n")
    with pytest.raises(UnreachableError, match=told):
        came_from(dataclasses.replace(host, timeouts=Timeouts(connect=4, channel=4, command=8)))


@needs_ssh
def test_match_exec_include_and_canonical_names(configured: Callable[..., Host], tmp_path: Path) -> None:
    (tmp_path / "more").write_text('Match exec "test %n = worker"\n  IdentityFile {key}\n')
    host = configured(f'Include {tmp_path}/mo*\nMatch exec "false"\n  Port 1\n')
    (tmp_path / "more").write_text(
        (tmp_path / "more").read_text().format(key=host.ssh.known_hosts[0].parent / "client-key")
    )
    assert came_from(host)


def test_an_identity_file_that_is_missing_or_useless_means_the_next_is_tried(
    reader: str, configured: Callable[..., Host], tmp_path: Path
) -> None:
    (tmp_path / "garbage").write_text("not a key\n")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(tmp_path / "locked")], check=True)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-m", "PEM", "-f", str(tmp_path / "stranger")], check=True
    )
    names = ["missing", "garbage", "empty", "folder", "locked", "locked.pub", "stranger"]
    lines = "".join(f"  IdentityFile {tmp_path}/{name}\n" for name in names)
    assert came_from(configured(f"Host worker\n{lines}  IdentityFile {{key}}\n"))
    with pytest.raises(LoginError) as refused:
        came_from(configured(f"Host worker\n{lines}"))
    told = str(refused.value)
    assert "locked: has a passphrase: add it to the agent" in told and "stranger: refused" in told
    assert "garbage: is no private key" in told and "folder: Is a directory" in told


def test_a_key_file_of_the_playbook_that_is_missing(
    reader: str, configured: Callable[..., Host], sshd: SshFleet, tmp_path: Path
) -> None:
    assert came_from(configured("", key_files=(tmp_path / "missing", sshd.key)))
    with pytest.raises(LoginError, match=f"{tmp_path}/missing: does not exist"):
        came_from(configured("Host worker\n  IdentityFile none\n", key_files=(tmp_path / "missing",)))


def test_no_key_at_all(configured: Callable[..., Host]) -> None:
    with pytest.raises(LoginError, match="there is no key to try"):
        came_from(configured("Host worker\n  IdentityFile none\n"))


@needs_ssh
def test_known_hosts_of_the_configuration_and_an_alias(
    configured: Callable[..., Host], sshd: SshFleet, tmp_path: Path
) -> None:
    file = tmp_path / "with a blank"
    key = sshd.hosts[0].host_key.with_suffix(".pub").read_text()
    file.write_text(f"the-alias {key}")
    text = f'Host worker\n  IdentityFile {{key}}\n  UserKnownHostsFile "{file}" {tmp_path}/other\n  HostKeyAlias the-alias\n'
    assert came_from(configured(text, known_hosts=()))
    with pytest.raises(FleetError, match="no host key is known for another-alias"):
        came_from(configured(text.replace("the-alias", "another-alias"), known_hosts=()))


@needs_ssh
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("Ciphers chacha20-poly1305@openssh.com", "Ciphers of the ssh configuration allows only chacha20"),
        ("MACs umac-64-etm@openssh.com", "MACs of the ssh configuration allows only umac"),
        (
            "KexAlgorithms sntrup761x25519-sha512@openssh.com",
            "KexAlgorithms of the ssh configuration allows only sntrup",
        ),
        ("Ciphers aes256-ctr", ""),
        ("KexAlgorithms curve25519-sha256", ""),
        ("KexAlgorithms ^diffie-hellman-group14-sha256", ""),
        ("MACs -hmac-sha1*", ""),
        ("HostKeyAlgorithms ssh-ed25519", ""),
    ],
)
def test_algorithms_that_the_configuration_chooses(configured: Callable[..., Host], line: str, told: str) -> None:
    host = configured(f"Host worker\n  IdentityFile {{key}}\n  {line}\n")
    if told:
        with pytest.raises(SshConfigError, match=told):
            came_from(host)
    else:
        assert came_from(host)


@needs_ssh
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("NoSuchOption yes\n", r"ssh itself refuses.*line 1: Bad configuration option.*ssh -G"),
        ("Host worker\n  Port ninety\n", r"ssh itself refuses.*line 2"),
        ("Host worker\n  ProxyUseFdpass yes\n  ProxyCommand nc %h %p\n", "ProxyUseFdpass"),
    ],
)
def test_a_configuration_that_ssh_refuses_is_told_in_its_words(
    configured: Callable[..., Host], text: str, told: str
) -> None:
    with pytest.raises(SshConfigError, match=told):
        came_from(configured(text))


def test_a_configuration_that_the_library_cannot_read_names_the_cure(
    monkeypatch: pytest.MonkeyPatch, configured: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sshconfig.shutil, "which", lambda name: None)
    with pytest.raises(SshConfigError, match=r"cannot be read without OpenSSH.*openssh-client"):
        came_from(configured("Match nonsense\n  User x\n"))
    assert came_from(configured("Include other\nHost worker\n  IdentityFile {key}\n"))
    assert "has Include" in caplog.text


@needs_ssh
def test_an_address_without_a_route_does_not_keep_the_next_from_being_tried(
    remote: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has an IPv6 address and this network has none: the library gave up there. The name service is a stand-in."""
    real = socket.getaddrinfo

    def two(name: str, *rest: object, **more: object) -> list[object]:
        if name != "two.example":
            return real(name, *rest, **more)
        good = real(remote.address, *rest, **more)
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", remote.ssh.port, 0, 0)), *good]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    name = f"[two.example]:{remote.ssh.port}"
    known = Path(remote.root).parent / "known"
    known.write_text(remote.ssh.known_hosts[0].read_text().replace(f"[{remote.address}]:{remote.ssh.port}", name))
    host = dataclasses.replace(
        remote,
        address="two.example",
        ssh=dataclasses.replace(remote.ssh, known_hosts=(known,)),
        timeouts=Timeouts(connect=4),
    )
    assert came_from(host)


# ---- an agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Agents with the given keys."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*keys: Path) -> Path:
        path = tmp_path / f"agent-{len(processes)}"
        processes.append(subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL))
        ready = threading.Event()
        while not path.exists():
            ready.wait(0.01)
        for key in keys:
            subprocess.run(["ssh-add", "-q", str(key)], check=True, env={**os.environ, "SSH_AUTH_SOCK": str(path)})
        return path

    yield start
    for process in processes:
        process.terminate()
        process.wait()


def strangers(tmp_path: Path, count: int) -> list[Path]:
    keys = [tmp_path / f"stranger-{number}" for number in range(count)]
    for key in keys:
        if key.exists():
            continue
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    return keys


@needs_ssh
def test_many_keys_of_an_agent_and_the_one_to_use(
    configured: Callable[..., Host],
    agent: Callable[..., Path],
    sshd: SshFleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """sshd lets six attempts pass. The key that the configuration names comes first, by its public half where that is all there is."""
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent(*strangers(tmp_path, 8), sshd.key)))
    with pytest.raises(LoginError, match="hung up.*Too many authentication failures.*IdentitiesOnly"):
        came_from(configured("Host worker\n  IdentityFile none\n", agent=True))
    public = tmp_path / "only.pub"
    public.write_text(Path(f"{sshd.key}.pub").read_text())
    for line in (f"IdentityFile {sshd.key}", f"IdentityFile {public}", f"IdentityFile {public}\n  IdentitiesOnly yes"):
        assert came_from(configured(f"Host worker\n  {line}\n", agent=True))
    other = strangers(tmp_path, 9)[8]
    with pytest.raises(LoginError, match="stranger-8: refused"):
        came_from(configured(f"Host worker\n  IdentitiesOnly yes\n  IdentityFile {other}\n", agent=True))


@needs_ssh
def test_another_agent_than_the_environments(
    configured: Callable[..., Host],
    agent: Callable[..., Path],
    sshd: SshFleet,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "nobody"))
    path = agent(sshd.key)
    monkeypatch.setenv("MY_AGENT", str(path))
    for value in (str(path), "$MY_AGENT"):
        assert came_from(configured(f"Host worker\n  IdentityFile none\n  IdentityAgent {value}\n", agent=True))
    with pytest.raises(LoginError, match="the agent at .*nobody: "):
        came_from(configured("Host worker\n  IdentityFile none\n", agent=True))


def test_an_agent_that_does_not_answer_holds_nobody_up(
    configured: Callable[..., Host], sshd: SshFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forwarded agent whose other end is gone: whoever asks it waits for ever."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "mute"))
        host = configured("Host worker\n  IdentityFile {key}\n", agent=True)
        assert came_from(dataclasses.replace(host, timeouts=Timeouts(connect=3)))


# ---- without connections


def test_how_hops_are_written(remote: Host) -> None:
    assert parse_jump("me@host:2222", remote) == Jump("host", "me", 2222)
    assert parse_jump("host", remote) == Jump("host")
    assert parse_jump("ssh://me@host:22/", remote) == Jump("host", "me", 22)
    assert parse_jump("me@[2001:db8::7]:2222", remote) == Jump("2001:db8::7", "me", 2222)
    assert parse_jump("2001:db8::7", remote) == Jump("2001:db8::7")
    assert parse_jump("me@corp.example@host", remote) == Jump("host", "me@corp.example")
    for wrong in ("", "host:", "a b:c", "[::1", "host:port"):
        with pytest.raises(SshConfigError, match="is no host to jump through"):
            parse_jump(wrong, remote)


def test_both_readers_agree(configured: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("ssh"):
        pytest.skip("needs the OpenSSH client")
    host = configured(
        "Host worker\n  IdentityFile ~/.ssh/k-%h\n  HostKeyAlias alias\n  IdentitiesOnly yes\n  ProxyJump a@b:3,c\n  AddressFamily inet\n"
        "  UserKnownHostsFile /one /two\n  GlobalKnownHostsFile none\n  BindAddress 127.0.0.1\n  Ciphers aes256-ctr\n"
    )

    def read() -> Login:
        return login(host, "worker")

    asked = read()
    monkeypatch.setattr(sshconfig.shutil, "which", lambda name: None)
    own = read()
    for name in (
        "hostname",
        "port",
        "user",
        "only_these_keys",
        "jumps",
        "known_hosts",
        "key_alias",
        "family",
        "bind_address",
        "ciphers",
    ):
        assert getattr(asked, name) == getattr(own, name), name
    assert [os.path.expanduser(path) for path in asked.key_files] == [
        os.path.expanduser(path) for path in own.key_files
    ]


def test_a_user_without_a_name(
    configured: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`docker run -u 54321`: OpenSSH does nothing for a number without a name. A stand-in says what it says."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho 'No user exists for uid 54321' >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setattr(sshconfig.shutil, "which", lambda name: str(ssh))
    host = configured("Host worker\n  IdentityFile {key}\n")
    assert came_from(host)

    def nobody() -> str:
        raise OSError("No username set in the environment")

    monkeypatch.setattr(sshconfig.getpass, "getuser", nobody)
    with pytest.raises(SshConfigError, match="Set USER in the environment"):
        login(host, "worker")


def test_a_configuration_of_somebody_else(remote: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mounted ~/.ssh has the owner that it has outside. A stand-in says what ssh says of it."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho 'Bad owner or permissions on /home/me/.ssh/config' >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setattr(sshconfig.shutil, "which", lambda name: str(ssh))
    with pytest.raises(SshConfigError, match="Bad owner.*`config_file`"):
        login(remote, "worker")
