"""Transformer layers that keep nothing but their input, and compute the rest once more in the backward pass."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint

from trainer_cell.training.projections import Routing, adapted_of


def get_ready_to_recompute() -> None:
    """torch imports its compiler at the first checkpoint, which must not take seconds of a command."""
    importlib.import_module("torch._dynamo")


class RecomputedLayer(TransformerLayer):  # type: ignore[misc]
    """Computes again with the adapter it was computed with, whichever is active by then.

    Megatron's own recomputation would not do: behind a frozen embedding its checkpoints have no input that requires
    gradients, and the adapters inside would be left without any, and without an error.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        routings = tuple(projection.routing for projection in adapted_of(self))
        # Nothing here is random.
        return checkpoint(self._routed, routings, args, kwargs, use_reentrant=False, preserve_rng_state=False)

    def _routed(self, routings: tuple[Routing, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ExitStack() as stack:
            for projection, routing in zip(adapted_of(self), routings, strict=True):
                stack.enter_context(projection.routed(routing))
            return super().forward(*args, **kwargs)
