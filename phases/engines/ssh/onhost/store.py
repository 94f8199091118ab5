"""Releases on a host: receive, verify, switch, collect garbage. Content-addressed; the complete marker comes last."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os

import control
import record
import locks
from place import NEVER, HostFault, read_json, sync_directory, write_json

MANIFEST = "manifest.json"
COMPLETE = ".complete"
INCOMING = ".incoming-"
TRASH = ".trash-"
CHUNK = 1 << 20
GOODS = 50  # remembered digests
SPARE_BYTES = 1 << 20  # left free on the disk after an upload, for logs and the lease


def parse_manifest(text, digest):
    """The manifest whose text hashes to the digest; paths in it stay inside the release."""
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise HostFault("corrupt", "the manifest of release %s does not hash to its name" % digest[:12], "Push the release again.")
    manifest = json.loads(text)
    for item in manifest["files"]:
        parts = item["path"].split("/")
        if item["path"].startswith("/") or any(part in ("", ".", "..") for part in parts) or parts[0] in (MANIFEST, COMPLETE):
            raise HostFault("bad_manifest", "release %s names the path %r, which is not allowed" % (digest[:12], item["path"]))
    return manifest


def load_manifest(directory, digest):
    try:
        with open(os.path.join(directory, MANIFEST)) as file:
            return parse_manifest(file.read(), digest)
    except FileNotFoundError:
        raise HostFault("incomplete", "release %s has no manifest" % digest[:12], "Push the release again.")


def is_complete(place, digest):
    return os.path.exists(os.path.join(place.release(digest), COMPLETE))


def begin(place, digest, manifest, token):
    """Prepare to receive: {complete: True}, or how many bytes of the payload are here already (`offset`)."""
    with place.mutex():
        locks.require(place, token)
    if is_complete(place, digest):
        with contextlib.suppress(HostFault):
            verify(place, digest)
            return {"complete": True}
        place.audit("release_corrupt", release=digest)
        os.unlink(os.path.join(place.release(digest), COMPLETE))  # its files stay until a good copy takes the name
    files = parse_manifest(manifest, digest)["files"]
    staging = os.path.join(place.releases, INCOMING + digest)
    total = sum(item["size"] for item in files)
    offset = _staged(staging, files)
    _require_space(place, total - offset)
    os.makedirs(staging, exist_ok=True)
    with open(os.path.join(staging, MANIFEST), "w") as file:
        file.write(manifest)
    return {"complete": False, "offset": offset, "total": total}


def receive(place, digest, offset, read, token):
    """Write the payload (files of the manifest, one after the other) from `offset` on; `read(n)` gives up to n bytes, b"" at the end."""
    staging = os.path.join(place.releases, INCOMING + digest)
    files = load_manifest(staging, digest)["files"]
    if _staged(staging, files) != offset:
        raise HostFault("offset", "another upload of release %s is going on" % digest[:12], "Ask again where to continue.")
    start = 0
    for item in files:
        end = start + item["size"]
        if end >= offset:
            path = os.path.join(staging, *item["path"].split("/"))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "ab", buffering=0) as file:
                remaining = end - max(start, offset)
                while remaining:
                    data = read(min(remaining, CHUNK))
                    if not data:
                        raise HostFault("cut_off", "the upload ended early", "Push again: it continues where it stopped.")
                    _write(file, data, staging)
                    remaining -= len(data)
        start = end
    return _finish(place, digest, token)


def _write(file, data, staging):
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            _remove_tree(staging)  # a full disk would keep even the audit log from being written
            raise HostFault("disk_full", "the disk filled up during the upload", "Free some space there; what was sent has been removed.")
        raise


def _finish(place, digest, token):
    """Hash what is on the disk, make it durable, name it, and only then mark it complete."""
    staging = os.path.join(place.releases, INCOMING + digest)
    try:
        files = _check_files(staging, digest, durable=True)
    except HostFault:
        _remove_tree(staging)
        raise
    final = place.release(digest)
    with place.mutex():
        locks.require(place, token)
        if not is_complete(place, digest):
            if os.path.lexists(final):
                _discard(place, digest)
            os.rename(staging, final)
            sync_directory(place.releases)
            with open(os.path.join(final, COMPLETE), "w") as file:
                os.fsync(file.fileno())
            sync_directory(final)
            place.audit("release_received", release=digest, files=files)
    return {"complete": True, "files": files}


def verify(place, digest):
    """Prove a release is whole: marker, manifest hash, every file's hash, nothing extra in the way."""
    if not is_complete(place, digest):
        raise HostFault("incomplete", "release %s has no complete marker" % digest[:12], "Push the release again.")
    return {"files": _check_files(place.release(digest), digest)}


def _check_files(directory, digest, durable=False):
    files = load_manifest(directory, digest)["files"]
    for item in files:
        path = os.path.join(directory, *item["path"].split("/"))
        try:
            found = _sha256(path, durable)
        except OSError as fault:
            raise HostFault("corrupt", "%s of release %s: %s" % (item["path"], digest[:12], fault.strerror), "Push the release again.")
        if found != item["sha256"]:
            raise HostFault("corrupt", "%s of release %s is damaged" % (item["path"], digest[:12]), "Push the release again.")
        if item.get("executable") and not os.access(path, os.X_OK):
            os.chmod(path, 0o755)
    return len(files)


def _sha256(path, durable):
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while True:
            data = file.read(CHUNK)
            if not data:
                break
            digest.update(data)
        if durable:
            os.fsync(file.fileno())
    return digest.hexdigest()


def _staged(staging, files):
    """Bytes of the payload already there: whole files in order, then part of one."""
    offset = 0
    for item in files:
        path = os.path.join(staging, *item["path"].split("/"))
        try:
            size = os.path.getsize(path)
        except OSError:
            return offset
        if size > item["size"]:
            os.unlink(path)
            return offset
        offset += size
        if size < item["size"]:
            return offset
    return offset


def _require_space(place, needed):
    free = free_bytes(place)
    if free < needed + SPARE_BYTES:
        raise HostFault(
            "disk_full",
            "%s has %d bytes free, the release needs %d more" % (place.releases, free, needed + SPARE_BYTES - free),
            "Free some space there, or let `gc` remove old releases.",
            free=free,
            needed=needed + SPARE_BYTES,
        )


def free_bytes(place):
    found = os.statvfs(place.releases)
    return found.f_bavail * found.f_frsize


def switch(place, digest, token, lease=""):
    """Verify a release and make it `current` with one rename. With a lease, only while that lease is still active."""
    verify(place, digest)
    with place.mutex():
        locks.require(place, token)
        held = record.read(place)
        if record.active(held) and held["id"] != lease:
            raise HostFault("lease_active", "an armed lease guards this host", "Confirm, keep or cancel it first.", lease=held["id"])
        if lease:
            record.require_active(held, lease)
            if digest != held["release"]:
                raise HostFault("lease_other_release", "the lease is for release %s" % held["release"][:12])
        before = place.link_target(place.current)
        if digest != before:
            control.begin_anew(place, digest)
        place.set_link(place.current, digest)
        place.audit("switched", release=digest, previous=before, lease=lease)
    return {"current": digest, "previous": before}


def mark_good(place, digest, token):
    """Record the release that a rollback goes to: what runs here now, or what was last-good here before.

    Never what is under a lease: that becomes last-good when its lease is kept, and not otherwise.
    """
    verify(place, digest)
    with place.mutex():
        locks.require(place, token)
        held = record.read(place)
        if record.active(held):
            raise HostFault("lease_active", "a lease guards this host", "Keep or cancel it first.", lease=held["id"])
        current = place.link_target(place.current)
        if digest != current and digest not in ever_good(place):
            raise HostFault("not_current", "current is %s, and %s was never good here" % (current[:12], digest[:12]), "Switch to it first.")
        set_good(place, digest)
        place.audit("marked_good", release=digest)
    return {"last_good": digest}


def ever_good(place):
    """Digests that were last-good here at some time. Mutex held."""
    return set(read_json(place.good) or ()) | {place.link_target(place.last_good)}


def set_good(place, digest):
    """Mutex held."""
    known = [d for d in read_json(place.good) or [] if d != digest]
    write_json(place.good, [*known, digest][-GOODS:])
    place.set_link(place.last_good, digest)


def collect(place, token, keep=(), newest=2):
    """Remove releases and uploads nobody needs. Current, last-good and what was good before it, both ends of a lease and `keep` always stay."""
    with place.mutex():
        locks.require(place, token)
        lease = read_lease(place)
        kept = set(keep) | {place.link_target(place.current), place.link_target(place.last_good)}
        kept |= {lease.get("release"), lease.get("previous"), *(read_json(place.good) or [])[-2:]}
        found = [name for name in os.listdir(place.releases) if not name.startswith(".")]
        found.sort(key=lambda name: os.lstat(os.path.join(place.releases, name)).st_mtime, reverse=True)
        candidates = [name for name in found if name not in kept]
        removed = candidates[max(0, newest) :]
        for name in removed:
            _discard(place, name)
        leftovers = [name for name in os.listdir(place.releases) if name.startswith((INCOMING, TRASH))]
        if removed or leftovers:
            place.audit("collected", removed=removed, leftovers=len(leftovers))
    for name in os.listdir(place.releases):
        if name in leftovers:
            _remove_tree(os.path.join(place.releases, name))
    return {"removed": removed, "free": free_bytes(place)}


def read_lease(place):
    return record.read(place) or {}


def _remove_tree(path):
    import shutil  # here: every connection pays for what is imported at the top

    shutil.rmtree(path, ignore_errors=True)


def _discard(place, name):
    """Take the marker and the name away first: whatever is interrupted after that is garbage, not a release."""
    path = os.path.join(place.releases, name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, COMPLETE))
    os.rename(path, os.path.join(place.releases, "%s%s-%d" % (TRASH, name[:16], os.getpid())))


def inventory(place):
    """What is on this host: releases, links, lease, free space."""
    names = sorted(name for name in os.listdir(place.releases) if not name.startswith("."))
    current, facts = place.link_target(place.current), {}
    if current in names:
        with contextlib.suppress(HostFault):
            facts = load_manifest(place.release(current), current).get("facts", {})
    return {
        "releases": [{"digest": name, "complete": os.path.exists(os.path.join(place.releases, name, COMPLETE))} for name in names],
        "current": current,
        "facts": facts,
        "last_good": place.link_target(place.last_good),
        "lease": record.describe(place),
        "free": free_bytes(place),
        "never": NEVER,
    }
