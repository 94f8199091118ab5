"""Who serves users, seen at one moment: one reading of the router, and who answers."""

from __future__ import annotations

from dataclasses import dataclass

from phases.engines.ssh.placing import Routed


@dataclass(frozen=True)
class Service:
    """Workers by name.

    Attributes:
        routed: whom the router sends requests to. answering: who answers a health check. hanging: of those, who gives no completion.
    """

    routed: Routed
    answering: frozenset[str]
    hanging: frozenset[str] = frozenset()

    def serves(self, name: str) -> bool | None:
        """Whether users are served by a worker; None where it answers, and nobody can tell whether it is sent requests."""
        return self.routed.in_service(name) if name in self.answering else False

    @property
    def serving(self) -> frozenset[str]:
        """Those that certainly serve users."""
        return frozenset(name for name in self.answering if self.serves(name))

    @property
    def maybe_serving(self) -> frozenset[str]:
        """Those, and the others that may: a router that is silent to us may well send them requests."""
        return frozenset(name for name in self.answering if self.serves(name) is not False)
