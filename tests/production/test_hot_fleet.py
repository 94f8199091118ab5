"""The hot fallback over a fleet: fan-out, rollbacks that begin with it, what is left when ranks do not answer, the policy, undoing it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phases.base.clock import SystemClock
from phases.base.errors import Exit
from phases.base.results import Results
from phases.base.scraping import get_text
from phases.base.verdict import Verdict
from phases.cli.rollback import _print, _print_left_alone
from phases.demo.repository import empty_kernel
from phases.engines.ssh.deploy import first_release, push
from phases.engines.ssh.errors import RouterError, UnreachableError
from phases.engines.ssh.lease import Lease
from phases.engines.ssh.placing import RoutedWorker, entries_of
from phases.engines.ssh.releases import ReleaseStore
from phases.engines.ssh.router import require_out
from phases.engines.ssh.session import op
from phases.engines.ssh.settings import FleetSettings, HostSettings, LeaseSettings, ServiceSettings
from phases.fleet import judging
from phases.fleet.report import table
from phases.production import hot
from phases.production.hot import Answer, HotSwitch
from phases.production.production import Production
from phases.production.settings import Amount, FallbackSettings, ProductionSettings
from phases.rollback.by_hand import Ended
from phases.rollback.steps import Rollback, _not_restored, roll_back, safe_only
from phases.run.steps import StepContext
from phases.serving.settings import SideSettings
from phases.tp8_canary.settings import CanarySettings
from phases.trial.arms import Arms
from phases.trial.reference import Reference
from phases.trial.settings import Design, JudgeSettings, MetricSettings, ReferenceSettings, SwitchbackSettings
from tests.engines.ssh.sshfleet import end_processes_of, free_port
from tests.engines.ssh.worker import LONG, eventually
from tests.production.test_hot_host import bundle

TOP = Path(__file__).parents[2]
pytestmark = pytest.mark.fleet


class Router:
    """A stand-in for the router: says what it was told."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = set(urls)

    def workers(self) -> tuple[RoutedWorker, ...]:
        return tuple(RoutedWorker(url, True, url, 0) for url in sorted(self.urls))

    def add(self, url: str) -> None:
        self.urls.add(url)

    def remove(self, url: str) -> None:
        self.urls.discard(url)


class Small:
    """Three workers of two ranks: w1 on a kept candidate, w2 on one under a lease, w3 on the last-good release."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        hosts = tuple(
            HostSettings(
                f"w{n}", "local", str(directory / f"w{n}"), free_port(), python=sys.executable, labels={"tp": "2"}
            )
            for n in (1, 2, 3)
        )
        self.fleet = FleetSettings(
            hosts, service=ServiceSettings(drain=1, ready=120), lease=LeaseSettings(arm=200, bake=LONG)
        )
        self.router = Router([host.url for host in self.fleet.workers()])
        self.old, self.new = bundle("old"), bundle("new")
        self.token = "whoever holds the lease of w2"
        with self.production() as production:
            production.token = self.token
            for host in production.workers:
                session, driver = production.fleet.session(host), production.driver(host)
                lock = production.take_lock(session)
                for made in (self.old, self.new):
                    push(session, lock, made)
                first_release(session, lock, driver, self.old.digest, production.ready(host))
                lease = Lease(session, lock.token)
                if host.name == "w2":
                    lease.arm(self.new.digest, self.old.digest, LONG, driver.restart_argv(host), driver.stop_argv(host))
                if host.name != "w3":
                    held = lease.id if host.name == "w2" else ""
                    session.do(
                        ReleaseStore(session, lock).switching(self.new.digest, lease=held), driver.restarting(host)
                    )
                if host.name == "w2":
                    lease.confirm(LONG)
                    production.fleet.adopt(lease.session)
                eventually(lambda session=session: len(session.do(op("control.show"))[0]["ranks"]) == 2)

    def production(self, floor: int = 1, **fallback: object) -> Production:
        settings = ProductionSettings(
            incumbent=SideSettings("verify_attn"),
            min_available=Amount(count=floor),
            fallback=FallbackSettings(**fallback),
        )
        made = Production(settings, self.fleet, self.router, "verify_attn", "test", SystemClock(), lambda line: None)
        made.preempt = True
        return made

    def byte(self, name: str) -> bytes:
        return (self.directory / name / "control").read_bytes()

    def current(self, name: str) -> str:
        return os.path.basename(os.readlink(self.directory / name / "current"))

    def service(self, name: str) -> int:
        return json.loads((self.directory / name / "run/service.json").read_text())["process"]["pid"]

    def rank(self, name: str, number: int) -> int:
        return json.loads((self.directory / name / f"facts/rank-{number}.json").read_text())["pid"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Small]:
    try:
        yield Small(tmp_path)
    finally:
        for name in ("w1", "w2", "w3"):
            end_processes_of(tmp_path / name)


def events(back: Rollback) -> list[str]:
    return [row["event"] for row in back.events]


def test_only_strayed_hosts_switch_and_every_rank_of_theirs_acknowledges(small):
    with small.production(wait=10) as production:
        done = hot.fall_back(production)
    assert done.safe and done.ranks == 4 and [a.host for a in done.affected] == ["w1", "w2"]
    assert [small.byte(name) for name in ("w1", "w2", "w3")] == [b"i", b"i", b"c"]
    assert 0 < done.seconds < 60 and "4 ranks of w1, w2 on the incumbent's kernel" in done.describe()


def test_a_rollback_is_safe_before_it_restores(small):
    with small.production(wait=10) as production:
        back = roll_back(production, "p99 doubled", detected=production.clock.now())
    assert back.verified and back.state == "restored" and back.hot.safe
    order = events(back)
    assert (
        order.index("hot fallback")
        < order.index("traffic safe")
        < order.index("out of service")
        < order.index("restored")
        < order.index("verified")
    )
    assert {small.current(name) for name in ("w1", "w2", "w3")} == {small.old.digest}
    assert {small.byte(name) for name in ("w1", "w2", "w3")} == {
        b"c"
    }  # restored: the good release serves with its own kernel
    assert back.to_json()["hot"]["safe"] and back.to_json()["state"] == "restored"
    assert "production: restored" in table(
        Results("rollback", "k", facts={"rollback": back.to_json(), "timeline": list(back.events)})
    )


@pytest.mark.parametrize(
    "fault", [ValueError("Incorrect padding"), KeyError("port"), UnreachableError("gone", host="w1"), RecursionError()]
)
def test_whatever_is_raised_for_one_worker_is_that_workers_failure_and_the_others_go_back(small, fault):
    """Field failure: one unreadable line of known_hosts ended a rollback half way. Raised here, since no file can raise all of these."""
    with small.production(floor=0, wait=10) as production:
        going = production.go_back

        def go_back(host, target=""):
            if host.name == "w1":
                raise fault
            return going(host, target)

        production.go_back = go_back
        back = roll_back(production, "p99 doubled", detected=production.clock.now())
    assert not back.verified and back.exit_code == Exit.ROLLBACK_INCOMPLETE
    assert list(back.left) == ["w1"] and (type(fault).__name__ in back.left["w1"] or "gone" in back.left["w1"])
    assert small.current("w2") == small.current("w3") == small.old.digest


def test_ranks_that_do_not_answer_are_named_and_made_safe_by_a_restart(small):
    stopped = small.rank("w1", 1)
    os.kill(stopped, signal.SIGSTOP)
    with small.production(wait=6) as production:  # so long that all others answer, on a busy machine too
        back = roll_back(production, "p99 doubled", detected=production.clock.now())
    assert not back.hot.safe and back.hot.missing == {"w1": "rank 1 still says candidate"}
    assert back.verified and "no hot fallback" in events(back) and small.current("w1") == small.old.digest


def test_hot_alone_restarts_nothing_and_a_later_rollback_restores(small):
    before = [small.service(name) for name in ("w1", "w2", "w3")]
    with small.production(wait=10) as production:
        safe = safe_only(production, "p99 doubled", detected=production.clock.now())
        assert "production: safe, not restored" in table(Results("rollback", "k", facts={"rollback": safe.to_json()}))
        assert safe.state == "safe" and not safe.verified and not safe.restores and events(safe)[-1] == "traffic safe"
        assert [small.service(name) for name in ("w1", "w2", "w3")] == before
        assert {state.host.name: state.current for state in production.observe()}["w1"] == small.new.digest
        restored = roll_back(production, "now properly", detected=production.clock.now(), by_hand=True)
    assert restored.state == "restored" and {small.current(name) for name in ("w1", "w2", "w3")} == {small.old.digest}


def test_a_policy_of_safe_only_still_restores_what_a_lease_would_restart_anyway(small):
    with small.production(restore=False, wait=10) as production:
        production.token = small.token  # only the lease's own writer keeps it
        production.keep(production.fleet["w2"], small.new.digest)  # no lease is left; w1 is what has strayed
        first = roll_back(production, "watch: slow", detected=production.clock.now(), target=small.old.digest)
        assert (
            first.state == "safe"
            and not first.restores
            and set(first.left) == {"w1", "w2"}
            and small.current("w1") == small.new.digest
        )
        by_hand = roll_back(
            production, "asked for", detected=production.clock.now(), target=small.old.digest, by_hand=True
        )
    assert by_hand.verified


def test_a_policy_of_safe_only_with_a_lease(small):
    with small.production(restore=False, wait=10) as production:
        back = roll_back(production, "regressed", detected=production.clock.now())
    assert back.verified and small.current("w2") == small.old.digest


def test_without_the_policy_nothing_is_switched_hot(small):
    with small.production(hot=False) as production:
        back = roll_back(production, "p99 doubled", detected=production.clock.now())
    assert back.verified and back.hot is None and "hot fallback" not in events(back)


def test_after_a_rollout_by_hand_means_every_host(small):
    with small.production(wait=10) as production:
        roll_back(production, "settle", detected=production.clock.now())
        assert not hot.fall_back(production).affected  # all are where a rollback goes
        done = hot.fall_back_by_hand(production)
        assert done.safe and done.ranks == 6
        assert [host.name for host in hot.fallen_back(production)] == ["w1", "w2", "w3"]
        again = hot.go_forward(production, production.workers[:2])
        assert again.safe and again.ranks == 4 and [host.name for host in hot.fallen_back(production)] == ["w3"]


def test_a_fallen_back_worker_is_not_wholly_on_its_release(small):
    with small.production(wait=10) as production:
        host = production.fleet["w1"]
        assert production.mixed(host, small.new.digest) == ""
        hot.fall_back(production)
        assert "fallen back to the incumbent's kernel" in production.mixed(host, small.new.digest)
        assert production.mixed(host, small.new.digest, kernel=False) == ""


def test_a_rank_that_fell_back_by_itself_is_a_fault_of_a_soak_and_of_a_watch(small, monkeypatch):
    with small.production(wait=10) as production:
        host = production.fleet["w3"]
        assert production.tripped(host) == ""
        (small.directory / "w3" / "trip-0").touch()
        eventually(lambda: "fell back by itself: shadow: layer 1" in production.tripped(host))
        said: list[str] = []
        context = StepContext(small.directory, {}, said.append, production.clock)
        judge = JudgeSettings((MetricSettings("e2e", 0.5, 0.5),), window=1, bake=1, deadline=2, min_samples=1)
        monkeypatch.setitem(get_text.__kwdefaults__, "most", 10)  # shorter than what the workers say
        fit = ReferenceSettings()
        verdict = judging.soak(production, judge, fit, Reference(), "", context, 5)
    assert any(line.startswith("w1: its metrics cannot be read: ") and "is longer than" in line for line in said), said
    assert verdict.fault and verdict.fault.worker == "w3" and "layer 1" in verdict.reason


def test_what_a_router_that_does_not_answer_leaves_unknown_is_not_said_of_the_worker(small):
    with small.production(wait=10) as production:
        assert roll_back(production, "p99", detected=production.clock.now()).verified
        small.router.workers = lambda: (_ for _ in ()).throw(RouterError("the router is gone."))
        assert set(_not_restored(production, "").values()) == {
            "whether users are served by it is not known: the router is gone."
        }
        del small.router.workers
        small.router.remove(production.workers[0].url)
        assert _not_restored(production, "") == {"w1": "the router sends it nothing"}


def test_a_router_that_lists_what_may_be_a_strayed_worker_keeps_safe_from_being_said_until_it_is_restored(small):
    """Field failure: "not in the list" was read as "out of service", and all workers were restarted at once under their users."""
    told: list[str] = []
    w1, w2 = (host.url for host in small.fleet.workers()[:2])
    stranger = f"http://w1.no-such-name.invalid:{w1.rpartition(':')[2]}"
    small.router.urls = {stranger, *(host.url for host in small.fleet.workers()[1:])}
    with small.production(hot=False, floor=2) as production:
        production.progress = told.append
        by_name = {state.host.name: state for state in production.observe()}
        assert by_name["w1"].in_service is None and stranger in by_name["w1"].unserved
        assert by_name["w2"].in_service is True and by_name["w3"].in_service is True
        with pytest.raises(RouterError, match="out of service is not known"):
            SglangLike(small.router, production).remove(w1)
        back = roll_back(production, "p99", detected=production.clock.now())
    names = events(back)
    assert "traffic safe" not in names[: names.index("worker restored")], back.events
    assert [names.index("traffic safe") + 1, names.count("worker restored")] == [names.index("restored"), 2], (
        back.events
    )
    reduced = next(row for row in back.events if row["event"] == "traffic reduced")
    assert stranger in reduced["note"] or "must stay available" in reduced["note"], reduced
    assert any("cannot be placed" in line and stranger in line and "router_url" in line for line in told), told
    assert back.verified and w1 in small.router.urls, "it is in service again, under the name that the playbook has"


class SglangLike:
    """What both real drivers do after a removal, on the router that says what it was told."""

    def __init__(self, router: Router, production: Production) -> None:
        self._router, self._book = router, production.book

    def remove(self, url: str) -> None:
        require_out(entries_of(self._book, self._router.workers(), url)[1], url)


def test_a_hot_fallback_that_some_servers_did_not_follow_names_those_alone(capsys):
    why = UnreachableError("cannot connect to w1:22: refused.", hint="Is sshd running there?", host="w1").told
    answers = (
        Answer("w1", True, missing=why),
        Answer("w2", True, missing="rank 0 still says candidate"),
        Answer("w3", True, ({"rank": 0},), seconds=0.5),
    )
    switch = HotSwitch(hot.INCUMBENT, answers)
    assert switch.describe() == (
        "1 rank of w3 on the incumbent's kernel after 0.50 s; w1: cannot connect to w1:22: refused. Is sshd running there? w2: rank 0 still says candidate"
    )
    back = Rollback("p99", False, (), {"w1": why, "w2": "x", "w3": "y"}, ("w1", "w2", "w3"), switch, restores=False)
    _print(Ended(back, SimpleNamespace(name="0001-rollback-FAIL"), Exit.ROLLBACK_INCOMPLETE), " -p p.yaml")
    assert capsys.readouterr().out.splitlines() == [
        "not safe: w1: cannot connect to w1:22: refused. Is sshd running there?",
        "not safe: w2: rank 0 still says candidate",
        "Production is INCOMPLETE: a person is needed; recorded as 0001-rollback-FAIL.",
        "`phase rollback -p p.yaml` makes the rest safe, and restores, by restarts.",
    ]


def test_workers_that_a_fallback_left_alone_for_one_that_cannot_be_asked_are_not_taken_for_safe(capsys):
    gone, good, stray = (
        Answer("w1", True, missing="refused", asked=False),
        Answer("w2", False),
        Answer("w3", True, ({"rank": 0},)),
    )
    back = Rollback(
        "p99", False, (), {"w1": "refused"}, ("w1",), HotSwitch(hot.INCUMBENT, (gone, good)), restores=False
    )
    _print_left_alone(back, " -p p.yaml")
    (line,) = capsys.readouterr().out.splitlines()
    assert (
        line.startswith("w2: on what a rollback goes back to")
        and "`phase rollback --hot --to CHECKPOINT -p p.yaml`" in line
    )
    for answers in (
        (gone, good, stray),
        (good,),
        (gone,),
        (stray, good),
    ):  # one that answered has strayed: what was asked for is known
        assert HotSwitch(hot.INCUMBENT, answers).left_alone == ()


def test_a_host_that_cannot_be_asked_counts_as_not_safe(small):
    with small.production(wait=10) as production:
        broken = production.fleet.session(production.fleet["w2"])
        broken.do = lambda *a, **k: (_ for _ in ()).throw(RuntimeError("gone"))
        done = hot.fall_back(production)
    assert not done.safe and "gone" in done.missing["w2"] and small.byte("w1") == b"i"
    assert [answer.host for answer in done.answers if not answer.asked] == ["w2"]


def test_turns_on_real_hosts_switch_every_rank_and_count_both_kernels(small):
    said: list[str] = []
    with small.production(wait=10) as production:
        context = StepContext(small.directory, {}, said.append, production.clock)
        judge = JudgeSettings(
            (MetricSettings("e2e", 0.5, 0.5),), window=1, bake=1, deadline=4, min_samples=10_000, settle=0
        )
        settings = CanarySettings(
            judge, design=Design.SWITCHBACK, turns=SwitchbackSettings(period=1.0, washout=0.2, seed=2)
        )
        canary = (production.fleet["w1"],)
        verdict = judging.judge_turns(None, production, settings, canary, small.new.digest, context)
        assert (
            verdict.fault is None and verdict.verdict is Verdict.INCONCLUSIVE and verdict.seconds >= 4
        )  # too few samples to tell
        canary_requests, control_requests = verdict.requests["canary"], verdict.requests["control"]
        assert (
            canary_requests > 50 and 0.2 < canary_requests / control_requests < 5
        )  # each turn lasts as long as a busy machine makes it
        share = canary_requests / (canary_requests + control_requests)
        assert judging.share_row(verdict, Arms(canary, (), production.workers[1:])).estimate == pytest.approx(2 * share)
        switched = [entry["to"] for entry in audit(small, "w1") if entry["event"] == "control"]
        assert len(switched) >= 2 and set(switched) <= {"candidate", "incumbent"} and small.byte("w3") == b"c"
        (small.directory / "w1" / "trip-1").touch()
        eventually(lambda: production.tripped(canary[0]))
        again = judging.judge_turns(None, production, settings, canary, small.new.digest, context)
    assert (
        again.verdict is Verdict.FAIL and "fell back by itself: shadow: layer 1 differs" in again.reason
    )  # not lost to the next turn
    assert any("e2e p50" in line for line in said)


def audit(small: Small, name: str) -> list[dict]:
    return [json.loads(line) for line in (small.directory / name / "audit.log").read_text().splitlines()]


PLAYBOOK = """\
schema: phasegate/playbook/v1
name: small
kernel: kernel.yaml
fleet:
  hosts:
{hosts}
  service: {{kind: process, ready: 120, drain: 1}}
  lease: {{arm: 200, bake: 200}}
production:
  incumbent: {{backend: verify_attn}}
  fallback: {{wait: 60}}
phases:
  tp8-canary:
    judge: {{metrics: [{{metric: e2e}}]}}
"""


def test_the_command_makes_safe_records_it_and_status_tells_it_from_restored(small):
    repo = small.directory / "repo"
    repo.mkdir()
    hosts = [
        f"    - {{name: {h.name}, address: local, root: {h.root}, port: {h.port}, python: {sys.executable}, labels: {{tp: '2'}}}}"
        for h in small.fleet.hosts
    ]
    for name, text in empty_kernel("light").items():
        (repo / name).write_text(textwrap.dedent(text))
    (repo / "playbook.yaml").write_text(PLAYBOOK.format(hosts="\n".join(hosts)))
    for argv in (
        ["init", "-q"],
        ["config", "user.name", "Ada"],
        ["config", "user.email", "ada@example.org"],
        ["add", "."],
        ["commit", "-qm", "small"],
    ):
        subprocess.run(["git", *argv], cwd=repo, check=True)

    def phase(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "phases.cli.main", *arguments, "-p", str(repo / "playbook.yaml")]
        return subprocess.run(
            argv, cwd=repo, env={**os.environ, "PYTHONPATH": str(TOP)}, capture_output=True, text=True, check=False
        )

    done = phase("rollback", "--hot", "--yes", "--json", "--reason", "p99 doubled")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["rollback"]["state"] == "safe" and told["rollback"]["hot"]["ranks"] == 4, (
        done.stderr
    )
    assert (small.byte("w1"), small.byte("w3")) == (b"i", b"c") and told["checkpoint"]["verdict"] == "PASS"
    shown = phase("status")
    assert "traffic is safe (hot fallback), NOT restored" in shown.stdout and shown.stdout.count("fell back") == 2
    again = phase("rollback", "--hot", "--yes", "--reason", "in words").stdout
    assert (
        "Traffic is safe, and nothing was restarted; recorded as 0002-rollback-PASS.\n`phase rollback` restores by restarts, `phase rollback --hot --undo`"
        in again
    )
    assert "not restored" not in again
    undone = phase("rollback", "--hot", "--undo", "--yes")
    assert (
        undone.returncode == 8
        and "2 ranks of w1 on the candidate's kernel" in undone.stdout
        and "w2: locked by" in undone.stdout
    )
    assert (
        ". Recorded as 0003-rollback-FAIL.\n" in undone.stdout
        and "taken back on some servers only" in phase("status", "--no-fleet").stdout
    )
    assert (small.byte("w1"), small.byte("w2")) == (
        b"c",
        b"i",
    )  # another run's lease holds w2, and only its run may go forwards there
    subprocess.run(
        ["git", "symbolic-ref", "HEAD", "refs/heads/checkpoints"], cwd=repo, check=True
    )  # the ledger refuses a branch checked out
    unrecorded = phase("rollback", "--hot", "--yes")
    assert unrecorded.returncode == 1 and "is checked out" in unrecorded.stderr and small.byte("w1") == b"i"
    order = [
        unrecorded.stderr.index(said)
        for said in ("traffic is safe: 4 ranks", "what failed is only to write that down", "ledger:")
    ]
    assert order == sorted(order), unrecorded.stderr


def test_nothing_that_only_the_record_or_a_restart_needs_is_imported_before_the_byte_is_written():
    program = """
        import sys
        import phases.cli.main, phases.cli.rollback, phases.rollback
        from phases.playbook import loader
        loader.load(sys.argv[1])
        late = ("numpy", "requests", "rich", "phases.ledger.ledger", "phases.report.page", "phases.production.production", "phases.run.session")
        print([name for name in late if name in sys.modules])
        """
    argv = [sys.executable, "-c", textwrap.dedent(program), str(TOP / "playbooks" / "rtx-pro-6000-tp8.yaml")]
    assert subprocess.run(argv, cwd=TOP, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("flags", [["--restore"], ["--undo"], ["--hot", "--restore", "--undo"]])
def test_flags_that_do_not_go_together_are_refused(flags):
    ended = subprocess.run(
        [sys.executable, "-m", "phases.cli.main", "rollback", "--yes", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2 and "--hot" in ended.stderr


def test_turns_do_not_override_whoever_orders_the_fallback(small):
    with small.production(wait=10) as production:
        canary = (production.fleet["w1"],)
        assert (
            hot.go_forward(production, canary, turn=True).safe
            and hot.fall_back(production, hosts=canary, everywhere=True, turn=True).safe
        )
        assert hot.go_forward(production, canary, turn=True).safe and production.ordered_back(canary[0]) == ""
        assert hot.fall_back_by_hand(
            production
        ).safe  # `phase rollback --hot` from another terminal, which takes no lock
        refused = hot.go_forward(production, canary, turn=True)
        assert "somebody ordered the hot fallback" in refused.missing["w1"] and small.byte("w1") == b"i"
        judge = JudgeSettings(
            (MetricSettings("e2e", 0.5, 0.5),), window=1, bake=1, deadline=4, min_samples=10_000, settle=0
        )
        settings = CanarySettings(judge, design=Design.SWITCHBACK, turns=SwitchbackSettings(period=1.0, washout=0.2))
        verdict = judging.judge_turns(
            None,
            production,
            settings,
            canary,
            small.new.digest,
            StepContext(small.directory, {}, lambda line: None, production.clock),
        )
        assert (
            verdict.fault and verdict.fault.worker == "w1" and "ordered" in verdict.reason and small.byte("w1") == b"i"
        )
        assert hot.go_forward(production, canary).safe and production.ordered_back(canary[0]) == ""  # `--undo`
