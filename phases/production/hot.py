"""The hot fallback over the fleet: running servers go from the candidate's kernel to the incumbent's, and back, without a restart.

On each host one byte is set over the session and every rank acknowledges in its fact file (`onhost/control.py`). Traffic is *safe*
once all ranks of all affected hosts have: no forward begins with the candidate any more. It is *restored* only when the hosts
run, observed, a release that was verified good; that needs restarts. Hosts whose ranks do not acknowledge are named, and the restart
that follows is what makes them safe.

This module imports little, and nothing that is not needed to reach the hosts: `phase rollback` waits for it before traffic is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from phases.base.clock import Clock
from phases.base.errors import joined
from phases.engines.ssh.fleet import Fleet
from phases.engines.ssh.host import Host
from phases.engines.ssh.session import HostSession, op
from phases.fleet.sections import fleet_of_playbook, section_of
from phases.playbook.schema import Playbook
from phases.production.settings import ProductionSettings

if TYPE_CHECKING:
    from phases.production.production import Production

CANDIDATE, INCUMBENT = "candidate", "incumbent"
ANSWER_SECONDS = 5.0  # for connecting and answering, beyond what the ranks get
AT_ONCE = 128  # hosts; more than for slower work, since this one is about a second


class Reached(Protocol):
    """What a fallback needs of production: `Production` has it, and `Hosts`, which is there sooner."""

    @property
    def settings(self) -> ProductionSettings: ...
    @property
    def workers(self) -> tuple[Host, ...]: ...
    @property
    def fleet(self) -> Fleet: ...
    @property
    def clock(self) -> Clock: ...


@dataclass(frozen=True)
class Hosts:
    """The workers of a playbook and a way to each; as a context manager it closes its sessions."""

    settings: ProductionSettings
    workers: tuple[Host, ...]
    fleet: Fleet
    clock: Clock

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.close()


def hosts_of(playbook: Playbook, clock: Clock, needed_by: str) -> Hosts:
    """Nothing is connected yet. Raises PlaybookError when the playbook names no fleet or no production."""
    fleet = fleet_of_playbook(playbook, needed_by, choose_ports=True)
    workers = fleet.workers()
    return Hosts(section_of(playbook, "production", needed_by), workers, Fleet(workers, limit=fleet.at_once), clock)


@dataclass(frozen=True)
class Answer:
    """One host's.

    Attributes:
        affected: false where the host runs what a rollback goes to anyway.
        ranks: acknowledgements as `onhost/control.py` reads them: rank, choice, from_forward, confirmed, at, why, tripped.
        missing: why not every rank has acknowledged, or "".
        seconds: from the order to this host's answer, on this machine's clock; logging in is part of it.
        on_host: from the byte to the last acknowledgement, on the host's clock.
    """

    host: str
    affected: bool
    ranks: tuple[dict[str, Any], ...] = ()
    missing: str = ""
    seconds: float = 0.0
    on_host: float = 0.0
    asked: bool = True  # false: the host could not be


@dataclass(frozen=True)
class HotSwitch:
    """What one command to the fleet came to.

    Attributes:
        ended: when the last host had answered, seconds since the epoch; None where nobody noted it.
    """

    to: str
    answers: tuple[Answer, ...]
    ended: float | None = None

    @property
    def affected(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if answer.affected)

    @property
    def missing(self) -> dict[str, str]:
        return {answer.host: answer.missing for answer in self.affected if answer.missing}

    @property
    def left_alone(self) -> tuple[str, ...]:
        """Hosts that run what the order goes back to, where it is not known whether any has strayed: all that may have could not be asked."""
        unknown = self.affected and not any(answer.asked for answer in self.affected)
        return tuple(answer.host for answer in self.answers if not answer.affected) if unknown else ()

    @property
    def safe(self) -> bool:
        """Every rank of every affected host has acknowledged; false when no host was affected."""
        return bool(self.affected) and not self.missing

    @property
    def ranks(self) -> int:
        return sum(len(answer.ranks) for answer in self.affected if not answer.missing)

    @property
    def seconds(self) -> float:
        """From the order to the last acknowledging rank."""
        return max((answer.seconds for answer in self.affected if not answer.missing), default=0.0)

    def describe(self) -> str:
        done = [answer.host for answer in self.affected if not answer.missing]
        said = (
            f"{self.ranks} rank{'s' * (self.ranks != 1)} of {', '.join(done)} on the {self.to}'s kernel after {self.seconds:.2f} s"
            if done
            else "no rank switched"
        )
        return joined([said, *(f"{host}: {why}" for host, why in self.missing.items())])

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "host": a.host,
                "affected": a.affected,
                "ranks": list(a.ranks),
                "missing": a.missing,
                "seconds": round(a.seconds, 3),
                "on_host": round(a.on_host, 4),
            }
            for a in self.answers
        ]
        return {"to": self.to, "safe": self.safe, "seconds": round(self.seconds, 3), "ranks": self.ranks, "hosts": rows}


def fall_back(
    production: Reached,
    *,
    target: str = "",
    hosts: Sequence[Host] | None = None,
    everywhere: bool = False,
    turn: bool = False,
) -> HotSwitch:
    """Running servers to the incumbent's kernel; needs no lock and works in any state.

    Args:
        target: digest a rollback goes to; empty: each host's last-good. hosts: default: all.
        everywhere: also hosts that run what a rollback goes to. turn: as in `go_forward`; it is no order to stay there.
    """
    return _switch(production, INCUMBENT, hosts, lambda host: {"goal": target, "everywhere": everywhere, "turn": turn})


def go_forward(production: Production, hosts: Sequence[Host], *, turn: bool = False) -> HotSwitch:
    """Running servers to the candidate's kernel, under this run's lock on each host.

    Args:
        turn: one of a switchback's, which does not override whoever has ordered the fallback meanwhile.
    """
    return _switch(
        production,
        CANDIDATE,
        hosts,
        lambda host: {"token": production.take_lock(production.fleet.session(host)).token, "turn": turn},
    )


def fall_back_by_hand(production: Reached, target: str = "") -> HotSwitch:
    """Hosts that have strayed from what a rollback goes to; when none has, the latest rollout is what is meant: all of them."""
    found = fall_back(production, target=target)
    return found if found.affected else fall_back(production, target=target, everywhere=True)


def fallen_back(production: Production) -> tuple[Host, ...]:
    """Hosts on which a rank that could run the candidate says that it runs the incumbent next."""
    shown = production.fleet.each(
        lambda session: session.do(op("control.show"))[0], deadline=2 * ANSWER_SECONDS
    ).check()
    return tuple(
        host
        for host in production.workers
        if any(rank["able"] and rank["choice"] == INCUMBENT for rank in shown[host.name]["ranks"])
    )


def kernel_of(session: HostSession) -> str:
    """candidate, incumbent or mixed: what the host's ranks begin the next forward with; empty where they cannot be switched."""
    said = {rank["choice"] for rank in session.do(op("control.show"))[0]["ranks"] if rank["able"]}
    return "mixed" if len(said) > 1 else next(iter(said), "")


def _switch(production: Reached, to: str, hosts: Sequence[Host] | None, arguments: Any) -> HotSwitch:
    started, wait = production.clock.monotonic(), production.settings.fallback.wait

    def act(session: HostSession) -> tuple[dict[str, Any], float]:
        ranks = int(session.host.labels.get("tp", "1"))
        asked = op("control.switch", to=to, wait=wait, ranks=ranks, **arguments(session.host))
        found = session.do(asked, timeout=wait + ANSWER_SECONDS)[0]
        return found, production.clock.monotonic() - started

    chosen = production.workers if hosts is None else tuple(hosts)
    turns = -(-len(chosen) // AT_ONCE)
    results = production.fleet.each(act, hosts=chosen, limit=AT_ONCE, deadline=turns * (wait + 2 * ANSWER_SECONDS))
    return HotSwitch(to, tuple(_answer(host, results[host.name]) for host in chosen), production.clock.now())


def _answer(host: Host, result: Any) -> Answer:
    if not result.ok:  # not asked, so nothing is known: what follows must take it for affected
        return Answer(host.name, True, missing=result.told, asked=False)
    found, seconds = result.value
    return Answer(host.name, found["affected"], tuple(found["ranks"]), found["missing"], seconds, found["seconds"])
