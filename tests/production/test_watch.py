"""What a watch makes of a fleet it cannot ask: production is a stand-in here, since a sick sshd or router is all that matters."""

from __future__ import annotations

from dataclasses import dataclass, field

from phases.base.verdict import Verdict
from phases.engines.ssh.errors import RouterError
from phases.engines.ssh.host import Host
from phases.production.production import WorkerState
from phases.trial.end import Fault
from phases.watch.phase import _look, _standing

HOST = Host("w1", "10.0.0.1", "/srv/w1")


@dataclass
class Seen:
    """A production that is seen as these states, or whose router does not answer."""

    states: list[WorkerState]
    said: list[str] = field(default_factory=list)

    def observe(self) -> list[WorkerState]:
        if not self.states:
            raise RouterError("http://router does not answer (ConnectTimeout).")
        return self.states

    def seen_mixed(self, host: Host, digest: str) -> str:
        return ""

    def progress(self, line: str) -> None:
        self.said.append(line)


def test_a_worker_that_serves_is_no_regression_because_ssh_does_not_answer() -> None:
    production = Seen([WorkerState(HOST, error="cannot connect", serving=True, in_service=True)])
    assert _standing(production) is None  # type: ignore[arg-type]
    assert production.said == ["w1 serves users, and cannot be asked what it runs: cannot connect"]


def test_a_worker_that_does_not_serve_is_one() -> None:
    production = Seen([WorkerState(HOST, error="cannot connect", in_service=True)])
    assert _standing(production) == Fault("w1", "cannot connect", incumbent=False)  # type: ignore[arg-type]


def test_a_router_that_does_not_answer_ends_no_watch_and_rolls_nothing_back() -> None:
    verdict = _look(None, Seen([]), None, None, print)  # type: ignore[arg-type]
    assert verdict.verdict is Verdict.INCONCLUSIVE and "does not answer" in verdict.reason


def test_a_worker_that_may_be_in_service_under_another_name_is_no_regression_and_no_success() -> None:
    doubt = "the router lists http://x:1 (x cannot be resolved here), which may be it"
    state = WorkerState(HOST, "a", "a", serving=True, in_service=None, doubt=doubt)
    verdict = _look(None, Seen([state]), None, None, print)  # type: ignore[arg-type]
    assert verdict.verdict is Verdict.INCONCLUSIVE and doubt in verdict.reason
