"""The `tp8-canary` section of a playbook."""

from __future__ import annotations

from dataclasses import dataclass

from phases.playbook.located import Mistakes, Node
from phases.playbook.typed import setting
from phases.production.settings import Amount
from phases.trial.settings import Design, JudgeSettings, SwitchbackSettings


@dataclass(frozen=True)
class CanarySettings:
    """Phase 3: a few workers on the candidate beside as many control workers of the same age."""

    judge: JudgeSettings = setting(help="how they are judged")
    canary: Amount = setting(help="workers that get the candidate", factory=lambda: Amount(count=1))
    control: Amount = setting(
        help="workers restarted with the incumbent, to compare with", factory=lambda: Amount(count=1)
    )
    labels: dict[str, str] = setting(help="only workers with these labels are chosen", factory=dict)
    design: Design = setting(
        Design.PARALLEL,
        help="parallel: beside control workers; switchback: in turns on the canary workers themselves, by the hot fallback",
    )
    turns: SwitchbackSettings = setting(help="switchback: how the turns are taken", factory=SwitchbackSettings)
    share_tolerance: float = setting(
        0.15, above=0, at_most=1, help="how far the observed share of the canary may be from its share of workers"
    )

    def check(self, node: Node, mistakes: Mistakes) -> None:
        for name in ("canary", "control"):
            amount: Amount = getattr(self, name)
            if amount.count == 0 or amount.percent == 0:
                mistakes.add(node.get(name) or node, f"{node.path}: {name} needs at least one worker")
        if self.design is Design.SWITCHBACK:
            self._check_turns(node.get("turns") or node, mistakes)

    def _check_turns(self, node: Node, mistakes: Mistakes) -> None:
        """The deadline is looked at after each pair of turns, and counts from the first: neither may keep a canary under users for longer."""
        for what, seconds in (("two turns take", 2 * self.turns.period), ("a lead_in takes", self.turns.lead_in)):
            if seconds > self.judge.deadline:
                mistakes.add(
                    node,
                    f"{node.path}: {what} {seconds:g} s, longer than the judge's deadline of {self.judge.deadline:g} s",
                )
