"""known_hosts as OpenSSH takes it, against real sshd; where OpenSSH is installed its own reader is asked too."""

from __future__ import annotations

import base64
import dataclasses
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phases.engines.ssh.errors import HostKeyError
from phases.engines.ssh.host import Host
from phases.engines.ssh.known_hosts import AUTHORITY, REVOKED, read_known_hosts
from phases.engines.ssh.stream import run
from phases.engines.ssh.transport import connect
from phases.engines.ssh.trust import Certificate, read_certificate
from tests.engines.ssh.sshfleet import SshFleet

BROKEN = [
    "this is no line",
    "half.example ssh-ed25519",
    "cut.example ssh-rsa AAAA",
    "cut.example ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI",
    "letters.example ssh-ed25519 ???not base64???",
    "old.example 1024 37 1349230498230948230948230948203948",
    "@unknown-marker * ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ5sM0nDgwKqiMKP0XKyIw+HcmuRGQy0m0eJs5cR5XKq",
    "other.example ssh-ed25519 AAAAB3NzaC1yc2EAAAADAQABAAAAgQC=",
    "\udce9\udcff latin ssh-rsa",
]


def key_of(machine: object) -> str:
    return " ".join(machine.host_key.with_suffix(".pub").read_text().split()[:2])  # type: ignore[attr-defined]


def new_key(directory: Path, name: str, kind: str = "ed25519") -> Path:
    path = directory / name
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", name, "-f", str(path)], check=True)
    return path


def public(path: Path) -> str:
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def trusting(host: Host, file: Path) -> Host:
    return dataclasses.replace(host, ssh=dataclasses.replace(host.ssh, known_hosts=(file,)))


def answers(host: Host) -> bool:
    transport = connect(host)
    try:
        return run(transport, ["echo", "ok"]).out == "ok\n"
    finally:
        transport.close()


def name_of(host: Host) -> str:
    return f"[{host.address}]:{host.ssh.port}"


# ---- lines that others wrote


def test_lines_nobody_can_read_are_skipped_with_one_warning(
    sshd: SshFleet, remote: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One such line anywhere in the file once ended every connection with a raw exception."""
    authority = public(new_key(tmp_path, "authority"))
    file = tmp_path / "known_hosts"
    lines = [
        "# a comment",
        "",
        *BROKEN,
        f"@cert-authority *.example {authority}",
        f"  {name_of(remote)} {key_of(sshd.hosts[0])} comment",
    ]
    file.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    with caplog.at_level(logging.WARNING):
        assert answers(trusting(remote, file))
        assert answers(trusting(remote, file)), "and again: it is told once"
    told = [record.getMessage() for record in caplog.records if str(file) in record.getMessage()]
    assert (
        len(told) == 1
        and "line 3 (the key is not base64), line 4 (no host, kind and key)" in told[0]
        and "skipped" in told[0]
    )
    assert f"and {len(BROKEN) - 5} more" in told[0]
    unreadable = read_known_hosts([file]).unreadable
    assert [each.number for each in unreadable] == list(range(3, 3 + len(BROKEN)))


def test_a_file_that_cannot_be_read_is_named(remote: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "known_hosts").mkdir()
    with caplog.at_level(logging.WARNING), pytest.raises(HostKeyError, match="no host key is known"):
        answers(trusting(remote, tmp_path / "known_hosts"))
    assert "known_hosts cannot be read" in caplog.text


def patterns(host: Host) -> list[tuple[str, bool]]:
    there, port = host.address, host.ssh.port
    return [
        (f"[{there}]:{port}", True),
        (there, True),  # ssh takes a key without a port for any port
        (f"[{there}]:1{port}", False),
        ("*", True),
        (f"*,!{there[:-1]}?", True),  # the name asked first is the one with the port
        (f"*,![{there}]:{port},!{there}", False),
        (f"[{there[:4]}*]:*", True),
        ("?" * len(there), True),
        (f"other.example,[{there}]:{port}", True),
        (f"[{there}]:{port}".upper(), True),
        ("other.example", False),
    ]


@pytest.mark.parametrize("number", range(11))
def test_patterns_are_read_as_ssh_reads_them(sshd: SshFleet, remote: Host, tmp_path: Path, number: int) -> None:
    pattern, known = patterns(remote)[number]
    file = tmp_path / "known_hosts"
    file.write_text(f"{pattern} {key_of(sshd.hosts[0])}\n")
    host = trusting(remote, file)
    argv = [
        "ssh",
        "-F",
        "none",
        "-o",
        f"UserKnownHostsFile={file}",
        "-o",
        "GlobalKnownHostsFile=none",
        "-o",
        "StrictHostKeyChecking=yes",
    ]
    argv += [
        "-o",
        "BatchMode=yes",
        "-o",
        "CheckHostIP=no",
        "-i",
        str(sshd.key),
        "-p",
        str(remote.ssh.port),
        remote.address,
        "true",
    ]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == known, f"OpenSSH itself reads {pattern} another way: {done.stderr}"
    if known:
        assert answers(host)
    else:
        with pytest.raises(HostKeyError, match="no host key is known"):
            answers(host)


def test_hashed_names_and_several_keys_of_one_kind(sshd: SshFleet, remote: Host, tmp_path: Path) -> None:
    """A name behind which several machines stand has several keys; the library keeps the first."""
    file = tmp_path / "known_hosts"
    other = public(new_key(tmp_path, "other"))
    file.write_text(f"{name_of(remote)} {other}\n{name_of(remote)} {key_of(sshd.hosts[0])}\n")
    subprocess.run(["ssh-keygen", "-H", "-f", str(file)], check=True, capture_output=True)
    assert "|1|" in file.read_text() and remote.address not in file.read_text()
    assert answers(trusting(remote, file))


def test_the_key_the_host_is_known_by_is_asked_for(sshd: SshFleet, remote: Host, tmp_path: Path) -> None:
    """It has three, and only its RSA key is known: as with ssh, that is the one it is asked to show."""
    machine = sshd.hosts[0]
    rsa, ecdsa = new_key(tmp_path, "rsa", "rsa"), new_key(tmp_path, "ecdsa", "ecdsa")
    machine.config = f"HostKey {rsa}\nHostKey {ecdsa}\n"
    sshd.restart(machine)
    try:
        for kind in (rsa, ecdsa):
            file = tmp_path / f"known_{kind.name}"
            file.write_text(f"{name_of(remote)} {public(kind)}\n")
            assert answers(trusting(remote, file))
        file.write_text(f"{name_of(remote)} {public(new_key(tmp_path, 'another'))}\n")
        with pytest.raises(HostKeyError, match="another host key than the known one .*known_ecdsa:1"):
            answers(trusting(remote, file))
    finally:
        machine.config = ""
        sshd.restart(machine)


# ---- revoked keys and authorities


@pytest.mark.parametrize("first", ["known, then revoked", "revoked, then known"])
def test_a_revoked_key_is_refused_wherever_it_is_also_known(
    sshd: SshFleet, remote: Host, tmp_path: Path, first: str
) -> None:
    file = tmp_path / "known_hosts"
    lines = [f"{name_of(remote)} {key_of(sshd.hosts[0])}\n", f"@revoked * {key_of(sshd.hosts[0])}\n"]
    file.write_text("".join(lines if first.startswith("known") else reversed(lines)))
    with pytest.raises(HostKeyError, match=r"is revoked in .*known_hosts:[12]"):
        answers(trusting(remote, file))
    file.write_text(lines[0] + f"@revoked *.example {key_of(sshd.hosts[0])}\n")
    assert answers(trusting(remote, file)), "revoked for other hosts"


Certify = Callable[..., Path]


@pytest.fixture(params=["ed25519", "rsa", "ecdsa"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def certify(sshd: SshFleet, tmp_path: Path, kind: str) -> Iterator[Certify]:
    """Give the first sshd a key of the kind with a certificate made so; the authority's file comes back."""
    machine = sshd.hosts[0]
    key, authority = new_key(tmp_path, f"host_{kind}", kind), new_key(tmp_path, f"authority_{kind}", kind)

    def make(*options: str, host: bool = True) -> Path:
        usage = ["-h"] if host else []
        argv = ["ssh-keygen", "-q", "-s", str(authority), *usage, "-I", "the-test-host", *options, f"{key}.pub"]
        subprocess.run(argv, check=True, capture_output=True)
        machine.config = f"HostKey {key}\nHostCertificate {key}-cert.pub\n"
        sshd.restart(machine)
        return authority

    yield make
    machine.config = ""
    sshd.restart(machine)


def test_a_certificate_of_a_known_authority_is_enough(certify: Certify, remote: Host, tmp_path: Path) -> None:
    authority = certify("-n", f"{remote.address},other.example", "-V", "-1d:+1d")
    file = tmp_path / "known_hosts"
    file.write_text(f"@cert-authority * {public(authority)}\n")
    assert answers(trusting(remote, file))
    file.write_text(f"@cert-authority *.example {public(authority)}\n")
    with pytest.raises(HostKeyError, match="no host key is known"):
        answers(trusting(remote, file))
    file.write_text(f"@cert-authority * {public(authority)}\n@revoked * {public(authority)}\n")
    with pytest.raises(HostKeyError, match="authority of the certificate .* is revoked in .*known_hosts:2"):
        answers(trusting(remote, file))
    file.write_text(f"@cert-authority * {public(new_key(tmp_path, 'stranger'))}\n")
    with pytest.raises(HostKeyError, match="no host key is known .*the-test-host.*which is no authority here"):
        answers(trusting(remote, file))


@pytest.mark.parametrize("kind", ["ed25519"], indirect=True)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("-n", "other.example"), "it is for other.example"),
        ((), "it is for no host by name"),
        (("-n", "ADDRESS", "-V", "20200101:20210101"), "it expired on 202[01]-"),
        (("-n", "ADDRESS", "-V", "20990101:20990102"), "it is valid from 20(99|98)-"),
    ],
)
def test_a_certificate_that_does_not_hold_is_told_why(
    certify: Certify, remote: Host, tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    authority = certify(*(option.replace("ADDRESS", remote.address) for option in options))
    file = tmp_path / "known_hosts"
    file.write_text(f"@cert-authority * {public(authority)}\n")
    with pytest.raises(HostKeyError, match=f"no host key is known for .*{told}"):
        answers(trusting(remote, file))
    file.write_text(f"@cert-authority * {public(authority)}\n* {public(tmp_path / 'host_ed25519')}\n")
    assert answers(trusting(remote, file)), "as ssh: the key itself is known, so the certificate is not needed"


def test_what_a_certificate_says(tmp_path: Path, kind: str) -> None:
    key, authority = new_key(tmp_path, "key", kind), new_key(tmp_path, "authority")
    argv = [
        "ssh-keygen",
        "-q",
        "-s",
        str(authority),
        "-h",
        "-I",
        "name",
        "-n",
        "a.example,*.b.example",
        "-V",
        "always:forever",
        f"{key}.pub",
    ]
    subprocess.run(argv, check=True, capture_output=True)
    blob = base64.b64decode(Path(f"{key}-cert.pub").read_text().split()[1])
    certificate = read_certificate(blob)
    now = time.time()
    assert certificate.flaw("a.example", now) == certificate.flaw("x.B.example", now) == ""
    assert certificate.flaw("c.example", now)
    assert certificate.authority == base64.b64decode(public(authority).split()[1])
    for place in (len(blob) - 1, len(blob) // 2, 60):  # a bit turned anywhere: the signature does not hold
        turned = bytearray(blob)
        turned[place] ^= 1
        try:
            assert read_certificate(bytes(turned)).flaw("a.example", now)
        except Exception as fault:  # noqa: BLE001 - or it is no certificate at all any more
            assert not isinstance(fault, AssertionError)
    assert dataclasses.replace(certificate, critical=True).flaw("a.example", now) == "it has critical options"
    assert "for a user" in dataclasses.replace(certificate, for_host=False).flaw("a.example", now)
    assert isinstance(certificate, Certificate)


def test_markers_are_kept_apart(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    one, two, three = (public(new_key(tmp_path, name)) for name in ("one", "two", "three"))
    file.write_text(f"a,b {one}\n@revoked a {two}\n@cert-authority *.x,!no.x {three}\n")
    known = read_known_hosts([file, tmp_path / "missing"])
    assert [key.at for key in known.about(["b"])] == [f"{file}:1"]
    assert [key.at for key in known.about(["a"], REVOKED)] == [f"{file}:2"] and not known.about(["b"], REVOKED)
    assert known.about(["y.x"], AUTHORITY) and not known.about(["no.x"], AUTHORITY)
    file.write_text(f"a {two}\n# longer than before\n")
    os.utime(file)
    assert len(read_known_hosts([file]).keys) == 1, "a changed file is read again"
