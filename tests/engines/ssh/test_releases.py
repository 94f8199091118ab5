"""Releases on a host: content-addressed, verified, resumable, switched atomically, collected safely."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phases.engines.ssh.bundle import Bundle, Launch, bundle_release, make_bundle
from phases.engines.ssh.errors import DiskFullError, HostLockedError, ReleaseError, UnreachableError
from phases.engines.ssh.host import Host
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.releases import NEVER, ReleaseStore, read_audit, read_inventory, rollback_target
from phases.engines.ssh.session import HostSession, op
from phases.engines.ssh.transport import connect
from tests.engines.ssh.conftest import service_bundle


@pytest.fixture
def store(session: HostSession, lock: HostLock) -> ReleaseStore:
    return ReleaseStore(session, lock)


def test_pushed_once_and_found_again(store: ReleaseStore, session: HostSession) -> None:
    bundle = service_bundle(200_000)
    assert store.push(bundle).sent == bundle.size
    assert store.push(bundle).sent == 0
    assert read_inventory(session).releases == (bundle.digest,)
    store.verify(bundle.digest)


def test_files_arrive_byte_for_byte_with_their_modes(store: ReleaseStore, local: Host, tmp_path: Path) -> None:
    tool = tmp_path / "tool.sh"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    files: dict[str, Path | bytes] = {"bin/tool.sh": tool, "site/empty.py": b"", "objects/k.so": os.urandom(2_500_000)}
    bundle = make_bundle(files, Launch(("true",)))
    store.push(bundle)
    there = Path(local.root, "releases", bundle.digest)
    assert (there / "objects/k.so").read_bytes() == files["objects/k.so"]
    assert (there / "site/empty.py").read_bytes() == b""
    assert os.access(there / "bin/tool.sh", os.X_OK) and not os.access(there / "objects/k.so", os.X_OK)
    assert (there / "manifest.json").read_text() == bundle.manifest


def test_the_same_content_has_the_same_name_whatever_its_order() -> None:
    launch = Launch(("a", "b"))
    assert make_bundle({"a": b"1", "b": b"2"}, launch).digest == make_bundle({"b": b"2", "a": b"1"}, launch).digest
    assert make_bundle({"a": b"1"}, launch).digest != make_bundle({"a": b"1"}, Launch(("a", "c"))).digest


def test_a_wheel_is_unpacked_into_the_site_directory(tmp_path: Path) -> None:
    wheel = tmp_path / "kernel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kernel/__init__.py", "x = 1\n")
        archive.writestr("kernel-1.0.data/purelib/kernel/extra.py", "y = 2\n")
    shared = tmp_path / "kernel.so"
    shared.write_bytes(b"ELF")
    bundle = bundle_release([wheel], [shared], Launch(("true",)))
    assert [file.path for file in bundle.files] == [
        "objects/kernel.so",
        "site/kernel/__init__.py",
        "site/kernel/extra.py",
    ]
    with pytest.raises(ReleaseError, match="not a readable wheel"):
        bundle_release([shared], [], Launch(("true",)))


@pytest.mark.parametrize("path", ["../up", "/root", "a//b", "a/./b", "manifest.json", ".complete"])
def test_paths_that_leave_the_release_are_refused_here_and_there(
    path: str, session: HostSession, lock: HostLock
) -> None:
    with pytest.raises(ReleaseError, match="path"):
        make_bundle({path: b""}, Launch(("true",)))
    import hashlib

    manifest = json.dumps(
        {"files": [{"path": path, "size": 0, "sha256": hashlib.sha256().hexdigest()}], "launch": {"argv": ["true"]}}
    )
    digest = hashlib.sha256(manifest.encode()).hexdigest()
    with pytest.raises(ReleaseError, match="not allowed"):
        session.do(op("release.begin", digest=digest, manifest=manifest, token=lock.token))


class _CutOff(Bundle):
    """A bundle whose upload breaks off after a number of bytes."""

    limit = 0

    def payload(self, offset: int = 0) -> Iterator[memoryview | bytes]:
        left = self.limit
        for part in super().payload(offset):
            yield part[:left]
            left -= len(part)
            if left <= 0:
                raise UnreachableError("the cable was pulled.", host="here")


def test_an_upload_that_was_cut_off_continues_where_it_stopped(
    local: Host, session: HostSession, lock: HostLock
) -> None:
    bundle = service_bundle(4_000_000)
    cut = _CutOff(bundle.digest, bundle.manifest, bundle.files)
    object.__setattr__(cut, "limit", 2_000_000)
    with pytest.raises(UnreachableError):
        ReleaseStore(session, lock).push(cut)
    assert not read_inventory(session).releases
    session.close()
    lock.acquire()
    pushed = ReleaseStore(session, lock).push(bundle)
    assert pushed.resumed_at == 2_000_000 and pushed.sent == bundle.size - 2_000_000


def test_damage_in_transit_is_found_and_sent_again(local: Host, session: HostSession, lock: HostLock) -> None:
    bundle = service_bundle(300_000)
    staging = Path(local.root, "releases", f".incoming-{bundle.digest}")
    (staging / "objects").mkdir(parents=True)
    (staging / "objects/kernel.so").write_bytes(b"damaged" * 10)
    pushed = ReleaseStore(session, lock).push(bundle)
    assert pushed.sent == bundle.size, "the damaged beginning was noticed and everything sent anew"
    ReleaseStore(session, lock).verify(bundle.digest)


def test_damage_on_the_disk_stops_a_switch_and_a_push_heals_it(
    local: Host, store: ReleaseStore, session: HostSession
) -> None:
    bundle, other = service_bundle(5000), service_bundle(5000)
    store.push(other)
    store.switch(other.digest)
    store.push(bundle)
    Path(local.root, "releases", bundle.digest, "objects/kernel.so").write_bytes(b"x" * 5000)
    with pytest.raises(ReleaseError, match=r"objects/kernel.so of release \w+ is damaged.*Push the release again"):
        store.switch(bundle.digest)
    assert read_inventory(session).current == other.digest
    assert store.push(bundle).sent == bundle.size
    store.switch(bundle.digest)
    assert read_inventory(session).current == bundle.digest


def test_a_release_without_its_marker_is_never_switched_to(local: Host, store: ReleaseStore) -> None:
    bundle = service_bundle()
    store.push(bundle)
    Path(local.root, "releases", bundle.digest, ".complete").unlink()
    with pytest.raises(ReleaseError, match="complete marker"):
        store.switch(bundle.digest)


def test_a_reader_always_finds_a_current_release(local: Host, store: ReleaseStore) -> None:
    """Field failure: rm + ln, and ln -sfn, leave a moment without a link. Hammer it with a reader."""
    bundles = [service_bundle(), service_bundle()]
    for bundle in bundles:
        store.push(bundle)
    store.switch(bundles[0].digest)
    seen, stop = set(), threading.Event()
    problems: list[str] = []

    def read() -> None:
        while not stop.is_set():
            try:
                seen.add(os.readlink(Path(local.root, "current")))
                (Path(local.root) / "current/manifest.json").stat()
            except OSError as fault:
                problems.append(str(fault))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        store.switch(bundles[number % 2].digest)
    stop.set()
    reader.join()
    assert not problems
    assert seen == {f"releases/{bundle.digest}" for bundle in bundles}


def test_collection_spares_what_is_needed(local: Host, store: ReleaseStore, session: HostSession) -> None:
    bundles = [service_bundle() for _ in range(7)]
    for number, bundle in enumerate(bundles):
        store.push(bundle)
        os.utime(Path(local.root, "releases", bundle.digest), (number + 1, number + 1))
    current, good, wanted = bundles[0], bundles[1], bundles[2]
    store.switch(good.digest)
    store.mark_good(good.digest)
    store.switch(current.digest)
    os.utime(Path(local.root, "releases", bundles[0].digest), (1, 1))
    removed = store.collect(keep=[wanted.digest], newest=1)
    assert set(removed) == {bundle.digest for bundle in bundles[3:6]}
    left = read_inventory(session)
    assert set(left.releases) == {b.digest for b in (current, good, wanted, bundles[6])}
    assert not [name for name in os.listdir(Path(local.root, "releases")) if name.startswith(".")]


def test_rollback_goes_to_the_recorded_good_one_not_to_the_newest(store: ReleaseStore, session: HostSession) -> None:
    """Field failure: two failures in a row, and the previous directory is a failed release."""
    good, bad, worse = (service_bundle() for _ in range(3))
    for bundle in (good, bad, worse):
        store.push(bundle)
        store.switch(bundle.digest)
        if bundle is good:
            store.mark_good(bundle.digest)
    assert rollback_target(read_inventory(session), "here") == good.digest


def test_no_good_release_means_no_rollback(store: ReleaseStore, session: HostSession) -> None:
    with pytest.raises(Exception, match="on here: no release has been recorded as good"):
        rollback_target(read_inventory(session), "here")


def test_nothing_changes_without_the_lock(store: ReleaseStore, session: HostSession, lock: HostLock) -> None:
    bundle = service_bundle()
    store.push(bundle)
    lock.release()
    for change in (lambda: store.switch(bundle.digest), lambda: store.push(service_bundle()), lambda: store.collect()):
        with pytest.raises(HostLockedError):
            change()
    assert read_inventory(session).current == NEVER


def test_what_happened_is_in_the_audit_log(store: ReleaseStore, session: HostSession, local: Host) -> None:
    bundle = service_bundle()
    store.push(bundle)
    store.switch(bundle.digest)
    entries, offset = read_audit(session)
    assert [entry["event"] for entry in entries] == ["release_received", "switched"]
    with open(Path(local.root, "audit.log"), "a") as log:
        log.write('{"event": "torn')
    assert read_audit(session, offset) == ([], offset), "a line still being written is left for later"
    with open(Path(local.root, "audit.log"), "a") as log:
        log.write("\n")
    assert read_audit(session, offset)[0][0]["event"] == "unreadable"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes and a half."""
    place = tmp_path / "small"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2560k", "tmpfs", place], check=False).returncode
    ):
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_release_that_will_not_fit_is_refused_before_it_is_sent(local: Host, small_disk: Path) -> None:
    host = dataclasses.replace(local, root=str(small_disk / "w"))
    with HostSession(connect(host)) as session, HostLock(session, "test") as lock:
        bundle = service_bundle(4_000_000)
        with pytest.raises(DiskFullError, match=r"on here: .* bytes free, the release needs \d+ more.*Free some space"):
            ReleaseStore(session, lock).push(bundle)
        assert not [name for name in os.listdir(small_disk / "w/releases") if bundle.digest in name]


def test_a_disk_that_fills_up_meanwhile_leaves_no_half_state(local: Host, small_disk: Path) -> None:
    host = dataclasses.replace(local, root=str(small_disk / "w"))
    with HostSession(connect(host)) as session:
        lock = HostLock(session, "test")
        lock.acquire()
        store, small = ReleaseStore(session, lock), service_bundle(1000)
        store.push(small)
        store.switch(small.digest)

        class Filling(Bundle):
            def payload(self, offset: int = 0) -> Iterator[memoryview | bytes]:
                # unbuffered: closing a file whose last bytes found no room would raise again
                with open(small_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
                    while True:
                        filler.write(bytes(65536))
                yield from super().payload(offset)

        bundle = service_bundle(1_000_000)
        with pytest.raises(DiskFullError, match="on here: the disk filled up"):
            store.push(Filling(bundle.digest, bundle.manifest, bundle.files))
        (small_disk / "filler").unlink()
        lock.acquire()
        found = read_inventory(session)
        assert found.current == small.digest and found.releases == (small.digest,)
        assert store.push(bundle).sent == bundle.size
        lock.release()
