"""The hosts of a run, each with one session kept open, and the same action on many of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from phases.base.errors import UsageError
from phases.engines.ssh.fanout import HostResult, Results, fan_out
from phases.engines.ssh.host import Host
from phases.engines.ssh.session import HostSession
from phases.engines.ssh.transport import Connect, connect

T = TypeVar("T")


class Fleet:
    """Hosts by name, with sessions that are reused from one step to the next.

    Args:
        limit: hosts worked on at once. connect: how to reach a host; tests pass their own.
    """

    def __init__(self, hosts: Sequence[Host], *, limit: int = 16, connect: Connect = connect) -> None:
        names = [host.name for host in hosts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"two hosts are called {twice[0]}.", hint="Give every worker a name of its own.")
        self.hosts, self.limit, self._connect = tuple(hosts), limit, connect
        self._sessions: dict[str, HostSession] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise UsageError(
            f"there is no host {name} in the fleet.", hint=f"Known: {', '.join(host.name for host in self.hosts)}."
        )

    def session(self, host: Host) -> HostSession:
        """The host's session; the connection is made when it is first used."""
        with self._lock:
            if host.name not in self._sessions:
                self._sessions[host.name] = HostSession(self._connect(host))
            return self._sessions[host.name]

    def adopt(self, session: HostSession) -> None:
        """Use this session for its host from now on (a lease's confirmation brought a new connection)."""
        with self._lock:
            self._sessions[session.host.name] = session

    def each(
        self,
        act: Callable[[HostSession], T],
        *,
        hosts: Sequence[Host] | None = None,
        deadline: float | None = None,
        limit: int | None = None,
        on_result: Callable[[HostResult[T]], None] = lambda result: None,
    ) -> Results[T]:
        """`fan_out` of an action on sessions; what hangs at the deadline has its connection closed. `limit`: another than the fleet's."""
        chosen = self.hosts if hosts is None else hosts
        return fan_out(
            chosen,
            lambda host: act(self.session(host)),
            limit=limit or self.limit,
            deadline=deadline,
            abandon=self._abandon,
            on_result=on_result,
        )

    def close(self) -> None:
        """End all sessions, side by side; the hosts drop locks that no lease has taken over."""
        with self._lock:
            sessions, self._sessions = dict(self._sessions), {}
        hosts = [session.host for session in sessions.values()]
        if hosts:
            fan_out(hosts, lambda host: sessions[host.name].close(), limit=len(hosts), deadline=15.0)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _abandon(self, host: Host) -> None:
        with self._lock:
            session = self._sessions.pop(host.name, None)
        if session is not None:
            with contextlib.suppress(Exception):
                session.transport.close()
