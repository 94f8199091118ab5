"""Choosing who is canary and who is control, and who moves in which wave: pure, so that `phase plan` shows the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from phases.base.errors import UsageError
from phases.engines.ssh.host import Host
from phases.production.settings import Amount
from phases.trial.settings import Design


@dataclass(frozen=True)
class Arms:
    """The two arms of a canary and the workers left alone."""

    canary: tuple[Host, ...]
    control: tuple[Host, ...]
    rest: tuple[Host, ...]

    @property
    def share(self) -> float:
        """Share of the fleet's workers that the canary is: what a router that spreads evenly sends it."""
        return len(self.canary) / (len(self.canary) + len(self.control) + len(self.rest))


class Choice(Protocol):
    """How many workers of which kind each arm takes."""

    @property
    def canary(self) -> Amount: ...
    @property
    def control(self) -> Amount: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def design(self) -> Design: ...


def choose_arms(workers: Sequence[Host], settings: Choice) -> Arms:
    """Canaries first, then controls, in the order of the playbook among the workers with the wanted labels.

    Both arms take like workers: a canary of one kind (same labels `arch`, `tp`) is compared with a control of the same kind.
    In the switchback design there is no control: canary workers are compared with themselves.

    Raises:
        UsageError: there are not enough workers.
    """
    fit = [host for host in workers if settings.labels.items() <= host.labels.items()]
    canaries = fit[: settings.canary.of(len(workers))]
    if not canaries:
        raise UsageError(
            f"no worker has the labels {settings.labels}.", hint="Correct `labels` of the canary or of the hosts."
        )
    if settings.design is Design.SWITCHBACK:  # they are their own control
        return Arms(tuple(canaries), (), tuple(host for host in workers if host not in canaries))
    kinds = {_kind(host) for host in canaries}
    others = [host for host in fit if host not in canaries and _kind(host) in kinds]
    controls = others[: settings.control.of(len(workers))]
    if len(controls) < max(1, settings.control.of(len(workers))):
        raise UsageError(
            f"{len(fit)} workers fit, which is not enough for {len(canaries)} canary and {settings.control.of(len(workers))} control workers of the same kind.",
            hint="Choose fewer, or put the control's kind of worker into the fleet.",
        )
    rest = tuple(host for host in workers if host not in canaries and host not in controls)
    return Arms(tuple(canaries), tuple(controls), rest)


def waves(workers: Sequence[Host], sizes: Sequence[Amount], moved: Sequence[str]) -> list[tuple[Host, ...]]:
    """Workers of each wave: those moved already (the canaries) count towards the first ones and do not move again."""
    order = [host for host in workers if host.name in moved] + [host for host in workers if host.name not in moved]
    done, planned = 0, []
    for size in sizes:
        end = max(done, size.of(len(order)))
        planned.append(tuple(host for host in order[done:end] if host.name not in moved))
        done = end
    return [wave for wave in planned if wave]


def like_for_like(moved: Sequence[Host], unmoved: Sequence[Host]) -> tuple[tuple[Host, ...], tuple[Host, ...]]:
    """(canary, control) of a wave: of each kind as many moved as unmoved workers, so that both arms are the same mix; maybe none."""
    canary: list[Host] = []
    control: list[Host] = []
    for kind in dict.fromkeys(map(_kind, moved)):
        ours, theirs = ([host for host in hosts if _kind(host) == kind] for hosts in (moved, unmoved))
        canary += ours[: len(theirs)]
        control += theirs[: len(ours)]
    return tuple(canary), tuple(control)


def kinds_of(workers: Sequence[Host]) -> dict[str, str]:
    """Kind of each worker by name, for people: `tp 2`; empty texts where all are alike."""
    kinds = {host.name: _kind(host) for host in workers}
    if len(set(kinds.values())) < 2:
        return dict.fromkeys(kinds, "")
    several = len({arch for arch, _ in kinds.values()}) > 1
    return {name: f"{arch + ' ' if several and arch else ''}tp {tp or 1}" for name, (arch, tp) in kinds.items()}


def batches(hosts: Sequence[Host], in_service: int, floor: int) -> list[tuple[Host, ...]]:
    """Groups that may be out of service together without falling under the floor.

    Raises:
        UsageError: not even one may.
    """
    room = in_service - floor
    if room < 1 and hosts:
        raise UsageError(
            f"{in_service} workers are in service and {floor} must stay, so none can be taken out.",
            hint="Lower `production.min_available`, or bring more workers into service.",
        )
    return [tuple(hosts[at : at + room]) for at in range(0, len(hosts), max(room, 1))]


def _kind(host: Host) -> tuple[str, str]:
    return host.labels.get("arch", ""), host.labels.get("tp", "")
