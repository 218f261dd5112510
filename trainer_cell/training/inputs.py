"""What a client sent, checked before anything is computed. Pure: every rank comes to the same verdict by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer_cell.protocol.commands import AdamParams, Array, Datum, DType, ForwardBackward
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import BaseModel
from trainer_cell.training.losses import Loss

_NUMPY_DTYPES: dict[DType, str] = {"float32": "<f4", "int64": "<i8"}
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sequence:
    """A checked datum on the CPU: tokens int64 [T]; inputs of the loss by name, float32 or int64 [T]."""

    tokens: torch.Tensor
    inputs: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.tokens)


def read_sequences(command: ForwardBackward, loss: Loss, base: BaseModel) -> list[Sequence]:
    """Raises `CommandFailed` (BAD_COMMAND) naming datum and field; inputs the loss does not know are ignored."""
    if not command.data:
        raise CommandFailed(ErrorKind.BAD_COMMAND, "data is empty")
    sequences = []
    for index, datum in enumerate(command.data):
        with _naming(f"data[{index}]"):
            sequences.append(_read_datum(datum, loss, base))
    return sequences


def check_adam(params: AdamParams) -> None:
    """Raises `CommandFailed` (BAD_COMMAND) naming the field."""
    for field in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(params, field)
        if not 0 <= value <= _LARGEST_FLOAT32:
            raise CommandFailed(ErrorKind.BAD_COMMAND, f"{field} is {value}: it must be finite and not negative")
    for field in ("beta1", "beta2"):
        value = getattr(params, field)
        if not 0 <= value < 1:
            raise CommandFailed(ErrorKind.BAD_COMMAND, f"{field} is {value}: it must be in [0, 1)")
    # What a step multiplies by: the rate, corrected for the bias of the first moment, and the decay.
    rate = params.learning_rate
    for what, factor in (
        ("over 1 - beta1", rate / (1 - params.beta1)),
        ("by weight_decay", rate * params.weight_decay),
    ):
        if not factor <= _LARGEST_FLOAT32:
            reason = f"learning_rate is {rate}: {what} it must fit a 32-bit float"
            raise CommandFailed(ErrorKind.BAD_COMMAND, reason)


class _Bad(Exception):
    """What is wrong, without the place."""


@contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except _Bad as problem:
        raise CommandFailed(ErrorKind.BAD_COMMAND, f"{place}{problem}") from None


def _read_datum(datum: Datum, loss: Loss, base: BaseModel) -> Sequence:
    if len(datum.tokens) % 4:
        raise _Bad(f".tokens: {len(datum.tokens)} bytes are not int32")
    tokens = np.frombuffer(datum.tokens, dtype="<i4").astype(np.int64)
    if not len(tokens):
        raise _Bad(" has no tokens")
    if len(tokens) > base.max_context:
        raise _Bad(f" has {len(tokens)} tokens, {base.max_context} are the most")
    _check_vocabulary("tokens", tokens, base.vocab_size)
    for option in loss.options:
        if option in datum.inputs:
            raise _Bad(f".{option} is an option of {loss.name}, not an input by token")
    inputs = {name: _read_input(datum, name, dtype, len(tokens)) for name, dtype in loss.inputs.items()}
    for name in loss.masks:
        if not inputs[name].any():
            raise _Bad(f".{name} marks no token")
    _check_vocabulary("target_tokens", inputs["target_tokens"], base.vocab_size)
    return Sequence(torch.from_numpy(tokens), {name: torch.from_numpy(values) for name, values in inputs.items()})


def _read_input(datum: Datum, name: str, dtype: DType, length: int) -> npt.NDArray[Any]:
    array = datum.inputs.get(name)
    if array is None:
        raise _Bad(f".{name} is missing")
    if array.dtype != dtype:
        raise _Bad(f".{name} is {array.dtype}, it must be {dtype}")
    if array.shape != (length,):
        raise _Bad(f".{name} has shape {list(array.shape)}, it must be [{length}] as model_input is")
    values = _decode(name, array)
    if dtype == "float32" and not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise _Bad(f".{name}[{at}] is {values[at]}")
    return values


def _decode(name: str, array: Array) -> npt.NDArray[Any]:
    dtype = np.dtype(_NUMPY_DTYPES[array.dtype])
    if len(array.data) != math.prod(array.shape) * dtype.itemsize:
        raise _Bad(f".{name} has {len(array.data)} bytes, which do not make shape {list(array.shape)}")
    return np.frombuffer(array.data, dtype=dtype).astype(dtype.newbyteorder("="))


def _check_vocabulary(name: str, tokens: npt.NDArray[Any], vocab_size: int) -> None:
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise _Bad(f".{name}[{at}] is {tokens[at]}, outside the vocabulary of {vocab_size}")
