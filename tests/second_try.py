"""A second try, once: most tests drive real processes (sshd, routers, servers, kernels under a clock) on a machine that others use too.

It is a safety net, not a cure: a test that needs it is to be mended. Each use of it shows in the log, as R among the dots and as a
RERUN line at the end; a test that fails twice fails the run. What shares a module's fixtures gets them made anew for the second try.
`tests/conftest.py` takes these hooks up; pytest-rerunfailures does the repeating.
"""

from __future__ import annotations

from typing import Any

import pytest

_SETTINGS = pytest.StashKey[Any]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if getattr(item, "execution_count", 1) > 1:  # counted by pytest-rerunfailures
        _restart_timer(item)
        _drop_module_fixtures(item)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[_SETTINGS] = settings


def _restart_timer(item: pytest.Item) -> None:
    """The second try has as long as the first: pytest-timeout itself counts both together, and not at all once its time is up."""
    if (settings := item.stash.get(_SETTINGS, None)) is not None:
        hooks = item.config.pluginmanager.hook
        hooks.pytest_timeout_cancel_timer(item=item)
        hooks.pytest_timeout_set_timer(item=item, settings=settings)


def _drop_module_fixtures(item: pytest.Item) -> None:
    """End a fleet that may be what failed; asked for again it is made again. Pytest has no public way to say this."""
    for made in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
        for fixture in made:
            if fixture.scope == "module":
                fixture.finish(item._request)  # type: ignore[attr-defined]
