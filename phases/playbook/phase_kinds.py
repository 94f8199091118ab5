"""The phases there are, in the order in which a kernel goes through them, and where each is written."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PhaseKind:
    """One phase.

    Attributes:
        number: 1 to 4; a phase may only start when those before it in the playbook have passed and been approved.
        name: what people type.
        proves: one line for `phase plan` and `phase --help`.
        script: `module:function`; the function takes a PhaseRun and returns the list of steps.
        settings: `module:name` of the dataclass that declares the phase's own keys of the playbook
            (`phases.playbook.typed`).
        clean_tree: whether uncommitted changes stop the phase.
        changes_production: whether a person is asked before it starts.
    """

    number: int
    name: str
    proves: str
    script: str
    settings: str
    clean_tree: bool = True
    changes_production: bool = False


PHASES: dict[str, PhaseKind] = {
    kind.name: kind
    for kind in (
        PhaseKind(
            1,
            "build-parity",
            "the kernel builds for every architecture, computes the right numbers and is faster than its baseline",
            "phases.build_parity.phase:build_parity",
            "phases.playbook.schema:BuildParitySettings",
            clean_tree=False,
        ),
        PhaseKind(
            2,
            "sglang-integration",
            "inside a real SGLang server the kernel is picked up, outputs agree, accept length holds, latency improves",
            "phases.sglang_integration.phase:sglang_integration",
            "phases.serving.settings:IntegrationSettings",
        ),
        PhaseKind(
            3,
            "tp8-canary",
            "on a few tensor-parallel workers under live traffic latency does not regress against control workers",
            "phases.tp8_canary.phase:tp8_canary",
            "phases.tp8_canary.settings:CanarySettings",
            changes_production=True,
        ),
        PhaseKind(
            4,
            "full-rollout",
            "the same, wave by wave, on the whole fleet, then a soak",
            "phases.full_rollout.phase:full_rollout",
            "phases.full_rollout.settings:RolloutSettings",
            changes_production=True,
        ),
    )
}

# No phase of a playbook: what a rollback's own checkpoint is recorded as.
ROLLBACK_PHASE = "rollback"

# Top-level sections of the playbook that several phases share: key -> dataclass, as PhaseKind.settings.
SHARED_SECTIONS: dict[str, str] = {
    "fleet": "phases.engines.ssh.settings:FleetSettings",
    "embedded_fleet": "phases.engines.embedded.fleet:EmbeddedFleetSettings",
    "production": "phases.production.settings:ProductionSettings",
    "watch": "phases.watch.settings:WatchSettings",
    "notify": "phases.notify.settings:NotifySettings",
    "metrics": "phases.status.textfile:MetricsSettings",
}

# What reads a rule of a gate, and what describes rules to editors.
RULE_READER = "phases.gate.rules:parse"
RULE_SCHEMA = "phases.gate.rules:rule_schema"


def load_object(reference: str) -> Any | None:
    """The object `module:name` names; None when this installation has no such module."""
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as fault:
        if fault.name and (fault.name == module_name or module_name.startswith(f"{fault.name}.")):
            return None
        raise
    return getattr(module, name)
