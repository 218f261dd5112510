"""Megatron's fused linear layers, each knowing which Hugging Face projections it holds and which adapter acts on them.

Adapter tensors are not parameters of these modules: an adapter hands references in for the length of one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Projection:
    """One Hugging Face linear layer and this rank's part of it.

    name: path of the module, e.g. `model.layers.0.self_attn.q_proj`. Its weight is [out_features, in_features].
    axis: dimension of the weight that tensor parallelism cuts (0 rows, 1 columns); this rank has `size` from `offset`.
    """

    name: str
    out_features: int
    in_features: int
    axis: int
    offset: int
    size: int


def fuse(parts: Sequence[torch.Tensor], groups: int, dim: int) -> torch.Tensor:
    """Projections side by side in Megatron's order: for each group in turn, its share of every part."""
    dim %= parts[0].dim()
    grouped = [part.unflatten(dim, (groups, -1)) for part in parts]
    return torch.cat(grouped, dim + 1).flatten(dim, dim + 1)


@dataclass(frozen=True)
class Routing:
    """Which adapter acts on a layer: (A, B) for each projection, None for one it leaves alone, and alpha / rank."""

    pairs: tuple[Pair | None, ...] = ()
    scale: float = 1.0


class Adapted:
    """A linear layer that adds the low-rank products of the active adapter, if there is one.

    groups: this rank's KV groups for a fused qkv, else 1.
    """

    projections: tuple[Projection, ...] = ()
    groups: int = 1
    routing: Routing = Routing()

    @contextmanager
    def routed(self, routing: Routing) -> Iterator[None]:
        """Compute with this adapter inside."""
        before, self.routing = self.routing, routing
        try:
            yield
        finally:
            self.routing = before

    def is_adapted(self) -> bool:
        return any(pair is not None for pair in self.routing.pairs)

    def column_product(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, in] -> [tokens, this rank's part of all projections, fused]; A is whole on every rank, B is cut."""
        pairs, scale = self.routing.pairs, self.routing.scale
        present = [pair for pair in pairs if pair is not None]
        low = scale * (rows @ torch.cat([a for a, _ in present]).t())
        # One all-reduce in the backward pass for all projections together.
        lows = iter(copy_to_tensor_model_parallel_region(low).split([a.size(0) for a, _ in present], -1))
        products = [
            next(lows) @ pair[1].t() if pair is not None else rows.new_zeros(rows.size(0), projection.size)
            for pair, projection in zip(pairs, self.projections, strict=True)
        ]
        return fuse(products, self.groups, -1) if len(products) > 1 else products[0]

    def row_product(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, this rank's part of in] -> [tokens, out]; A is cut, B is whole on every rank."""
        (pair,) = self.routing.pairs
        assert pair is not None
        a, b = pair
        return (self.routing.scale * reduce_from_tensor_model_parallel_region(rows @ a.t())) @ b.t()


def adapted_of(layer: Any) -> tuple[Adapted, ...]:
    """The layers of a transformer layer that take adapters, in the order of the model."""
    attention, mlp = layer.self_attention, layer.mlp
    return attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2


def as_rows(inputs: torch.Tensor) -> torch.Tensor:
    """[..., features] -> [all the rest, features].

    Products of more than two dimensions take other kernels: slower ones, and others without gradients than with.
    """
    return inputs.reshape(-1, inputs.size(-1))


class AdaptedColumn(Adapted, ColumnParallelLinear):  # type: ignore[misc]
    """q, k, v fused, or gate and up."""

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = as_rows(inputs)
        out, bias = super().forward(rows, *args, **kwargs)
        out = out + self.column_product(rows) if self.is_adapted() else out
        return out.view(*inputs.shape[:-1], -1), bias


class AdaptedRow(Adapted, RowParallelLinear):  # type: ignore[misc]
    """o or down."""

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = as_rows(inputs)
        out, bias = super().forward(rows, *args, **kwargs)
        out = out + self.row_product(rows) if self.is_adapted() else out
        return out.view(*inputs.shape[:-1], -1), bias
