"""SIGKILL at random moments of a save: the name is absent, or holds the old state or the new one, and loads."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import psutil
import pytest
import tinker

from tests.service.conftest import Serve
from tests.service.running import RunningService
from tests.service.state import State, read_state
from tests.service.training import train
from trainer_cell.vault.layout import CheckpointAddress, Vault

pytestmark = [pytest.mark.cell, pytest.mark.timeout(900)]


Kill = Callable[[RunningService, random.Random], list[psutil.Process]]


def kill_a_rank(service: RunningService, pick: random.Random) -> list[psutil.Process]:
    ranks = service.ranks()
    pick.choice(ranks).kill()
    return ranks


def kill_the_cell(service: RunningService, _: random.Random) -> list[psutil.Process]:
    ranks = service.ranks()
    psutil.Process(service.pids()["cell"]).kill()
    return ranks


def kill_the_gateway(service: RunningService, _: random.Random) -> list[psutil.Process]:
    gateway = service.gateway()
    gateway.kill()
    return [gateway]


# 15 on each number of ranks; a gateway comes back in a second, a cell has torch to import.
KILLS: list[Kill] = [
    *[kill_the_gateway] * 9,
    *[kill_a_rank] * 3,
    *[kill_the_cell] * 3,
]


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [(2, [kill_the_gateway, kill_a_rank, kill_the_cell])]
    + [pytest.param(ranks, KILLS, marks=pytest.mark.full) for ranks in (1, 2)],
)
def test_a_save_that_is_killed_leaves_the_old_state_or_the_new_one(serve: Serve, ranks: int, kills: list[Kill]) -> None:
    service = serve(ranks=ranks)
    pick = random.Random(ranks)
    model = service.client().create_lora_training_client(base_model="cellgate/tiny", rank=32, seed=1).result()
    good = model.save_state("good").result().path
    save_s = timed_save(model)
    for number, kill in enumerate(pick.sample(kills, len(kills))):
        good = one_round(service, good, number, kill, pick, save_s)
        service.end_clients()
    assert service.stop() == 0


def one_round(
    service: RunningService,
    good: str,
    number: int,
    kill: Kill,
    pick: random.Random,
    save_s: float,
) -> str:
    """Load `good`, train a step, save it under fire; returns the address of a good later state."""
    model = service.client().create_training_client_from_state_with_optimizer(good).result()
    overwrites = number % 2 == 0
    old = read_state(service.checkpoints, model.save_state("target").result().path) if overwrites else None
    train(model, range(number, number + 1))
    new_path = model.save_state("new").result().path
    pending = model.save_state("target", overwrite=overwrites)
    time.sleep(pick.random() * save_s)
    gone = kill(service, pick)
    acknowledged = was_acknowledged(pending)
    psutil.wait_procs(gone, timeout=30)
    service.wait_until_ready()
    new = read_state(service.checkpoints, new_path)
    found = state_of(service, new_path.replace("/new", "/target"))
    if acknowledged:
        assert found is not None
        assert found.same_as(new)
    assert found is None or found.same_as(new) or (old is not None and found.same_as(old)), (number, kill)
    assert old is None or found is not None, (number, kill)
    return next_save_works(service, new_path, found)


def was_acknowledged(pending: tinker.APIFuture[tinker.types.SaveWeightsResponse]) -> bool:
    """Whether the client was told that the save is there; failing in any way is its right, hanging is not."""
    try:
        pending.result(timeout=60)
    except (tinker.TinkerError, ValueError):
        return False
    return True


def next_save_works(service: RunningService, new_path: str, found: State | None) -> str:
    resumed = service.client().create_training_client_from_state_with_optimizer(new_path).result()
    again = resumed.save_state("target").result().path
    assert read_state(service.checkpoints, again).same_as(read_state(service.checkpoints, new_path))
    if found is not None:
        listed = service.client().create_rest_client().list_user_checkpoints(limit=1000).result().checkpoints
        assert new_path.replace("/new", "/target") in {checkpoint.tinker_path for checkpoint in listed}
    return again


def state_of(service: RunningService, uri: str) -> State | None:
    if Vault(service.checkpoints).resolve(CheckpointAddress.parse(uri)) is None:
        return None
    return read_state(service.checkpoints, uri)


def timed_save(model: tinker.TrainingClient) -> float:
    start = time.monotonic()
    model.save_state("timed").result()
    return time.monotonic() - start
