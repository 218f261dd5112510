"""SIGKILL at random moments of training and saving: the client notices nothing but time, and what its save replaces is
there, old or new, all the while."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import tinker

from tests.service.conftest import Serve
from tests.service.running import RunningService
from tests.service.state import State, read_state
from tests.service.test_resume import new_model
from tests.service.training import ADAM, batch, logprobs_of
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
def test_a_client_under_fire_goes_on_and_ends_where_an_undisturbed_one_does(
    serve: Serve, ranks: int, kills: list[Kill]
) -> None:
    service = serve(ranks=ranks)
    pick = random.Random(ranks)
    undisturbed, model = new_model(service), new_model(service)
    known: dict[str, State] = {}
    for number, kill in enumerate(pick.sample(kills, len(kills))):
        one_round(service, undisturbed, model, number, kill, pick, known)
    for path, state in known.items():
        assert read_state(service.checkpoints, path).same_as(state), "what was told stays"
    assert service.stop() == 0


def one_round(
    service: RunningService,
    undisturbed: tinker.TrainingClient,
    model: tinker.TrainingClient,
    number: int,
    kill: Kill,
    pick: random.Random,
    known: dict[str, State],
) -> None:
    """Both models take two steps with a save of a name in between, which every other round is of a checkpoint."""
    began = time.monotonic()
    expected = answers(send_round(undisturbed, number))
    whole_s = time.monotonic() - began
    new = read_state(service.checkpoints, expected[2])
    path = expected[2].replace(undisturbed.model_id, model.model_id)
    old = None
    if number % 2 == 0:
        assert model.save_state(f"target{number}").result().path == path
        old = read_state(service.checkpoints, path)
    pending = send_round(model, number)
    time.sleep(pick.random() * whole_s)
    gone = kill(service, pick)
    psutil.wait_procs(gone, timeout=30)
    found = state_of(service, path)
    assert found is None or found.same_as(new) or (old is not None and found.same_as(old)), (number, kill)
    assert old is None or found is not None, (number, kill)
    told = answers(pending)
    assert told == [*expected[:2], path, *expected[3:]], (number, kill)
    known[path] = read_state(service.checkpoints, path)
    assert known[path].same_as(new), (number, kill)
    service.wait_until_ready()


def send_round(model: tinker.TrainingClient, number: int) -> list[tinker.APIFuture[Any]]:
    """All of it before any of it is answered."""
    pending: list[tinker.APIFuture[Any]] = []
    for step in (2 * number, 2 * number + 1):
        pending += [model.forward_backward(batch(step), "cross_entropy"), model.optim_step(ADAM)]
        if step == 2 * number:
            pending.append(model.save_state(f"target{number}", overwrite=number % 2 == 0))
    return pending


def answers(pending: list[tinker.APIFuture[Any]]) -> list[Any]:
    """Log-probabilities, metrics, a path, log-probabilities, metrics. Neither failing nor hanging is anyone's right."""
    first, first_step, saved, second, second_step = (future.result(timeout=120) for future in pending)
    return [logprobs_of(first), first_step.metrics, saved.path, logprobs_of(second), second_step.metrics]


def state_of(service: RunningService, uri: str) -> State | None:
    if Vault(service.checkpoints).resolve(CheckpointAddress.parse(uri)) is None:
        return None
    return read_state(service.checkpoints, uri)
