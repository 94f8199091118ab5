"""What the service runs: the launch arguments of `current`, filled in with what belongs to this host."""

from __future__ import annotations

import os
import sys

import store
from place import NEVER, HostFault, read_json


def launch_plan(place):
    """(argv, environment, working directory) of the current release.

    `current` is resolved here, once: a server that imports late must not find another release's files half way through.
    HostFault when there is no current release, it is incomplete, or a {name} in its arguments has no value in host.json.
    """
    digest = place.link_target(place.current)
    if digest == NEVER:
        raise HostFault("nothing_current", "%s has no current release" % place.root, "Push and switch one first.")
    if not store.is_complete(place, digest):
        raise HostFault("incomplete", "current release %s is not complete" % digest[:12], "Push it again.")
    directory = place.release(digest)
    launch = store.load_manifest(directory, digest)["launch"]
    values = {"release": directory, "root": place.root, "python": sys.executable}
    values.update(read_json(place.host_file) or {})
    environment = dict(os.environ, **{name: fill(text, values) for name, text in launch.get("env", {}).items()})
    site = os.path.join(directory, launch.get("site", "site"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [site, environment.get("PYTHONPATH", "")]))
    environment.update(PHASEGATE_RELEASE=digest, PHASEGATE_ROOT=place.root, PHASEGATE_CONTROL=os.path.join(place.root, "control"))
    return [fill(text, values) for text in launch["argv"]], environment, directory


def fill(text, values):
    """Replace {name} by the host's value; other braces (JSON arguments) stay as they are."""
    for name, value in values.items():
        text = text.replace("{%s}" % name, str(value))
    for name in ("port", "python", "release", "root"):
        if "{%s}" % name in text:
            raise HostFault("no_value", "the launch argument %r needs a value for %s" % (text, name), "Give it under `vars` of the host.")
    return text
