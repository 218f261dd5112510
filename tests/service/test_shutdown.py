"""Nothing outlives `cellgate serve`, however it ends and whenever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.service.conftest import Serve
from tests.service.running import RunningService

pytestmark = pytest.mark.cell


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[RunningService]:
    """On its way up, in a thread that does not mind that it never gets there."""
    service = RunningService(tmp_path, ranks=2)
    thread = threading.Thread(target=lambda: _start(service))
    thread.start()
    yield service
    service.kill_everything()
    thread.join(60)


def _start(service: RunningService) -> None:
    try:
        service.start()
    except AssertionError:
        return  # it was killed before it was ready


def first_ranks(service: RunningService) -> list[psutil.Process]:
    """The ranks, as soon as there are any."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            ranks = service.ranks()
        except (OSError, KeyError, psutil.Error):
            ranks = []
        if ranks:
            return ranks
        time.sleep(0.01)
    raise AssertionError("no rank came up")


@pytest.mark.parametrize(
    "delay_s", [pytest.param(0.0, marks=pytest.mark.full), 0.15, pytest.param(1.0, marks=pytest.mark.full)]
)
def test_ranks_that_are_just_starting_end_with_a_service_that_is_killed(
    starting: RunningService, delay_s: float
) -> None:
    ranks = first_ranks(starting)
    time.sleep(delay_s)
    others = starting.everything()
    os.kill(starting.pids()["supervisor"], signal.SIGKILL)
    _, alive = psutil.wait_procs([*ranks, *others], timeout=20)
    assert alive == []


def test_nothing_is_left_after_an_orderly_stop_or_a_kill(serve: Serve) -> None:
    service = serve(ranks=2)
    processes = service.everything()
    assert len(processes) >= 5
    assert service.stop() == 0
    assert not any(process.is_running() for process in processes)
    service.start()
    processes = service.everything()
    os.kill(service.pids()["supervisor"], signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
