"""Half an hour of steady work: what the service holds in memory and on disk does not grow."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import pytest
import tinker

from tests.chaos.clients import Trainee
from tests.chaos.programme import Forward, ForwardBackward, Load, Operation, OptimStep, Save
from tests.chaos.progress import Progress
from tests.chaos.runs import all_or_none
from tests.service.running import RunningService

pytestmark = [
    pytest.mark.cell,
    pytest.mark.full,
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

DURATION_S = float(os.environ.get("CELLGATE_TEST_SOAK_S", "1800"))
LEAST_COMMANDS = round(10_000 * DURATION_S / 1800)
NUM_MODELS = 6
# At a steady rate: answers are kept for ten minutes, and more of them in times that have more.
TURN_S = 8.0
SLOTS = 4
NUM_SAMPLES = 120
MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """gateway, rank_0: resident bytes; disk: bytes of all files below the state, checkpoints among them."""

    gateway: int
    rank_0: int
    disk: int
    gateway_descriptors: int


# How much more the last third of the time may take than the second: noise, but not what 12,000 commands
# would leave if each left half a kilobyte.
ROOM = Sample(gateway=6 * MIB, rank_0=12 * MIB, disk=8 * MIB, gateway_descriptors=8)


def sample(service: RunningService) -> Sample:
    gateway = service.gateway()
    return Sample(
        gateway.memory_info().rss,
        service.ranks()[0].memory_info().rss,
        bytes_below(service.state),
        gateway.num_fds(),
    )


def bytes_below(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # a collection is going on
    return total


def some_work(turn: int) -> Iterable[Operation]:
    """What one model does in one turn; every turn leaves as many checkpoints as the one before."""
    for step in range(3):
        yield ForwardBackward(100 * turn + step)
        yield OptimStep(1e-3)
    yield Forward(turn)
    yield Save("a", overwrite=turn > 0)
    if turn % 4 == 3:
        yield Load("a", optimizer=turn % 8 == 3)


def work(service: tinker.ServiceClient, number: int, progress: Progress, over: threading.Event) -> None:
    trainee = Trainee(service, number, progress)
    began_s, turn = time.monotonic(), 0
    while not over.wait(max(0.0, began_s + turn * TURN_S - time.monotonic())):
        trainee.do(some_work(turn))
        trainee.record.answers.clear()
        turn += 1
    trainee.settle()


def watched(service: RunningService, progress: Progress) -> list[Sample]:
    """All clients at work for the duration, and what the service held meanwhile."""
    over = threading.Event()
    with ThreadPoolExecutor(NUM_MODELS + 1) as pool:
        watch = pool.submit(take_samples, service, over)
        clients = [pool.submit(work, service.client(), number, progress, over) for number in range(NUM_MODELS)]
        # A client that fails ends it early.
        wait([watch, *clients], return_when=FIRST_COMPLETED)
        over.set()
        all_or_none(clients, progress)
    return watch.result()


def take_samples(service: RunningService, over: threading.Event) -> list[Sample]:
    samples: list[Sample] = []
    while len(samples) < NUM_SAMPLES and not over.wait(DURATION_S / NUM_SAMPLES):
        samples.append(sample(service))
    return samples


def growth(samples: Sequence[Sample]) -> dict[str, int]:
    """By how much the middle of the last third lies over that of the second."""
    third = len(samples) // 3

    def middle(part: Sequence[Sample], name: str) -> float:
        return float(median(getattr(one, name) for one in part))

    return {
        field.name: round(middle(samples[-third:], field.name) - middle(samples[third:-third], field.name))
        for field in fields(Sample)
    }


def test_a_service_that_works_for_long_grows_neither_in_memory_nor_on_disk(tmp_path: Path) -> None:
    options = ("--slots", str(SLOTS), "--replaced-grace-s", "5", "--sweep-interval-s", "5")
    service = RunningService(tmp_path, *options)
    try:
        pids = service.start().pids()
        progress = Progress(NUM_MODELS)
        samples = watched(service, progress)
        assert progress.count >= LEAST_COMMANDS
        assert service.pids() == pids
        grown = growth(samples)
        assert all(grown[field.name] <= getattr(ROOM, field.name) for field in fields(Sample)), (grown, samples)
        assert service.stop() == 0
    finally:
        service.kill_everything()


def test_what_grows_all_the_time_would_be_seen() -> None:
    """The control: a kilobyte that each command leaves behind, at twenty commands a second."""
    leaks = [Sample(80 * MIB + 1024 * commands, 0, 0, 20) for commands in range(0, 36_000, 36_000 // NUM_SAMPLES)]
    assert growth(leaks)["gateway"] > ROOM.gateway
    assert growth([Sample(80 * MIB, 0, 0, 20)] * NUM_SAMPLES) == dict.fromkeys(growth(leaks), 0)
