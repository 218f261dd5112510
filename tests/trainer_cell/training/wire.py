"""Commands as the gateway would send them, made of plain tensors, and outcomes back into tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tests.trainer_cell.training.arithmetic import Datum
from trainer_cell.protocol import commands
from trainer_cell.protocol.commands import AdamParams, Array, ForwardBackward, OptimStep
from trainer_cell.protocol.outcomes import ForwardBackwardDone

MODEL = "session:train:0"


def array(values: torch.Tensor) -> Array:
    dtype = {torch.float32: "float32", torch.int64: "int64"}[values.dtype]
    return Array(dtype, tuple(values.shape), values.numpy().tobytes())  # type: ignore[arg-type]


def wire_datum(datum: Datum) -> commands.Datum:
    inputs = {"target_tokens": array(datum.targets), "weights": array(datum.weights)}
    return commands.Datum(datum.tokens.to(torch.int32).numpy().tobytes(), inputs)


def forward_backward_command(
    data: Iterable[Datum | commands.Datum], forward_only: bool = False, loss: str = "cross_entropy"
) -> ForwardBackward:
    on_wire = tuple(wire_datum(datum) if isinstance(datum, Datum) else datum for datum in data)
    return ForwardBackward("fb", MODEL, on_wire, loss, {}, forward_only)


def optim_command(adam: Mapping[str, float]) -> OptimStep:
    return OptimStep("step", MODEL, AdamParams(**adam))


def logprobs_of(done: ForwardBackwardDone) -> list[torch.Tensor]:
    return [torch.frombuffer(bytearray(said), dtype=torch.float32) for said in done.logprobs]
