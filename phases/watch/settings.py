"""The `watch` section of a playbook."""

from __future__ import annotations

from dataclasses import dataclass

from phases.playbook.typed import setting
from phases.trial.settings import JudgeSettings, ReferenceSettings


@dataclass(frozen=True)
class WatchSettings:
    """`phase watch`: production after a rollout against the reference recorded then."""

    judge: JudgeSettings = setting(help="what counts as a regression")
    reference: ReferenceSettings = setting(
        help="when the latencies of Phase 3 may still judge", factory=ReferenceSettings
    )
    interval: float = setting(60.0, duration=True, above=0, help="time between looks")
    roll_back: bool = setting(True, help="go back by itself when a regression is found; false: only say so")
