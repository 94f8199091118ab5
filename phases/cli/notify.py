"""`phase notify`: send a test message to whom a playbook tells of gates and rollbacks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phases.base.errors import Exit, UsageError
from phases.cli.common import STYLES, example, json_option, load_playbook, playbook_option, print_json, show_table
from phases.cli.lazy import LazyGroup

if TYPE_CHECKING:
    from phases.notify.targets import Target
    from phases.playbook.schema import Playbook


@click.group(
    cls=LazyGroup,
    table={"test": ("phases.cli.notify:test", "Send a test message to every hook and webhook.")},
    epilog=example("phase notify test"),
)
def notify() -> None:
    """Hooks and webhooks of the playbook's `notify` section.

    They are told of: gate-waiting, gate-passed, gate-failed, gate-inconclusive, run-stopped, rollback-started, rollback-ended, regression.
    """


@click.command(epilog=example("phase notify test", "phase notify test -p playbooks/production.yaml --json"))
@playbook_option
@json_option
def test(playbook_path: Path | None, as_json: bool) -> None:
    """Send a message of the event `test` to every hook and webhook, now, and tell how each took it.

    One attempt each, without retries; what a hook prints is shown. Exits with 1 when one was not told.
    """
    playbook = load_playbook(playbook_path)
    rows = [_send(playbook, target) for target in _targets(playbook)]
    if as_json:
        print_json({"targets": rows})
    else:
        show_table(
            ["target", "events", "result", "why"],
            [[r["target"], ", ".join(r["events"]) or "all", r["result"], r["why"]] for r in rows],
            STYLES,
        )
    sys.exit(int(Exit.PASSED if all(row["result"] == "ok" for row in rows) else Exit.OPERATIONAL))


def _targets(playbook: Playbook) -> tuple[Target, ...]:
    from phases.notify.targets import Hook, targets_of

    settings = playbook.sections.get("notify")
    targets = targets_of(settings, playbook.path.parent) if settings else ()
    if not targets:
        raise UsageError(
            f"{playbook.path.name} tells nobody: it has no `notify` section with hooks or webhooks.",
            hint="See `phase playbook schema`.",
        )
    for target in targets:
        if isinstance(target, Hook):
            target.output = sys.stderr.fileno()
    return targets


def _send(playbook: Playbook, target: Target) -> dict[str, Any]:
    from phases.base.clock import SystemClock
    from phases.harness import contract
    from phases.notify.targets import DeliveryError
    from phases.notify.teller import test_message

    row = {"target": target.name, "events": [event.value for event in target.events], "result": "ok", "why": ""}
    try:
        target.deliver(test_message(playbook, contract.load(playbook.kernel).name, SystemClock().now()))
    except DeliveryError as fault:
        row |= {"result": "failed", "why": fault.message}
    finally:
        target.abandon()  # Ctrl-C in the middle: a hook has a session of its own and would go on
    return row
