"""Everything a command could change of a slot, copied, so that two moments can be compared bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer_cell.training.slots import Slot


@dataclass(frozen=True)
class Snapshot:
    tensors: dict[str, torch.Tensor]
    numbers: tuple[object, ...]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Snapshot)
        return (
            self.numbers == other.numbers
            and self.tensors.keys() == other.tensors.keys()
            and all(torch.equal(_bits(tensor), _bits(other.tensors[name])) for name, tensor in self.tensors.items())
        )


def snapshot(slot: Slot) -> Snapshot:
    """Weights, masters, moments, accumulated gradients and counts; gradients left on parameters as well."""
    optimizer = slot.optimizer
    tensors = {
        "weights": slot.adapter.flat.clone(),
        "masters": optimizer.master.clone(),
        "exp_avg": optimizer.exp_avg.clone(),
        "exp_avg_sq": optimizer.exp_avg_sq.clone(),
    }
    if optimizer.gradient is not None:
        tensors["gradient"] = optimizer.gradient.clone()
    for name, parameter in slot.adapter.parameters.items():
        if parameter.grad is not None:
            tensors[f"left on {name}"] = parameter.grad.clone()
    return Snapshot(tensors, (optimizer.step, optimizer.iteration, optimizer.last_params))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
