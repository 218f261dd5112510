"""A gateway, a cell or both end and come back, as their clients see it: nothing but time has passed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from gateway.http.limits import Limits
from tests.gateway.http.running import ALICE, RunningGateway, running_gateway
from tests.sdk.test_training import batch, new_client, probe, train
from trainer_cell.protocol.commands import ForwardBackward, OptimStep

LIMITS = Limits(poll_s=30, retry_after_s=1)


@pytest.mark.parametrize("lives_on", [False, True], ids=["with its cell", "alone"])
def test_a_client_is_answered_and_trains_on_when_its_gateway_is_started_again(tmp_path: Path, lives_on: bool) -> None:
    with running_gateway(tmp_path, LIMITS) as gateway:
        port = gateway.where.port
        service = tinker.ServiceClient(base_url=gateway.where.url, api_key=ALICE)
        client = new_client(service)
        train(client)
        path = client.save_state("one").result().path
        pending = wait_behind_a_held_step(gateway, client)
        cell = gateway.cell
        if lives_on:
            gateway.cell = None
    with running_gateway(tmp_path, LIMITS, cell=not lives_on, port=port) as gateway:
        # Those that the gateway before had accepted, one of them before it had any answer.
        assert [future.result() is not None for future in pending] == [True, True, True]
        session_id = client.model_id.partition(":")[0]
        assert gateway.alice.call("session_heartbeat", session_id=session_id) == {"type": "session_heartbeat"}
        assert client.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics == {"grad_norm": 3.0}
        undisturbed = new_client(service)
        assert undisturbed.model_id == f"{session_id}:train:1"
        train(undisturbed), train(undisturbed), train(undisturbed)
        assert probe(client) == probe(undisturbed)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        train(resumed), train(resumed)
        assert probe(resumed) == probe(client)
        service.close("success").result()
        if lives_on and cell is not None:
            cell.kill()


def wait_behind_a_held_step(gateway: RunningGateway, client: tinker.TrainingClient) -> list[tinker.APIFuture[Any]]:
    """A step's commands and one of the next, whose polls are open while the gateway goes down: what runs is finished
    first, what waits is not."""
    assert gateway.cell is not None
    hold = gateway.cell.hold_next(OptimStep)
    accepted = len(gateway.scheduler.futures)
    pending: list[tinker.APIFuture[Any]] = [
        client.forward_backward(batch(3), "cross_entropy"),
        client.optim_step(types.AdamParams(learning_rate=1e-3)),
        client.forward_backward(batch(3), "cross_entropy"),
    ]
    hold.wait_reached()
    while len(gateway.scheduler.futures) < accepted + 3:
        time.sleep(0.01)
    gateway.where.stop()
    threading.Timer(1.5, hold.release).start()
    return pending


def test_a_cell_that_is_killed_in_the_middle_costs_a_client_nothing_but_time(
    gateway: RunningGateway, service: tinker.ServiceClient
) -> None:
    assert gateway.cell is not None
    client, undisturbed = new_client(service), new_client(service)
    for one in (client, undisturbed):
        train(one, 3)
    hold = gateway.cell.hold_next(ForwardBackward)
    futures: list[tinker.APIFuture[Any]] = [
        client.forward_backward(batch(5), "cross_entropy"),
        client.optim_step(types.AdamParams(learning_rate=1e-3)),
        client.save_state("after"),
    ]
    hold.wait_reached()
    gateway.cell.kill()
    gateway.attach_cell()
    path = [future.result() for future in futures][-1].path
    train(undisturbed, 5)
    assert probe(client) == probe(undisturbed)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert probe(resumed) == probe(undisturbed)


def test_more_clients_than_slots_train_as_each_would_alone(
    gateway: RunningGateway, service: tinker.ServiceClient
) -> None:
    assert gateway.cell is not None
    undisturbed = new_client(service)
    for length in (3, 5, 2):
        train(undisturbed, length)
    alone = probe(undisturbed)
    gateway.cell.kill()
    cell = gateway.attach_cell(slots=1)
    clients = [new_client(service) for _ in range(3)]
    for length in (3, 5, 2):
        for client in clients:
            train(client, length)
            assert len(cell.slots.models) == 1
    assert [probe(client) for client in clients] == [alone] * 3
