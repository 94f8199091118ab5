"""What a production phase refuses to start on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from phases.base.errors import FleetError, PlaybookError
from phases.engines.ssh.host import Host
from phases.engines.ssh.lease import LeaseState
from phases.fleet.shared_steps import _require_one_release, _require_well
from phases.production.production import WorkerState
from phases.production.releases import require_values
from phases.production.settings import ProductionSettings
from phases.serving.settings import ServerSettings, SideSettings
from tests.production.light_fleet import LightFleet

OLD, NEW = "a" * 64, "b" * 64


def worker(
    number: int, current: str = OLD, *, leased: bool = False, serving: bool = True, in_service: bool = True
) -> WorkerState:
    lease = LeaseState("l", "confirmed", current, OLD, current, 50.0, True, leased, "") if leased else None
    return WorkerState(Host(f"w{number}", "local", f"/srv/w{number}"), current, OLD, lease, serving, in_service)


def test_a_fleet_of_mixed_releases_is_refused_and_so_is_one_that_runs_the_candidate() -> None:
    _require_one_release([worker(1), worker(2)], NEW)
    _require_one_release([worker(1, NEW, leased=True), worker(2)], NEW)  # moved by an earlier process of this run
    with pytest.raises(
        FleetError, match=r"different releases before anything has moved: aaaaaaaaaaaa on w1; bbbbbbbbbbbb on w2"
    ):
        _require_one_release([worker(1), worker(2, NEW)], NEW)
    with pytest.raises(FleetError, match="all workers run the candidate bbbbbbbbbbbb already"):
        _require_one_release([worker(1, NEW), worker(2, NEW)], NEW)


def test_a_worker_that_does_not_serve_or_gets_nothing_is_named() -> None:
    with pytest.raises(FleetError, match="w2: does not answer"):
        _require_well([worker(1), worker(2, serving=False)])
    with pytest.raises(FleetError, match="does not send anything to w1"):
        _require_well([worker(1, in_service=False), worker(2)])
    doubtful = dataclasses.replace(worker(1), doubt="the router lists http://x:1, which may be it")
    with pytest.raises(FleetError, match="before anything has moved: w1: the router lists http://x:1.*router_url"):
        _require_well([doubtful, worker(2)])


def test_listed_hosts_on_the_embedded_environment_need_values_for_its_arguments() -> None:
    """SGLang would be started with `--tp {tp}`."""
    settings = ProductionSettings(incumbent=SideSettings("a"))
    values = {"port": "1", "tp": "1", "mem": "0.6", "bind": "all"}
    require_values(settings, [Host("w1", "local", "/srv/w1", values=values)])
    with pytest.raises(PlaybookError, match="values of w2 for tp, bind"):
        require_values(
            settings,
            [
                Host("w1", "local", "/srv/w1", values=values),
                Host("w2", "local", "/srv/w2", values={"port": "1", "mem": "0.6"}),
            ],
        )
    require_values(
        ProductionSettings(ServerSettings("/opt/python", "m"), SideSettings("a")), [Host("w2", "local", "/srv/w2")]
    )


def test_a_worker_without_the_variable_that_others_have_is_named() -> None:
    """Workers that share a machine take their GPUs from `vars`; without them a worker would be started on `{gpus}`, which is none."""
    server = ServerSettings(
        "/opt/python",
        "m",
        arguments=("--json", "{not a name}", "{unknown}"),
        environment={"CUDA_VISIBLE_DEVICES": "{gpus}"},
    )
    settings = ProductionSettings(server, SideSettings("a"))
    with_gpus = Host("w1", "local", "/srv/w1", values={"gpus": "0,1"})
    require_values(settings, [with_gpus])
    with pytest.raises(PlaybookError, match="`production: server` needs values of w2 for gpus"):
        require_values(settings, [with_gpus, Host("w2", "local", "/srv/w2")])
    elsewhere = ProductionSettings(ServerSettings("/opt/{env}/python", "/models/{my-model}"), SideSettings("a"))
    with pytest.raises(PlaybookError, match="`production: server` needs values of w2 for my-model, env"):
        require_values(
            elsewhere,
            [Host("w1", "local", "/srv/w1", values={"my-model": "a", "env": "b"}), Host("w2", "local", "/srv/w2")],
        )


def test_what_a_bake_would_stumble_over_is_found_before_a_worker_is_asked(tmp_path: Path) -> None:
    fleet = LightFleet(tmp_path / "light", ssh=0, count=3).prepare()  # no worker runs
    text = (fleet.repo / "playbook.yaml").read_text()
    (fleet.repo / "prompts.json").write_text('[{"name": "a", "kind": "long", "text": "ab", "repeat": 1.5}]')
    fleet.configure(text=text.replace("load: {rate: 40}", "load: {rate: 0, prompts: prompts.json}"))
    said = fleet.phase("run", "tp8-canary", "--yes")
    assert (
        said.returncode == 1
        and "prompts.json is not a prompt set: ValueError repeat must be a whole number" in said.stdout
    ), said.stdout
    fleet.configure(text=text.replace(f'python: "{fleet.python}"', "python: embedded"))
    said = fleet.phase("run", "tp8-canary", "--yes")
    assert said.returncode == 2 and "needs values of w1 for tp, mem, bind" in said.stdout, said.stdout
