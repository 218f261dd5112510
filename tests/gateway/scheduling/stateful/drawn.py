"""How programs are drawn: the same ones every time, whatever else runs in the process."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from hypothesis.stateful import run_state_machine_as_test

from tests.gateway.scheduling.stateful.machine import Programs

SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), stateful_step_count=30, database=None)


def run_programs(chosen: settings) -> None:
    """Raises what the first program finds that fails."""
    with pytest.MonkeyPatch.context() as patch:
        # Hypothesis mixes numbers from the sources of all loaded modules into what it draws, so that what is drawn
        # depends on who was imported and on every edit anywhere.
        patch.setattr(providers, "_get_local_constants", Constants)
        patch.setattr(providers, "CONSTANTS_CACHE", type(providers.CONSTANTS_CACHE)(1024))
        run_state_machine_as_test(Programs, settings=chosen)
