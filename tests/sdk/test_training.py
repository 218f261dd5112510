"""Creating, training, saving and resuming."""

from __future__ import annotations

import logging
import math
import time

import numpy as np
import pytest
import tinker
from tinker import types

from tests.gateway.http.running import ALICE, BOB, RunningGateway
from trainer_cell.protocol.commands import ForwardBackward, OptimStep, SaveState
from trainer_cell.protocol.errors import CommandFailed, ErrorKind

# What a user waits at most for an error; the SDK's own retries would take minutes.
PROMPTLY_S = 10.0


def batch(*lengths: int) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(list(range(length))),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(np.arange(1, length + 1, dtype=np.int64)),
                "weights": types.TensorData.from_numpy(np.ones(length, dtype=np.float32)),
            },
        )
        for length in lengths
    ]


def train(client: tinker.TrainingClient, *lengths: int) -> types.ForwardBackwardOutput:
    """One step; its output."""
    output = client.forward_backward(batch(*(lengths or (3,))), "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-3))
    stepped.result()
    return output.result()


def probe(client: tinker.TrainingClient) -> list[float]:
    output = client.forward(batch(4), "cross_entropy").result()
    return [float(value) for value in output.loss_fn_outputs[0]["logprobs"].data]


def new_client(service: tinker.ServiceClient, rank: int = 8, seed: int = 7) -> tinker.TrainingClient:
    return service.create_lora_training_client("cellgate/tiny", rank=rank, seed=seed).result()


def test_a_client_trains_and_reads_logprobs_in_the_order_of_its_data(service: tinker.ServiceClient) -> None:
    client = new_client(service)
    assert client.model_id.endswith(":train:0")
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == ("cellgate/tiny", 8, True)
    output = client.forward_backward(batch(3, 5, 1), "cross_entropy").result()
    assert [one["logprobs"].shape for one in output.loss_fn_outputs] == [[3], [5], [1]]
    assert output.metrics["tokens:sum"] == 9
    total = sum(sum(one["logprobs"].data) for one in output.loss_fn_outputs)
    assert math.isclose(output.metrics["loss:sum"], -total, rel_tol=1e-5)
    assert client.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics == {"grad_norm": 9.0}


def test_a_call_of_many_chunks_is_one_gradient(gateway: RunningGateway, service: tinker.ServiceClient) -> None:
    assert gateway.cell is not None
    client = new_client(service)
    output = client.forward_backward(batch(*[2] * 2500), "cross_entropy").result()
    assert gateway.cell.count(ForwardBackward) == 3
    assert len(output.loss_fn_outputs) == 2500
    assert output.metrics["tokens:sum"] == 5000
    assert client.optim_step(types.AdamParams()).result().metrics == {"grad_norm": 5000.0}


def test_commands_sent_without_waiting_give_what_waiting_gives(service: tinker.ServiceClient) -> None:
    patient, hasty = new_client(service), new_client(service)
    for length in (3, 5, 2):
        train(patient, length)
    steps = []
    for length in (3, 5, 2):
        steps.append(hasty.forward_backward(batch(length), "cross_entropy"))
        steps.append(hasty.optim_step(types.AdamParams(learning_rate=1e-3)))
    for step in steps:
        step.result()
    assert probe(hasty) == probe(patient)


def test_a_custom_loss_works_without_help_from_the_server(service: tinker.ServiceClient) -> None:
    torch = pytest.importorskip("torch")
    client = new_client(service)

    def loss(data: list[types.Datum], logprobs: list[object]) -> tuple[object, dict[str, float]]:
        return -torch.cat(logprobs).sum(), {}

    client.forward_backward_custom(batch(3), loss).result()
    assert client.optim_step(types.AdamParams()).result().metrics == {"grad_norm": 3.0}


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_new_client_goes_on_from_a_checkpoint(service: tinker.ServiceClient, optimizer: bool) -> None:
    client = new_client(service)
    train(client, 3)
    path = client.save_state("one").result().path
    assert path == f"tinker://{client.model_id}/weights/one"
    saved = probe(client)
    train(client, 5)
    resume = (
        service.create_training_client_from_state_with_optimizer
        if optimizer
        else service.create_training_client_from_state
    )
    resumed = resume(path).result()
    assert resumed.model_id.endswith(":train:1")
    assert resumed.get_info().lora_rank == 8
    assert probe(resumed) == saved
    train(resumed, 5)
    assert (probe(resumed) == probe(client)) is optimizer


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("optimizer", [True, False])
def test_a_client_goes_back_to_a_checkpoint_in_place(service: tinker.ServiceClient, optimizer: bool) -> None:
    client = new_client(service)
    train(client, 3)
    path = client.save_state("one").result().path
    saved = probe(client)
    train(client, 5)
    uninterrupted = probe(client)
    load = client.load_state_with_optimizer if optimizer else client.load_state
    assert load(path).result().path == path
    assert probe(client) == saved
    train(client, 5)
    assert (probe(client) == uninterrupted) is optimizer


def test_a_name_that_is_taken_is_told_within_seconds(service: tinker.ServiceClient) -> None:
    client = new_client(service)
    client.save_state("one").result()
    began = time.monotonic()
    with pytest.raises(tinker.RequestFailedError, match="exists already") as caught:
        client.save_state("one").result()
    assert time.monotonic() - began < PROMPTLY_S
    assert caught.value.category == types.RequestErrorCategory.User
    assert client.save_state("one", overwrite=True).result().path.endswith("/weights/one")


def test_users_errors_come_promptly_and_the_client_goes_on(service: tinker.ServiceClient) -> None:
    client = new_client(service)
    wrong = [
        lambda: client.save_state("../x"),
        lambda: client.forward_backward(batch(3), "perplexity"),  # type: ignore[arg-type]
        lambda: client.optim_step(types.AdamParams(learning_rate=-1.0)),
        lambda: client.optim_step(types.AdamParams(learning_rate=float("inf"))),
        lambda: client.optim_step(types.AdamParams(learning_rate=1e-3)),
        lambda: service.create_lora_training_client("meta/none"),
        lambda: service.create_lora_training_client("cellgate/tiny", rank=0),
        lambda: service.create_lora_training_client("cellgate/tiny", rank=4096),
        lambda: service.create_training_client_from_state(f"tinker://{client.model_id}/weights/none"),
        lambda: service.create_training_client_from_state(f"tinker://{client.model_id}/sampler_weights/x"),
        lambda: service.create_training_client_from_state("/etc/passwd"),
    ]
    for call in wrong:
        began = time.monotonic()
        with pytest.raises(tinker.RequestFailedError) as caught:
            call().result()
        assert caught.value.category == types.RequestErrorCategory.User
        assert time.monotonic() - began < PROMPTLY_S
    train(client)


def test_a_failure_of_the_service_is_told_as_one(gateway: RunningGateway, service: tinker.ServiceClient) -> None:
    assert gateway.cell is not None
    client = new_client(service)
    gateway.cell.fail_next(SaveState, CommandFailed(ErrorKind.STORAGE_FAILED, "rank 0: write: ENOSPC"))
    with pytest.raises(tinker.RequestFailedError, match="ENOSPC") as caught:
        client.save_state("one").result()
    assert caught.value.category == types.RequestErrorCategory.Server
    assert client.save_state("one").result().path


def test_a_wrong_key_and_anothers_checkpoint_are_told_at_once(
    gateway: RunningGateway, service: tinker.ServiceClient
) -> None:
    client = new_client(service)
    path = client.save_state("one").result().path
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=gateway.where.url, api_key="tml-nobody").create_lora_training_client(
            "cellgate/tiny"
        ).result()
    with tinker.ServiceClient(base_url=gateway.where.url, api_key=BOB) as other:
        with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
            other.create_training_client_from_state(path).result()


def test_a_client_is_warned_that_optimizers_are_not_restored(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    assert gateway.cell is not None
    gateway.cell.kill()
    gateway.attach_cell(no_load_optim=True)
    with caplog.at_level(logging.WARNING), tinker.ServiceClient(base_url=gateway.where.url, api_key=ALICE) as service:
        new_client(service)
    assert "--no-load-optim" in caplog.text


def test_finishing_ends_the_session_and_nothing_is_left_to_retry(gateway: RunningGateway) -> None:
    began = time.monotonic()
    with tinker.ServiceClient(base_url=gateway.where.url, api_key=ALICE) as service:
        client = new_client(service)
    assert time.monotonic() - began < PROMPTLY_S
    session_id = client.model_id.partition(":")[0]
    assert gateway.scheduler.sessions.get("alice", session_id).is_finished


def test_a_step_that_waits_for_a_slow_cell_is_polled_quietly(
    gateway: RunningGateway, service: tinker.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert gateway.cell is not None
    client = new_client(service)
    hold = gateway.cell.hold_next(OptimStep)
    client.forward_backward(batch(3), "cross_entropy").result()
    stepped = client.optim_step(types.AdamParams())
    hold.wait_reached()
    # Several polls end without a result.
    time.sleep(2)
    hold.release()
    assert stepped.result().metrics == {"grad_norm": 3.0}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
