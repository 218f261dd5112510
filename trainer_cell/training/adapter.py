"""A LoRA adapter: one pair (A, B) for each Hugging Face projection it targets, under the names PEFT gives them.

The tensors lie one after another in a single flat buffer, so that summing, stepping and copying an adapter are single
operations. They are in no module: `active` lends them to the base model's layers for the length of a pass.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.training.adapter_names import kind_of, pair_names
from trainer_cell.training.adapter_names import target_modules as target_modules
from trainer_cell.training.build import Base
from trainer_cell.training.projections import Adapted, Pair, Projection, Routing

# Every tensor begins at a multiple of 64 bytes, whatever lies before it: matrix kernels may sum in another order at
# another alignment.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Sharding:
    """This rank's piece of a tensor: `local_shape` from `offset` along `axis`; without an axis it is the whole."""

    global_shape: tuple[int, ...]
    axis: int | None
    offset: int
    local_shape: tuple[int, ...]


class Adapter:
    """The adapter tensors of one model on this rank.

    parameters: views into `flat`, by PEFT name in the order of the model; leaves that require gradients, in the base
    model's dtype and on its device. table: how each is cut, under the same names; begin: where each lies in `flat`, in
    elements. whole: the shape of every tensor of the model, also of those that other pipeline stages hold.
    """

    def __init__(self, base: Base, spec: AdapterSpec) -> None:
        targets = target_modules(spec)
        self.base, self.spec, self.scale = base, spec, spec.alpha / spec.rank
        self.whole: dict[str, tuple[int, int]] = {}
        for projection, (out_features, in_features) in base.features.items():
            if kind_of(projection) in targets:
                a, b = pair_names(projection)
                self.whole |= {a: (spec.rank, in_features), b: (out_features, spec.rank)}
        self.table: dict[str, Sharding] = {}
        self._names: list[tuple[Adapted, list[tuple[str, str] | None]]] = []
        for layer in base.adapted:
            self._names.append(
                (layer, [self._add(p) if kind_of(p.name) in targets else None for p in layer.projections])
            )
        self.begin, self.num_sharded, numel = _arrange(self.table)
        self.flat = torch.zeros(numel, dtype=base.dtype, device=base.device)
        self.parameters = {name: torch.nn.Parameter(view) for name, view in self.views(self.flat).items()}
        self._routings = [(layer, Routing(self._pairs_of(names), self.scale)) for layer, names in self._names]

    @property
    def num_parameters(self) -> int:
        """Elements of the whole model's adapter, whatever part of it this rank has."""
        return sum(math.prod(shape) for shape in self.whole.values())

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor's part of a buffer that is laid out as `flat` is."""
        return {
            name: flat[self.begin[name] : self.begin[name] + math.prod(sharding.local_shape)].view(sharding.local_shape)
            for name, sharding in self.table.items()
        }

    def initialise(self, seed: int) -> torch.Tensor:
        """Fresh values, float32, laid out as `flat` is: A drawn from `seed` and its own name, so that it is the same
        under every layout, B zero. `flat` gets them too, rounded to its dtype."""
        fresh = torch.zeros(self.flat.numel(), dtype=torch.float32)
        for name, view in self.views(fresh).items():
            if name.endswith(".lora_A.weight"):
                sharding = self.table[name]
                whole = _drawn(seed, name, sharding.global_shape)
                axis, offset = sharding.axis or 0, sharding.offset
                view.copy_(whole.narrow(axis, offset, sharding.local_shape[axis]))
        fresh = fresh.to(self.flat.device)
        with torch.no_grad():
            self.flat.copy_(fresh)
        return fresh

    @contextmanager
    def active(self) -> Iterator[None]:
        """The base model computes forward passes with this adapter inside."""
        with ExitStack() as stack:
            for layer, routing in self._routings:
                stack.enter_context(layer.routed(routing))
            yield

    def _add(self, projection: Projection) -> tuple[str, str]:
        """Enter a projection's pair in the table; its names are returned."""
        a, b = pair_names(projection.name)
        self.table[a] = _sharding(self.whole[a], 1, projection)
        self.table[b] = _sharding(self.whole[b], 0, projection)
        return a, b

    def _pairs_of(self, names: list[tuple[str, str] | None]) -> tuple[Pair | None, ...]:
        return tuple(pair and (self.parameters[pair[0]], self.parameters[pair[1]]) for pair in names)


def _sharding(global_shape: tuple[int, int], axis: int, projection: Projection) -> Sharding:
    """A is cut along its columns with a projection's inputs, B along its rows with the outputs; else it is whole."""
    if axis != projection.axis or projection.size == global_shape[axis]:
        return Sharding(global_shape, None, 0, global_shape)
    local = (projection.size, global_shape[1]) if axis == 0 else (global_shape[0], projection.size)
    return Sharding(global_shape, axis, projection.offset, local)


def _arrange(table: dict[str, Sharding]) -> tuple[dict[str, int], int, int]:
    """Where each tensor begins, in elements; cut tensors come first: (begins, elements of the cut ones, of all)."""
    begin: dict[str, int] = {}
    end = num_sharded = 0
    for is_cut in (True, False):
        for name, sharding in table.items():
            if (sharding.axis is not None) == is_cut:
                begin[name] = end
                end += -(-math.prod(sharding.local_shape) // _ALIGNMENT) * _ALIGNMENT
        num_sharded = end if is_cut else num_sharded
    return begin, num_sharded, end


def _drawn(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    whole = torch.empty(shape, dtype=torch.float32)
    torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    return whole
