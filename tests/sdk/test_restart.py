"""A gateway that is stopped and started again, as its clients see it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import tinker
from tinker import types

from gateway.http.limits import Limits
from tests.gateway.http.running import ALICE, RunningGateway, running_gateway
from tests.sdk.test_training import batch, new_client, probe, train
from trainer_cell.protocol.commands import OptimStep


def test_a_client_gets_a_definite_error_after_a_restart_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    limits = Limits(poll_s=30, retry_after_s=1)
    with running_gateway(tmp_path, limits) as gateway:
        port = gateway.where.port
        service = tinker.ServiceClient(base_url=gateway.where.url, api_key=ALICE)
        client = new_client(service)
        train(client)
        path = client.save_state("one").result().path
        saved = probe(client)
        pending = wait_behind_a_held_step(gateway, client)
    with running_gateway(tmp_path, limits, port=port):
        began = time.monotonic()
        # Which of the two depends on how far the stop had come when the last poll was answered.
        with pytest.raises((ValueError, tinker.RequestFailedError), match=r"404|load a checkpoint"):
            pending.result()
        with pytest.raises(tinker.NotFoundError):
            client.optim_step(types.AdamParams()).result()
        assert time.monotonic() - began < 60
        with tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=ALICE) as again:
            resumed = again.create_training_client_from_state_with_optimizer(path).result()
            assert probe(resumed) == saved
            train(resumed)


def wait_behind_a_held_step(gateway: RunningGateway, client: tinker.TrainingClient) -> object:
    """A command whose poll is open while the gateway goes down, behind one that is finished first."""
    assert gateway.cell is not None
    hold = gateway.cell.hold_next(OptimStep)
    accepted = len(gateway.scheduler.futures)
    client.forward_backward(batch(3), "cross_entropy")
    client.optim_step(types.AdamParams())
    pending = client.forward_backward(batch(3), "cross_entropy")
    hold.wait_reached()
    while len(gateway.scheduler.futures) < accepted + 3:
        time.sleep(0.01)
    gateway.where.stop()
    threading.Timer(1.5, hold.release).start()
    return pending
