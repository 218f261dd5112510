"""What a fake cell trains: a model of one number, with everything a real one's state has, and exact in FP32."""

from __future__ import annotations

import array
import math
import struct
from dataclasses import dataclass, field

from trainer_cell.protocol.commands import AdamParams, AdapterSpec, Datum, ForwardBackward, OptimStep
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import ForwardBackwardDone, OptimStepDone

_MOMENTUM = 0.5


def as_f32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@dataclass
class FakeModel:
    """weight moves by `learning_rate * momentum` a step; `pending` counts tokens with a weight since the last step.

    turn: of the last command that changed it.
    """

    adapter: AdapterSpec
    weight: float
    momentum: float = 0.0
    step: int = 0
    iteration: int = 0
    pending: float = 0.0
    last_params: AdamParams | None = field(default=None)
    turn: int = 0

    @classmethod
    def fresh(cls, adapter: AdapterSpec, seed: int) -> FakeModel:
        return cls(adapter, as_f32((seed % 997) / 997))

    def forward_backward(self, command: ForwardBackward, vocab_size: int) -> ForwardBackwardDone:
        """logprob of target t: `-(1 + t % 11 / 10 + weight)`; raises `CommandFailed` with nothing changed."""
        if command.loss != "cross_entropy":
            raise CommandFailed(ErrorKind.BAD_COMMAND, f"unknown loss {command.loss!r}")
        logprobs, loss, tokens = [], 0.0, 0.0
        for datum in command.data:
            targets, weights = _inputs_of(datum, vocab_size)
            told = array.array("f", (-(1 + target % 11 / 10 + self.weight) for target in targets))
            loss -= sum(weight * logprob for weight, logprob in zip(weights, told, strict=True))
            tokens += sum(weights)
            logprobs.append(told.tobytes())
        if not command.forward_only:
            self.pending = as_f32(self.pending + tokens)
        return ForwardBackwardDone(command.command_id, tuple(logprobs), {"loss:sum": loss, "tokens:sum": tokens})

    def optim_step(self, command: OptimStep) -> OptimStepDone:
        adam = command.adam
        if not (math.isfinite(adam.learning_rate) and adam.learning_rate >= 0):
            raise CommandFailed(ErrorKind.BAD_COMMAND, "learning_rate must be finite and not negative")
        if self.pending == 0:
            raise CommandFailed(ErrorKind.NO_GRADIENTS, "no forward_backward has succeeded since the last optim_step")
        self.momentum = as_f32(_MOMENTUM * self.momentum + self.pending)
        self.weight = as_f32(self.weight + adam.learning_rate * self.momentum)
        metrics = {"grad_norm": self.pending}
        self.pending, self.last_params = 0.0, adam
        self.step += 1
        self.iteration += 1
        return OptimStepDone(command.command_id, self.step, self.iteration, metrics)


def _inputs_of(datum: Datum, vocab_size: int) -> tuple[list[int], list[float]]:
    missing = {"target_tokens", "weights"} - datum.inputs.keys()
    if missing:
        raise CommandFailed(ErrorKind.BAD_COMMAND, f"loss inputs lack {', '.join(sorted(missing))}")
    targets = array.array("q", datum.inputs["target_tokens"].data)
    weights = array.array("f", datum.inputs["weights"].data)
    if not len(targets) == len(weights) == len(datum.tokens) // 4:
        raise CommandFailed(ErrorKind.BAD_COMMAND, "tokens, target_tokens and weights differ in length")
    if not all(0 <= target < vocab_size for target in targets):
        raise CommandFailed(ErrorKind.BAD_COMMAND, f"a target token is not between 0 and {vocab_size - 1}")
    return targets.tolist(), weights.tolist()
