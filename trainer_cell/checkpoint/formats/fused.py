"""Whole tensors out of the pieces of tensor-parallel ranks, and pairs for each projection out of fused ones.

Which way a tensor is cut is told by its shapes: alike and whole, it is a copy; else the pieces make up one dimension.
Both layouts that Megatron's adapters have had are read so: A whole or cut along its rank, B of a row-parallel layer
whole or cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainer_cell.checkpoint.formats.errors import Incompatible, SourceDamaged
from trainer_cell.checkpoint.formats.foreign import Features, Tensors
from trainer_cell.checkpoint.formats.megatron_names import Place, tensor_name
from trainer_cell.training.model_shape import ModelShape


def join(pieces: Sequence[torch.Tensor], shape: tuple[int, int], name: str, is_padded: bool = False) -> torch.Tensor:
    """The tensor of that shape; `is_padded`: its rows may go on beyond, and are cut.

    Raises `SourceDamaged` when copies differ, `Incompatible` when the pieces do not make up the shape.
    """
    if len({piece.dtype for piece in pieces}) != 1 or any(piece.dim() != 2 for piece in pieces):
        raise Incompatible(f"{name}: the ranks' pieces are not matrices of one dtype")
    if all(tuple(piece.shape) == shape for piece in pieces):
        if not all(torch.equal(piece, pieces[0]) for piece in pieces):
            raise SourceDamaged(f"{name}: the copies of the tensor-parallel ranks differ")
        return pieces[0]
    for axis in (0, 1):
        others = {piece.shape[1 - axis] for piece in pieces}
        total = sum(piece.shape[axis] for piece in pieces)
        fits = total == shape[axis] or (is_padded and axis == 0 and total > shape[0])
        if fits and others == {shape[1 - axis]}:
            return torch.cat(list(pieces), axis)[: shape[0]]
    shapes = " and ".join(str(list(piece.shape)) for piece in pieces)
    raise Incompatible(f"{name}: {shapes} do not make up {list(shape)}")


def unfused(place: Place, piece: torch.Tensor, shape: ModelShape, name: str) -> tuple[torch.Tensor, ...]:
    """One rank's piece for each of the place's projections: A is theirs together, B is split.

    Of `linear_qkv` the rows of B come by KV group, in each the queries', the key's and the value's; of `linear_fc1`
    first the gate's. Raises `Incompatible` when the rows do not divide so.
    """
    if not place.is_fused or place.half == "A":
        return (piece,) * len(place.short)
    if piece.dim() != 2:
        raise Incompatible(f"{name}: has shape {list(piece.shape)}, expected a matrix")
    groups = 1
    if place.module == "linear_qkv":
        sizes = [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]
        groups = piece.size(0) // sum(sizes)
    else:
        sizes = [piece.size(0) // 2] * 2
    if groups < 1 or piece.size(0) != groups * sum(sizes):
        raise Incompatible(f"{name}: {list(piece.shape)} does not divide into {', '.join(place.short)}")
    parts = piece.unflatten(0, (groups, sum(sizes))).split(sizes, 1)
    return tuple(part.flatten(0, 1) for part in parts)


class Assembly:
    """Whole tensors under PEFT's names, of an adapter of that rank, from one place after the other."""

    def __init__(self, shape: ModelShape, features: Features, rank: int) -> None:
        self._shape = shape
        self._features = features
        self._rank = rank
        self.tensors: Tensors = {}

    def add(self, name: str, place: Place, layer: int | None, pieces: Sequence[torch.Tensor]) -> None:
        """pieces: of the tensor-parallel ranks, in order; layer: the model's. Raises what `join` and `unfused` do."""
        of_projections = zip(*(unfused(place, piece, self._shape, name) for piece in pieces), strict=True)
        for projection, of_ranks in zip(place.projections(layer), of_projections, strict=True):
            if projection not in self._features:
                raise Incompatible(f"{name}: the base model has no {projection}")
            out_features, in_features = self._features[projection]
            whole = (self._rank, in_features) if place.half == "A" else (out_features, self._rank)
            is_padded = projection == "lm_head" and place.half == "B"
            self.tensors[tensor_name(projection, place.half)] = join(of_ranks, whole, name, is_padded).clone()


def rank_of(places: Mapping[str, Place], tensors: Mapping[str, torch.Tensor]) -> int:
    """The columns of any B, which nothing cuts; raises `SourceDamaged` when there is none."""
    for name, place in places.items():
        if place.half == "B" and tensors[name].dim() >= 2:
            return int(tensors[name].size(-1))
    raise SourceDamaged("missing tensors: every linear_out")
