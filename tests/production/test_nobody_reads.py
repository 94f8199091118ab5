"""Output that nobody takes any more (a closed terminal, a broken ssh connection, `| head`) ends no work on production and changes no exit
code; and what was interrupted does not say that nothing was done."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing

import click
import pytest
from rich.console import Console

from phases.base.errors import Exit
from phases.cli import failures
from phases.cli.watchers import Live
from phases.run.steps import Step
from phases.tp8_canary import steps as canary
from tests.production.light_fleet import LightFleet


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightFleet]:
    with closing(LightFleet(tmp_path_factory.mktemp("light"), ssh=0, count=3, lease=600.0)) as made:
        yield made.up()


@pytest.mark.slow
@pytest.mark.fleet
def test_a_rollback_ends_though_nobody_reads_it(fleet: LightFleet) -> None:
    killed = fleet.phase("run", "tp8-canary", "--yes", kill=("step-finished", canary.CANARY, "after"))
    assert killed.returncode == -9, killed.stdout
    with fleet.start("rollback", "--yes") as process:
        assert process.stdout
        process.stdout.close()
    assert process.returncode == 0
    assert not fleet.not_converged(fleet.digests["incumbent"])
    with fleet.start("run", "tp8-canary", "--yes") as process:
        assert process.stdout
        process.stdout.close()
    assert process.returncode == 0
    assert not fleet.not_converged(fleet.digests["incumbent"])


class Gone(io.StringIO):
    """A terminal that has been closed."""

    def __init__(self, fault: OSError) -> None:
        super().__init__()
        self.fault = fault

    def write(self, text: str) -> int:
        raise self.fault

    def flush(self) -> None:
        raise self.fault

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("fault", [OSError(5, "Input/output error"), BrokenPipeError(32, "Broken pipe")])
def test_a_live_view_on_a_terminal_that_is_gone_raises_nothing(fault: OSError) -> None:
    live = Live()
    live.console = Console(file=Gone(fault), force_terminal=True)
    step = Step("bake", "both arms", lambda context: {})
    live.run_started("run-1", [step])
    live.step_started(step, 1)
    live.step_progress(step, "a line")
    live.step_finished(step, {}, 1.0, kept=False)
    live.step_started(step, 1)
    live.step_failed(step, RuntimeError("no"))
    live.run_finished("run-1", Exit.PASSED)


def test_what_was_interrupted_at_work_does_not_say_that_nothing_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def work() -> None:
        raise KeyboardInterrupt

    assert failures._run(work, []) == Exit.OPERATIONAL
    assert "give the command again" in capsys.readouterr().err
