"""Whatever clients send in whatever order, and whatever dies at whatever moment: see `machine` and `check`."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.gateway.scheduling.stateful.drawn import SETTINGS, run_programs


def test_no_program_of_clients_and_crashes_loses_or_repeats_anything() -> None:
    run_programs(settings(SETTINGS, max_examples=60, derandomize=True))


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_none_of_many_long_programs_does_either() -> None:
    run_programs(settings(SETTINGS, max_examples=3000, stateful_step_count=80))
