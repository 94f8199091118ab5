"""Login shells as people have them: whichever shell, whatever its startup files print or set, with a terminal between or not.

sshd hands a command to the user's login shell as `SHELL -c COMMAND`. The forced command here does just that with another
shell than root's own, so that no account has to be made.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from phases.base.errors import FleetError
from phases.engines.ssh.errors import SilentHostError, UnreachableError
from phases.engines.ssh.host import Host, Timeouts
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.stream import run, shell_line
from phases.engines.ssh.transport import connect
from tests.engines.ssh.sshfleet import SSHD, SshFleet, end_processes_of

SHELLS = {
    "bash": "bash",
    "dash": "dash",
    "zsh": "zsh",
    "fish": "fish",
    "tcsh": "tcsh",
    "csh": "bsd-csh",
    "ash": "busybox ash",
}
STARTUP = {"bash": ".bashrc", "zsh": ".zshenv", "fish": ".config/fish/config.fish", "tcsh": ".tcshrc", "csh": ".cshrc"}
WORDS = [
    "a b",
    "$HOME",
    "it's",
    "`id`",
    "*",
    "~",
    "=ls",
    "%self",
    "back\\slash",
    "\\n",
    "!!",
    "a!b",
    'quote"d',
    "",
    "--",
]
WORDS += ["{a,b}", "$(id)", "x;y", "#no", "[a]", "?", "^x", "<>|&", "a=b", "\t", "'\\!", "\\'"]


@pytest.fixture(scope="module")
def shells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshFleet]:
    """An sshd whose users have the login shell that `home/shell` names."""
    if not SSHD:
        pytest.skip("sshd is not installed (package openssh-server)")
    fleet = SshFleet(tmp_path_factory.mktemp("shells") / "f", 1)
    try:
        command = 'eval "set -- $(cat $HOME/shell)"; exec "$@" "$SSH_ORIGINAL_COMMAND"'
        fleet.hosts[0].config = f"ForceCommand {command}\n"
        fleet.restart(fleet.hosts[0])
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def place(shells: SshFleet, tmp_path: Path) -> Iterator[Host]:
    yield shells.host(0, root=str(tmp_path / "it's a root"), timeouts=Timeouts(connect=30, channel=30, command=20))
    end_processes_of(tmp_path / "it's a root")
    for left in shells.home.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def have(shell: str) -> str:
    """The shell's command line. What tests/apt-packages.txt installs must be there where that list was installed."""
    program = SHELLS[shell].split()[0]
    if not shutil.which(program):
        assert not os.environ.get("PHASEGATE_CI"), f"{program} is missing though tests/apt-packages.txt has its package"
        pytest.skip(f"{program} is not installed")
    return SHELLS[shell]


def log_in_with(fleet: SshFleet, command: str) -> None:
    (fleet.home / "shell").write_text(command)


def startup(fleet: SshFleet, shell: str, text: str) -> None:
    file = fleet.home / STARTUP[shell]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def works(host: Host) -> None:
    """Everything the toolkit does over a session: the kit sent, requests, a body larger than any buffer, a refusal, the end."""
    with HostSession(connect(host)) as session:
        assert session.do(op("facts"))[0]["python"]
        lock = HostLock(session, "test")
        lock.acquire()
        echoed = session.do(op("command", argv=["printf", "%s", "phasegate-agent-0123456789abcdef:"], timeout=10))[0]
        assert echoed["out"] == "phasegate-agent-0123456789abcdef:"
        with pytest.raises(FleetError, match="no-such-program is not installed"):
            session.do(op("command", argv=["no-such-program"], timeout=10))
        assert session.do(op("facts"))[0]["machine"] == os.uname().machine
        lock.release()


@pytest.mark.slow
@pytest.mark.fleet
@pytest.mark.parametrize("shell", SHELLS)
def test_every_login_shell_starts_the_agent_and_passes_arguments_on(shells: SshFleet, place: Host, shell: str) -> None:
    log_in_with(shells, f"{have(shell)} -c")
    works(place)
    transport = connect(place)
    assert run(transport, ["/usr/bin/printf", "%s|", *WORDS]).out == "".join(f"{word}|" for word in WORDS)
    transport.close()


@pytest.mark.slow
@pytest.mark.fleet
@pytest.mark.parametrize("shell", STARTUP)
@pytest.mark.parametrize("ends", ["with a line end", "without"])
def test_a_startup_file_that_prints_costs_nothing(shells: SshFleet, place: Host, shell: str, ends: str) -> None:
    """The agent's first word is recognised behind 300 kB that have no line end, so nobody waits out the command limit."""
    log_in_with(shells, f"{have(shell)} -c")
    end = r"\n" if ends == "with a line end" else ""
    startup(
        shells,
        shell,
        f"printf 'Welcome to the cluster!%300000s{end}' x\necho rules apply 1>&2\n"
        if shell in ("bash", "zsh")
        else f"printf 'Welcome to the cluster!%300000s{end}' x\n",
    )
    works(place)


@pytest.mark.slow
@pytest.mark.fleet
@pytest.mark.parametrize(
    ("shell", "text"),
    [
        ("bash", "set -u\n"),
        ("zsh", "setopt no_unset\nset -u\n"),
        ("bash", "set -xv\n"),
        ("zsh", "setopt xtrace verbose\n"),
        ("tcsh", "set echo\nset verbose\nset noglob\n"),
        ("bash", "set -e\nfalse || true\nshopt -s failglob nullglob extglob\n"),
        ("zsh", "setopt sh_word_split ksh_arrays glob_subst extended_glob interactive_comments bang_hist\n"),
        ("bash", "alias python3=false\npython3() { false; }\nset -o noclobber\n"),
        ("bash", "(sleep 0.3; printf 'a late word') & \n"),
        ("bash", "printf '\\033]0;title\\007\\377\\000'\n"),
        ("fish", "set -g fish_trace 1\n"),
    ],
)
def test_startup_files_that_set_something(shells: SshFleet, place: Host, shell: str, text: str) -> None:
    log_in_with(shells, f"{have(shell)} -c")
    startup(shells, shell, text)
    works(place)


@pytest.mark.slow
@pytest.mark.fleet
@pytest.mark.skipif(not shutil.which("script"), reason="needs script (package bsdutils)")
def test_a_terminal_that_somebody_has_put_between(shells: SshFleet, place: Host) -> None:
    """It would echo requests, translate line ends and cut lines at 4095 bytes; the end of input is a ^D to it."""
    wrapper = shells.home / "recorded"
    wrapper.write_text('#!/bin/sh\nSHELL=/bin/sh exec script -q -e -c "$1" /dev/null\n')
    wrapper.chmod(0o755)
    log_in_with(shells, str(wrapper))
    with HostSession(connect(place)) as session:
        big = session.do(op("command", argv=["printf", "%300000s", "x"], timeout=10))[0]["out"]
        assert len(big) == 300000
        argument = "y" * 100_000
        assert session.do(op("command", argv=["printf", "%s", argument], timeout=10))[0]["out"] == argument
        HostLock(session, "test").acquire()
    with HostSession(connect(place)) as other:  # the lock went with the session
        lock = HostLock(other, "again")
        lock.acquire()
        lock.release()


@pytest.mark.slow
@pytest.mark.fleet
def test_a_banner_of_200_kb_before_the_login(shells: SshFleet, place: Host, tmp_path: Path) -> None:
    """sshd itself sends no longer one than fits a packet of 256 KiB."""
    log_in_with(shells, "bash -c")
    before = shells.hosts[0].config
    (tmp_path / "banner").write_text("Authorised use only. " * 10_000)
    shells.hosts[0].config = before + f"Banner {tmp_path / 'banner'}\n"
    shells.restart(shells.hosts[0])
    try:
        works(place)
    finally:
        shells.hosts[0].config = before
        shells.restart(shells.hosts[0])


@pytest.mark.slow
@pytest.mark.fleet
def test_a_login_script_that_never_gives_the_command_its_turn_is_named(shells: SshFleet, place: Host) -> None:
    log_in_with(shells, "bash -c")
    startup(shells, "bash", "echo 'choose a project (1/2):'\nread project\n")
    host = dataclasses.replace(place, timeouts=Timeouts(connect=30, channel=30, command=3))
    with pytest.raises(SilentHostError, match=r"login shell has not started .*choose a project.*login script"):
        HostSession(connect(host)).do(op("hello"))


@pytest.mark.slow
@pytest.mark.fleet
def test_a_login_script_that_prints_without_an_end(shells: SshFleet, place: Host) -> None:
    log_in_with(shells, "bash -c")
    startup(shells, "bash", "yes 'are you sure?'\n")
    with pytest.raises(UnreachableError, match="prints without an end.*are you sure.*startup files"):
        HostSession(connect(place)).do(op("hello"))


@pytest.mark.slow
@pytest.mark.fleet
@pytest.mark.parametrize(
    ("shell", "python", "told"),
    [
        *((shell, "/no/such/python", r"`python`.*'/no/such/python'") for shell in SHELLS),
        ("bash", "/etc/passwd", "cannot be run: check its permissions"),
        ("bash", "/bin/false", r"status 1 .*/bin/false -V"),
    ],
)
def test_a_python_that_does_not_start_is_told_by_its_status(
    shells: SshFleet, place: Host, shell: str, python: str, told: str
) -> None:
    log_in_with(shells, f"{have(shell)} -c")
    with pytest.raises(FleetError, match=told):
        HostSession(connect(dataclasses.replace(place, python=python))).do(op("hello"))


@pytest.mark.slow
@pytest.mark.fleet
def test_a_shell_that_lets_nobody_in(shells: SshFleet, place: Host) -> None:
    if not os.path.exists("/usr/sbin/nologin"):
        pytest.skip("needs nologin (package login)")
    log_in_with(shells, "/usr/sbin/nologin -c")
    with pytest.raises(FleetError, match="its shell is nologin"):
        HostSession(connect(place)).do(op("hello"))


@pytest.mark.parametrize("shell", SHELLS)
def test_words_are_quoted_as_every_shell_reads_them(shell: str) -> None:
    line = shell_line(["/usr/bin/printf", "%s|", *WORDS])
    done = subprocess.run([*have(shell).split(), "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == "".join(f"{word}|" for word in WORDS)
