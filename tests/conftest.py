"""Settings every test shares."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes depends on who else uses the machine: no property test is judged by the clock.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
