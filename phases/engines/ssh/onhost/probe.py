"""A minimal HTTP GET from the host itself, to wait until its service answers."""

from __future__ import annotations

import socket
import time

from place import HostFault


def wait_ready(port, path="/health", host="127.0.0.1", timeout=60.0, status=None):
    """Poll until a GET answers 200; HostFault when it does not in time, or as soon as `status()` says the service is gone."""
    started = time.monotonic()
    last = "no answer"
    pause = 0.01
    while time.monotonic() - started < timeout:
        try:
            code = get(host, int(port), path, min(5.0, timeout))
            if code == 200:
                return {"seconds": round(time.monotonic() - started, 3)}
            last = "status %d" % code
        except OSError as fault:
            last = str(fault)
        if status is not None and not status()["running"]:
            raise HostFault("died", "the service ended while it was waited for", "Read its log.")
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)
    raise HostFault("not_ready", "http://%s:%s%s did not answer 200 in %g s (%s)" % (host, port, path, timeout, last), "Read the service's log.")


def get(host, port, path, timeout):
    """Status code of one GET; OSError when there is no HTTP answer."""
    with socket.create_connection((host, port), timeout) as connection:
        connection.sendall(("GET %s HTTP/1.0\r\nHost: %s\r\n\r\n" % (path, host)).encode())
        line = connection.makefile("rb").readline(4096)
    try:
        return int(line.split()[1])
    except (IndexError, ValueError):
        raise ConnectionError("not an HTTP answer: %r" % line[:60])
