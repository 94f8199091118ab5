"""Releases do not pile up on hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phases.base.clock import SystemClock
from phases.engines.ssh.releases import ReleaseStore, read_inventory
from phases.engines.ssh.settings import FleetSettings, HostSettings
from phases.production.production import Production
from phases.production.settings import Amount, ProductionSettings, SideSettings
from tests.production.test_hot_fleet import Router
from tests.production.test_hot_host import bundle


@pytest.mark.parametrize("kept", [0, 2])
def test_old_releases_go_when_new_ones_come_except_what_is_in_use_or_was_good(tmp_path: Path, kept: int) -> None:
    host = HostSettings("w1", "local", str(tmp_path / "w1"), 30000, python=sys.executable)
    fleet = FleetSettings((host,), keep_releases=kept)
    settings = ProductionSettings(incumbent=SideSettings("verify_attn"), min_available=Amount(count=0))
    older, good, *others = [bundle(str(number)) for number in range(8)]
    with Production(settings, fleet, Router([]), "k", "test", SystemClock(), lambda line: None) as production:
        worker = production.workers[0]
        session = production.fleet.session(worker)
        for release in (older, good):
            production.push([release], [worker])
            store = ReleaseStore(session, production.take_lock(session))
            store.switch(release.digest)
            store.mark_good(release.digest)
        for release in others:
            production.push([release], [worker])
        left = set(read_inventory(session).releases)
    assert {older.digest, good.digest, others[-1].digest} <= left
    assert len(left) == 3 + kept
