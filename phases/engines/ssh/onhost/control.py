"""The hot fallback's control byte, and what the ranks of the serving process say to it.

`<root>/control` holds one byte, `c` (candidate) or `i` (incumbent), which every rank maps into memory and looks at when a forward
begins; each acknowledges in its fact file. The file is written in place and never cut short: a mapped file that loses its end
ends whoever looks at it. The byte belongs to a release, which run/control.json names together with those that fell back: a release
that the toolkit switches to starts as candidate; started again after a crash, by hand or by a revert, it keeps what it had, so
that a host that fell back does not come back as candidate. `control.py show|candidate|incumbent ROOT` does the same by hand.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sys
import time

import locks
import record
from place import HostFault, Place, read_json, remove, write_json

CANDIDATE, INCUMBENT = "candidate", "incumbent"
BYTES = {CANDIDATE: b"c", INCUMBENT: b"i"}
FRESH_SECONDS = 10.0  # ranks touch their fact file every second; an older one belongs to a process that is gone or stuck
POLL = 0.005


def read(place):
    """What the byte says; anything but the candidate's is the incumbent, as the ranks see it too."""
    try:
        with open(place.control, "rb") as file:
            return CANDIDATE if file.read(1) == BYTES[CANDIDATE] else INCUMBENT
    except OSError:
        return INCUMBENT


def write(place, choice):
    """Set the byte in place: one byte, so that a reader sees the old or the new one."""
    handle = os.open(place.control, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(handle, BYTES[choice], 0)
        os.fsync(handle)
    finally:
        os.close(handle)


def fall_back(place, digest):
    """To the incumbent if this release is what serves, before anything slower is tried.

    Never raises: what comes after must happen whatever the disk says.
    """
    try:
        if _known(place)["release"] == digest and read(place) == CANDIDATE:
            write(place, INCUMBENT)
    except (HostFault, OSError) as fault:
        print("cannot write the control byte: %s" % fault, file=sys.stderr, flush=True)


def settle_before_start(place, digest):
    """What the service's start does: the byte becomes that of the release that starts.

    Never raises: with a full disk or a damaged record the byte stays as it is, and the service starts.
    """
    try:
        known = _known(place)
        fallen = set(known["fallen"])
        if read(place) == INCUMBENT and known["release"]:
            fallen.add(known["release"])  # by an operator, by the guard, or by the ranks themselves
        write(place, INCUMBENT if digest in fallen else CANDIDATE)
        write_json(_record_path(place), {"release": digest, "fallen": sorted(fallen)})
    except (HostFault, OSError) as fault:
        print("the control byte stays as it is: %s" % fault, file=sys.stderr, flush=True)


def begin_anew(place, digest):
    """The toolkit switches to this release: whatever it was before, it starts as candidate. Mutex held."""
    known = _known(place)
    fallen = set(known["fallen"]) - {digest}
    release = known["release"]
    if release and release != digest and read(place) == INCUMBENT:
        fallen.add(release)
    write_json(_record_path(place), {"release": "" if release == digest else release, "fallen": sorted(fallen)})
    remove(_order_path(place))


def switch(place, to, goal="", everywhere=False, wait=0.0, ranks=0, token="", turn=False):
    """Set the byte and wait for every rank: {affected, reason, byte, ranks: [...], missing, seconds}.

    Going to the candidate needs this run's lock. Going to the incumbent never does: it is the way out, for anybody at any time;
    hosts that already run what a rollback goes to are left alone.

    Args:
        goal: digest that a rollback goes to; empty: the host's last-good. everywhere: also where that is what runs.
        wait: seconds to wait for the acknowledgements at most.
        ranks: of the worker; 0: as the fact files say.
        turn: one of many between both kernels. It does not go forwards where somebody has ordered the fallback since they began:
            HostFault `fallback_ordered`. Without it such an order is given, or taken back.
    """
    if to not in BYTES:
        raise HostFault("bad_choice", "%r is neither candidate nor incumbent" % to)
    started = time.monotonic()
    if to == CANDIDATE:
        with place.mutex():
            locks.require(place, token)
            if turn:
                _require_no_order(place)
            else:
                remove(_order_path(place))
    elif not (everywhere or _strayed(place, goal)):
        return {"affected": False, "reason": "runs what a rollback goes to", "byte": read(place), "ranks": [], "missing": "", "seconds": 0.0}
    elif not turn:
        _order(place)  # before the byte: a turn that begins just now must find it
    facts = read_facts(place)
    if facts and not any(entry.get("hot", {}).get("able") for entry in facts):
        why = facts[0].get("hot", {}).get("reason") or "its plugin is older than the hot fallback"
        return {"affected": True, "reason": why, "byte": read(place), "ranks": [], "missing": why, "seconds": 0.0}
    before = read(place)
    write(place, to)
    if turn and to == CANDIDATE and ordered(place):  # at this very moment
        write(place, INCUMBENT)
        _require_no_order(place)
    missing, entries = _await(place, to, started + (wait if facts else 0.0), ranks)  # a server that is down will not answer
    result = {"affected": True, "reason": "", "byte": to, "ranks": entries, "missing": missing, "seconds": time.monotonic() - started}
    if before != to or missing:
        record.note(place, "control", to=to, before=before, missing=missing, seconds=round(result["seconds"], 4))
    return result


def show(place):
    """The byte and what the ranks make of it."""
    release = ""
    with contextlib.suppress(HostFault, OSError):
        release = _known(place)["release"]
    return {"byte": read(place), "release": release, "ordered": ordered(place), "ranks": [_short(e) for e in read_facts(place)]}


def ordered(place):
    """Whether somebody has ordered the fallback, and neither taken that back nor brought another release."""
    return os.path.exists(_order_path(place))


def _order(place):
    """Never raises: the byte counts, whatever the disk says."""
    with contextlib.suppress(OSError):
        open(_order_path(place), "w").close()


def _require_no_order(place):
    if ordered(place):
        raise HostFault("fallback_ordered", "somebody ordered the hot fallback", "`phase rollback` restores; `phase rollback --hot --undo` takes it back.")


def _order_path(place):
    return os.path.join(place.run, "fallback-ordered")


def read_facts(place):
    """The fact files of the ranks that live; half-written or old ones do not count."""
    found = []
    for path in sorted(glob.glob(os.path.join(place.root, "facts", "rank-*.json"))):
        with contextlib.suppress(OSError, ValueError):
            age = time.time() - os.stat(path).st_mtime
            with open(path) as file:
                entry = json.load(file)
            if age < FRESH_SECONDS:
                found.append(entry)
    return found


def _await(place, to, until, ranks):
    """(why not every rank has acknowledged, or "", the acknowledgements)."""
    while True:
        facts = read_facts(place)
        missing = _missing(facts, to, ranks)
        if not missing or time.monotonic() >= until:
            return missing, [_short(entry) for entry in facts]
        time.sleep(POLL)


def _missing(facts, to, ranks):
    if not facts:
        return "no rank reports"
    wanted = ranks or max(entry.get("ranks", 1) for entry in facts)
    if len(facts) < wanted:
        return "%d of %d ranks report" % (len(facts), wanted)
    for entry in facts:
        hot = entry.get("hot", {})
        if not hot.get("able"):
            return "rank %s cannot be switched: %s" % (entry.get("rank"), hot.get("reason") or "its plugin is older than the hot fallback")
        if hot.get("choice") != to:
            return "rank %s still says %s" % (entry.get("rank"), hot.get("choice"))
    return ""


def _short(entry):
    hot = entry.get("hot", {})
    return {"rank": entry.get("rank"), "release": entry.get("release", ""), **{name: hot.get(name) for name in ("able", "choice", "from_forward", "confirmed", "at", "why", "tripped")}}


def _strayed(place, goal):
    """Whether the host serves something else than what a rollback goes to, or might soon: a lease is active."""
    lease = record.read(place)
    return record.active(lease) or place.link_target(place.current) != (goal or place.link_target(place.last_good))


def _known(place):
    """{release: what started last, fallen: releases whose byte was the incumbent's}."""
    return {"release": "", "fallen": [], **(read_json(_record_path(place)) or {})}


def _record_path(place):
    return os.path.join(place.run, "control.json")


def main(arguments):
    if len(arguments) != 2 or arguments[0] not in ("show", *BYTES):
        print(__doc__, file=sys.stderr)
        return 2
    place = Place(arguments[1])
    if arguments[0] in BYTES:
        if arguments[0] == INCUMBENT:
            _order(place)
        else:
            remove(_order_path(place))
        write(place, arguments[0])
        record.note(place, "control", to=arguments[0], by="hand")
        _await(place, arguments[0], time.monotonic() + 2.0, 0)
    print(json.dumps(show(place), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
