"""A request with a wrong content has spent its number: its future fails as the user's fault, and the model goes on."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import zstandard
from hypothesis import strategies

from gateway.http import tinker_pb2 as pb
from tests.gateway.http.running import RunningGateway, forward_backward
from tests.gateway.http.test_bad_bodies import json_values, names
from trainer_cell.protocol.commands import AdamParams, OptimStep

ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
BAD_STEPS: dict[str, dict[str, Any]] = {
    "no parameters": {},
    "a negative learning rate": {"adam_params": {**ADAM, "learning_rate": -1e-3}},
    "a learning rate that is text": {"adam_params": {**ADAM, "learning_rate": "NaN"}},
    "beta 1": {"adam_params": {**ADAM, "beta1": 1.0}},
    "another optimizer": {"optimizer_params": {"type": "dimuon", "learning_rate": 1e-3}},
    "parameters that are a list": {"adam_params": []},
}


@pytest.mark.parametrize("body", BAD_STEPS)
def test_a_wrong_optim_step_fails_in_its_future_and_the_next_one_works(gateway: RunningGateway, body: str) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    alice.result(alice.send_forward_backward(forward_backward(model_id, 1)))
    failed = alice.run("optim_step", model_id=model_id, seq_id=2, **BAD_STEPS[body])
    assert (failed["category"], failed["kind"]) == ("user", "bad_command")
    assert alice.run("optim_step", model_id=model_id, seq_id=3, adam_params=ADAM)["step"] == 1
    assert gateway.cell is not None
    told = [command.adam for command in gateway.cell.commands if isinstance(command, OptimStep)]
    assert told == [AdamParams(**ADAM)]


def test_a_save_for_a_sampler_fails_in_its_future_and_what_follows_goes_on(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    alice.result(alice.send_forward_backward(forward_backward(model_id, 1)))
    failed = alice.run("save_weights_for_sampler", model_id=model_id, seq_id=2, path="s", kind="snapshot")
    assert (failed["category"], failed["kind"]) == ("user", "bad_command")
    assert alice.run("optim_step", model_id=model_id, seq_id=3, adam_params=ADAM)["step"] == 1


def test_nan_as_json_is_no_learning_rate(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    raw = json.dumps({"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": float("nan")}})
    accepted = alice.http.post("/api/v1/optim_step", content=raw, headers={"Content-Type": "application/json"})
    assert alice.result(accepted).json()["category"] == "user"


def _no_data(message: pb.ForwardBackwardRequest) -> None:
    del message.data[:]


def _no_target(message: pb.ForwardBackwardRequest) -> None:
    del message.data[0].loss_fn_inputs["target_tokens"]


def _short_weights(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].loss_fn_inputs["weights"].dense = struct.pack("<2f", 1, 1)


def _token_too_large(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].loss_fn_inputs["target_tokens"].dense = struct.pack("<3q", 1, 512, 3)


def _token_negative(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].loss_fn_inputs["target_tokens"].dense = struct.pack("<3q", 1, -1, 3)


def _no_length(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].model_input[0].encoded_text.tokens = b""


def _unknown_loss(message: pb.ForwardBackwardRequest) -> None:
    message.loss_fn = "perplexity"


def _unknown_dtype(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].loss_fn_inputs["weights"].dtype = 99


def _image(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].model_input.add().image.format = "png"


def _sparse(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].loss_fn_inputs["weights"].sparse_csr.values = b""


def _two_dimensions(message: pb.ForwardBackwardRequest) -> None:
    message.data[0].loss_fn_inputs["weights"].shape.extend([3, 1])


def _nan_config(message: pb.ForwardBackwardRequest) -> None:
    message.loss_fn_config["clip"] = float("nan")


BAD_BATCHES = [
    _no_data,
    _no_target,
    _short_weights,
    _token_too_large,
    _token_negative,
    _no_length,
    _unknown_loss,
    _unknown_dtype,
    _image,
    _sparse,
    _two_dimensions,
    _nan_config,
]


def test_malformed_loss_inputs_fail_in_their_futures_and_the_model_lives(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    for seq_id, change in enumerate(BAD_BATCHES, start=1):
        raw = forward_backward(model_id, seq_id, change=change)
        failed = alice.result(alice.send_forward_backward(raw), "application/x-protobuf").json()
        assert (failed["category"], failed["kind"]) == ("user", "bad_command"), change.__name__
        assert 0 < len(failed["error"]) < 300
        assert "Traceback" not in failed["error"]
        assert "/" not in failed["error"]
    good = len(BAD_BATCHES) + 1
    done = alice.result(alice.send_forward_backward(forward_backward(model_id, good)))
    assert done.json()["metrics"]["tokens:sum"] == 3


def test_a_wrong_batch_that_only_looked_ahead_does_not_spoil_the_gradient(gateway: RunningGateway) -> None:
    def forward_only(message: pb.ForwardBackwardRequest) -> None:
        message.forward_only = True
        _no_data(message)

    def step_after(change: Callable[[pb.ForwardBackwardRequest], None]) -> Any:
        alice = gateway.alice
        model_id = alice.new_model()
        alice.send_forward_backward(forward_backward(model_id, 1)).raise_for_status()
        alice.send_forward_backward(forward_backward(model_id, 2, change=change)).raise_for_status()
        return alice.run("optim_step", model_id=model_id, seq_id=3, adam_params=ADAM)

    assert step_after(forward_only)["step"] == 1
    assert step_after(_no_data)["kind"] == "partial_gradients"


def test_a_long_compressed_batch_is_taken_and_answered(gateway: RunningGateway) -> None:
    alice = gateway.alice
    model_id = alice.new_model()
    raw = zstandard.compress(forward_backward(model_id, 1, length=200_000))
    done = alice.result(alice.send_forward_backward(raw, **{"Content-Encoding": "zstd"}), "application/x-protobuf")
    assert pb.ForwardBackwardOutput.FromString(done.content).metrics["tokens:sum"] == 200_000


def test_a_body_that_grows_over_the_limit_when_decompressed_is_413(gateway: RunningGateway) -> None:
    bomb = zstandard.compress(bytes(64 << 20))
    answer = gateway.alice.send_forward_backward(bomb, **{"Content-Encoding": "zstd"})
    assert (answer.status_code, answer.json()["type"]) == (413, "body_too_large")


@pytest.mark.parametrize("content_type", ["application/json", "application/octet-stream", ""])
def test_only_protobuf_is_a_batch(gateway: RunningGateway, content_type: str) -> None:
    answer = gateway.alice.send_forward_backward(b"{}", **{"Content-Type": content_type})
    assert answer.status_code == 415


BAD_MODELS: dict[str, dict[str, Any]] = {
    "rank 0": {"lora_config": {"rank": 0}},
    "a rank over the largest": {"lora_config": {"rank": 65}},
    "a rank that is text": {"lora_config": {"rank": "8"}},
    "a negative seed": {"lora_config": {"rank": 8, "seed": -1}},
    "a seed over 63 bits": {"lora_config": {"rank": 8, "seed": 2**63}},
    "nothing to train": {"lora_config": {"rank": 8, "train_attn": False, "train_mlp": False, "train_unembed": False}},
    "another optimizer": {"lora_config": {"rank": 8}, "optimizer_config": {"type": "dimuon", "version": 1}},
    "an unknown base model": {"lora_config": {"rank": 8}, "base_model": "meta/none"},
    "no config": {},
}


@pytest.mark.parametrize("body", BAD_MODELS)
def test_a_model_that_cannot_be_made_fails_in_its_future(shared_gateway: RunningGateway, body: str) -> None:
    alice = shared_gateway.alice
    session_id = alice.session()
    wrong = {"base_model": "cellgate/tiny", **BAD_MODELS[body]}
    failed = alice.run("create_model", session_id=session_id, model_seq_id=0, **wrong)
    assert (failed["category"], failed["kind"]) == ("user", "bad_command")
    assert alice.new_model(session_id, model_seq_id=1) == f"{session_id}:train:1"


@pytest.mark.parametrize("flag", [None, "yes", 1, 0, "true", "missing"])
def test_a_load_never_guesses_whether_the_optimizer_is_wanted(gateway: RunningGateway, flag: object) -> None:
    alice = gateway.alice
    session_id = alice.session()
    model_id = alice.new_model(session_id)
    path = alice.run("save_weights", model_id=model_id, seq_id=1, path="x")["path"]
    asked = {"path": path} if flag == "missing" else {"path": path, "optimizer": flag}
    for turn in ({"model_id": model_id, "seq_id": 2}, {"session_id": session_id, "model_seq_id": 1}):
        failed = alice.run("load_weights", **turn, **asked)
        assert failed["category"] == "user"
        assert "optimizer" in failed["error"]


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"weights_access_token": "tml-other"}, "weights_access_token"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config"),
        ({"base_model": "meta/none"}, "base_model"),
    ],
)
def test_a_load_refuses_what_it_would_have_to_ignore(
    gateway: RunningGateway, others: dict[str, Any], says: str
) -> None:
    alice = gateway.alice
    session_id = alice.session()
    path = alice.run("save_weights", model_id=alice.new_model(session_id), seq_id=1, path="x")["path"]
    failed = alice.run("load_weights", session_id=session_id, model_seq_id=1, path=path, optimizer=False, **others)
    assert failed["category"] == "user"
    assert says in failed["error"]
    made = alice.run("load_weights", session_id=session_id, model_seq_id=2, path=path, optimizer=False)
    assert made["model_id"] == f"{session_id}:train:2"


numbers = itertools.count(1)


@hypothesis.settings(
    max_examples=60, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    route=strategies.sampled_from(["optim_step", "save_weights", "load_weights"]),
    body=strategies.dictionaries(names, json_values, max_size=6),
)
def test_whatever_comes_with_a_turn_gets_a_future_that_ends(
    invented_model: tuple[RunningGateway, str], route: str, body: dict[str, Any]
) -> None:
    gateway, model_id = invented_model
    turn = {"model_id": model_id, "seq_id": next(numbers)}
    for addressing in ("session_id", "model_seq_id"):
        body.pop(addressing, None)
    raw = json.dumps({**body, **turn}).encode()
    accepted = gateway.alice.http.post(f"/api/v1/{route}", content=raw, headers={"Content-Type": "application/json"})
    assert accepted.status_code == 200, accepted.text
    told = gateway.alice.result(accepted).json()
    assert told.get("category", "user") == "user", told


@pytest.fixture(scope="module")
def invented_model(shared_gateway: RunningGateway) -> tuple[RunningGateway, str]:
    return shared_gateway, shared_gateway.alice.new_model()
