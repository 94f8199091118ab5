"""Settings every test shares."""

from __future__ import annotations

import os
import random
import signal
import sys
import zlib

import pytest
from hypothesis import HealthCheck, settings

from tests.second_try import pytest_collection_modifyitems, pytest_runtest_setup, pytest_timeout_set_timer

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_runtest_setup",
    "pytest_timeout_set_timer",
]  # pytest looks for hooks here

# How long an example takes depends on who else uses the machine: no property test is judged by the clock. Every run tries the same
# examples, so that a failure is of the change that is tested; to search for new ones: pytest --hypothesis-profile=search.
settings.register_profile(
    "untimed", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# What a run says is read line by line here; a log gets a line a step (tests/cli/test_live_view.py tests that).
os.environ.setdefault("PHASE_VERBOSE", "1")

# Started in the background of a script, this process ignores Ctrl-C, and so would every `phase` that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def group_for_workers(items: list[pytest.Item]) -> None:
    """A file's tests stay on one worker, since they share its fleet; all that start real SGLang servers share one, since two at once
    would take the cores from each other."""
    for item in items:
        group = "servers" if item.get_closest_marker("sglang") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """The same random numbers in every run: of Python, and of torch where a test uses it."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
