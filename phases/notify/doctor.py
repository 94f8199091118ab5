"""What `phase doctor` looks at for the sections `notify` and `metrics`: whether people and Prometheus would be told. Nothing is sent."""

from __future__ import annotations

import os
from collections.abc import Iterable

from phases.base.errors import PhaseError
from phases.base.findings import Check, Finding, Health
from phases.notify.targets import Target, Webhook, targets_of
from phases.playbook.schema import Playbook


def checks(playbook: Playbook) -> list[tuple[str, Check]]:
    """The checks by name; none where the playbook has neither section."""
    found: list[tuple[str, Check]] = []
    if settings := playbook.sections.get("notify"):
        found += [
            ("notify", lambda target=target: check_target(target))
            for target in targets_of(settings, playbook.path.parent)
        ]
    if playbook.sections.get("metrics"):
        found.append(("metrics", lambda: check_textfile(playbook)))
    return found


def check_target(target: Target) -> Iterable[Finding]:
    """A warning: a run goes on without telling."""
    try:
        target.ready()
        if isinstance(target, Webhook) and target.in_the_clear():
            return [
                Finding(
                    "notify",
                    Health.WARNING,
                    f"{target.name}: its token goes over http, unencrypted",
                    "Give an https:// address.",
                )
            ]
    except PhaseError as fault:
        return [
            Finding(
                "notify",
                Health.WARNING,
                f"{target.name}: {fault.message}",
                fault.hint or "Set it where `phase` runs; `phase notify test` shows whether it works.",
            )
        ]
    return [Finding("notify", Health.OK, target.name)]


def check_textfile(playbook: Playbook) -> Iterable[Finding]:
    directory = (playbook.path.parent / playbook.sections["metrics"].textfile).parent
    if not directory.is_dir():
        return [
            Finding(
                "metrics",
                Health.WARNING,
                f"there is no directory {directory}",
                "Make it, or name that of node_exporter's textfile collector.",
            )
        ]
    if not os.access(directory, os.W_OK | os.X_OK):
        return [
            Finding(
                "metrics",
                Health.WARNING,
                f"{directory} cannot be written by this user",
                "Give this user's group the right to write there.",
            )
        ]
    return [Finding("metrics", Health.OK, str(directory))]
