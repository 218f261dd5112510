"""Whatever clients send in whatever order, and whatever dies at whatever moment: see `machine` and `check`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.gateway.scheduling.stateful.machine import Programs

SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), stateful_step_count=30, database=None)


# Not in the short suite: there are programs, drawn under some orders of hashing, in which model and service differ.
@pytest.mark.full
def test_no_program_of_clients_and_crashes_loses_or_repeats_anything() -> None:
    run_state_machine_as_test(Programs, settings=settings(SETTINGS, max_examples=30, derandomize=True))


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_none_of_many_long_programs_does_either() -> None:
    run_state_machine_as_test(Programs, settings=settings(SETTINGS, max_examples=3000, stateful_step_count=80))
