"""The gradient of one command, kept apart from its slot until the command has succeeded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer_cell.training.adapter import Adapter


@contextmanager
def gathering(adapter: Adapter) -> Iterator[torch.Tensor]:
    """A zeroed float32 buffer, laid out as the adapter's, to which every backward pass inside adds.

    Low-precision gradients are thus summed in FP32 over the rows of a command. The adapter's tensors hold no gradient
    afterwards, however it ended.
    """
    scratch = torch.zeros(adapter.flat.numel(), dtype=torch.float32, device=adapter.flat.device)
    hooks = [
        adapter.parameters[name].register_post_accumulate_grad_hook(_Mover(view))
        for name, view in adapter.views(scratch).items()
    ]
    try:
        yield scratch
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in adapter.parameters.values():
            parameter.grad = None


class _Mover:
    """Moves a parameter's fresh gradient into its place in the scratch buffer."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def __call__(self, parameter: torch.nn.Parameter) -> None:
        self._target.add_(parameter.grad)
        parameter.grad = None
