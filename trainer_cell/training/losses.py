"""Loss functions over per-token log-probabilities, by their wire name. Every loss is a sum over tokens and datums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from trainer_cell.protocol.commands import DType
from trainer_cell.protocol.errors import CommandFailed, ErrorKind

LossConfig = Mapping[str, float | str]
Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """One loss function.

    inputs: what every datum must carry, by name and dtype, each of shape [T]; `target_tokens` is always among them.
    options: names its configuration may hold.
    terms: float32 log-probabilities [tokens], the inputs [tokens], the configuration -> float32 losses [tokens].
    """

    name: str
    inputs: Mapping[str, DType]
    options: frozenset[str]
    terms: Callable[[torch.Tensor, Inputs, LossConfig], torch.Tensor]


def _cross_entropy(logprobs: torch.Tensor, inputs: Inputs, _config: LossConfig) -> torch.Tensor:
    return -inputs["weights"] * logprobs


LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (Loss("cross_entropy", {"target_tokens": "int64", "weights": "float32"}, frozenset(), _cross_entropy),)
}


def find_loss(name: str, config: LossConfig) -> Loss:
    """Raises `CommandFailed` (BAD_COMMAND) for an unknown name or option."""
    loss = LOSSES.get(name)
    if loss is None:
        known = ", ".join(sorted(LOSSES))
        raise CommandFailed(ErrorKind.BAD_COMMAND, f"unknown loss {name[:64]!r}; known: {known}")
    for option in config:
        if option not in loss.options:
            known = ", ".join(sorted(loss.options)) or "none"
            raise CommandFailed(ErrorKind.BAD_COMMAND, f"{name} has no option {option[:64]!r}; known: {known}")
    return loss
