from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
import torch

from tests.trainer_cell.training.arithmetic import ADAM, Datum
from tests.trainer_cell.training.wire import array, forward_backward_command, wire_datum
from trainer_cell.protocol import commands
from trainer_cell.protocol.commands import AdamParams, Array, ForwardBackward
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import BaseModel
from trainer_cell.training.inputs import check_adam, read_sequences
from trainer_cell.training.losses import find_loss

BASE = BaseModel("local/some", (), "0", None, vocab_size=100, max_context=8)


def good() -> commands.Datum:
    return wire_datum(Datum(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4]), torch.tensor([0.0, 1.0, -1.0])))


def with_inputs(**changed: Array | None) -> commands.Datum:
    inputs = {name: values for name, values in {**good().inputs, **changed}.items() if values is not None}
    return msgspec.structs.replace(good(), inputs=inputs)


def with_tokens(*tokens: int) -> commands.Datum:
    return msgspec.structs.replace(good(), tokens=torch.tensor(tokens, dtype=torch.int32).numpy().tobytes())


BAD_DATA: dict[str, tuple[Callable[[], commands.Datum], str]] = {
    "missing key": (lambda: with_inputs(weights=None), "weights is missing"),
    "missing targets": (lambda: with_inputs(target_tokens=None), "target_tokens is missing"),
    "too short": (lambda: with_inputs(weights=array(torch.ones(2))), "weights has shape [2], it must be [3]"),
    "too long": (lambda: with_inputs(target_tokens=array(torch.ones(4, dtype=torch.int64))), "has shape [4]"),
    "two-dimensional": (lambda: with_inputs(weights=array(torch.ones(3, 1))), "has shape [3, 1]"),
    "wrong dtype": (lambda: with_inputs(target_tokens=array(torch.ones(3))), "is float32, it must be int64"),
    "weights as integers": (lambda: with_inputs(weights=array(torch.ones(3, dtype=torch.int64))), "must be float32"),
    "bytes missing": (lambda: with_inputs(weights=Array("float32", (3,), b"\0" * 11)), "has 11 bytes"),
    "negative token": (lambda: with_tokens(1, -2, 3), "tokens[1] is -2"),
    "token out of range": (lambda: with_tokens(1, 2, 100), "tokens[2] is 100"),
    "target out of range": (
        lambda: with_inputs(target_tokens=array(torch.tensor([2, 1 << 40, 4]))),
        f"target_tokens[1] is {1 << 40}",
    ),
    "negative target": (lambda: with_inputs(target_tokens=array(torch.tensor([-1, 2, 4]))), "target_tokens[0] is -1"),
    "NaN weight": (lambda: with_inputs(weights=array(torch.tensor([0.0, math.nan, 1.0]))), "weights[1] is nan"),
    "infinite weight": (lambda: with_inputs(weights=array(torch.tensor([-math.inf, 0.0, 1.0]))), "weights[0] is -inf"),
    "no tokens": (lambda: with_tokens(), "has no tokens"),
    "beyond the context": (lambda: with_tokens(*[1] * 9), "has 9 tokens, 8 are the most"),
    "half a token": (lambda: msgspec.structs.replace(good(), tokens=b"\0" * 7), "7 bytes"),
}


def read(command: ForwardBackward) -> object:
    return read_sequences(command, find_loss(command.loss, command.loss_config), BASE)


def test_good_data_is_read_as_sent() -> None:
    (sequence,) = read_sequences(forward_backward_command([good()]), find_loss("cross_entropy", {}), BASE)
    assert sequence.tokens.tolist() == [1, 2, 3]
    assert sequence.inputs["target_tokens"].tolist() == [2, 3, 4]
    assert sequence.inputs["weights"].tolist() == [0.0, 1.0, -1.0]


@pytest.mark.parametrize("what", BAD_DATA)
def test_bad_data_is_refused_naming_datum_and_field(what: str) -> None:
    make, message = BAD_DATA[what]
    with pytest.raises(CommandFailed) as failure:
        read(forward_backward_command([good(), make()]))
    assert failure.value.kind is ErrorKind.BAD_COMMAND
    assert failure.value.message.startswith("data[1]")
    assert message in failure.value.message
    assert len(failure.value.message) < 120


def test_no_data_is_refused() -> None:
    with pytest.raises(CommandFailed, match="data is empty"):
        read(forward_backward_command([]))


BAD_FOR_THE_LOSS: dict[str, tuple[str, dict[str, Array], str]] = {
    "no advantages": ("importance_sampling", {"logprobs": array(torch.zeros(3))}, "advantages is missing"),
    "infinite logprob": (
        "ppo",
        {"logprobs": array(torch.tensor([0.0, -math.inf, 0.0])), "advantages": array(torch.ones(3))},
        "logprobs[1] is -inf",
    ),
    "thresholds by token": (
        "ppo",
        {name: array(torch.zeros(3)) for name in ("logprobs", "advantages", "clip_low_threshold")},
        "clip_low_threshold is an option of ppo, not an input by token",
    ),
    "no mask": (
        "gspo",
        {name: array(torch.zeros(3)) for name in ("logprobs", "advantages")},
        "sequence_ratio_mask is missing",
    ),
    "empty mask": (
        "gspo",
        {name: array(torch.zeros(3)) for name in ("logprobs", "advantages", "sequence_ratio_mask")},
        "sequence_ratio_mask marks no token",
    ),
}


@pytest.mark.parametrize("what", BAD_FOR_THE_LOSS)
def test_inputs_that_do_not_suit_the_loss_are_refused(what: str) -> None:
    name, inputs, message = BAD_FOR_THE_LOSS[what]
    loss = find_loss(name, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1} if name == "gspo" else {})
    with pytest.raises(CommandFailed) as failure:
        read_sequences(forward_backward_command([with_inputs(**inputs)], loss=name), loss, BASE)
    assert failure.value.kind is ErrorKind.BAD_COMMAND
    assert message in failure.value.message


def test_inputs_the_loss_does_not_know_are_ignored() -> None:
    read(forward_backward_command([with_inputs(advantages=array(torch.ones(2)))]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("learning_rate", -1e-4),
        ("learning_rate", 1e39),
        ("learning_rate", 3e38),  # by itself it fits, what a step makes of it does not
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", math.nan),
        ("beta2", 1.5),
        ("eps", -1e-8),
        ("eps", math.nan),
        ("weight_decay", -0.1),
        ("weight_decay", math.inf),
        ("grad_clip_norm", -1.0),
        ("grad_clip_norm", math.nan),
    ],
)
def test_bad_optimizer_parameters_are_refused_naming_the_field(field: str, value: float) -> None:
    with pytest.raises(CommandFailed) as failure:
        check_adam(AdamParams(**{**ADAM, field: value}))
    assert failure.value.kind is ErrorKind.BAD_COMMAND
    assert failure.value.message.startswith(f"{field} is {value}")


def test_the_corners_of_the_allowed_optimizer_parameters_pass() -> None:
    check_adam(AdamParams(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    check_adam(AdamParams(**ADAM))
