"""The `full-rollout` section of a playbook."""

from __future__ import annotations

from dataclasses import dataclass

from phases.playbook.located import Mistakes, Node
from phases.playbook.typed import setting
from phases.production.settings import Amount
from phases.trial.settings import JudgeSettings, ReferenceSettings


@dataclass(frozen=True)
class RolloutSettings:
    """Phase 4: wave by wave, judged against workers not yet moved, then a soak."""

    judge: JudgeSettings = setting(help="how each wave is judged")
    waves: tuple[Amount, ...] = setting(
        (Amount(percent=25), Amount(percent=50), Amount(percent=100)),
        not_empty=True,
        help="cumulative size of each wave",
    )
    reference: ReferenceSettings = setting(
        help="when the latencies of Phase 3 may still judge", factory=ReferenceSettings
    )
    soak: float = setting(300.0, duration=True, at_least=0, help="time under watch with the whole fleet moved")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        last = self.waves[-1]
        if last.percent != 100:
            mistakes.add(node.get("waves") or node, f"{node.path}: the last wave must be percent: 100")
