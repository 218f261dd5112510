"""Whole tensors out of the pieces that the ranks of a cell hold, and pieces out of whole ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainer_cell.ranks import Ranks
from trainer_cell.training.adapter import Sharding

Pieces = dict[str, tuple[Sharding, torch.Tensor]]


def assembled(
    ranks: Ranks, table: Mapping[str, Sharding], local: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """On every rank, every tensor of the model whole. Copies must be the same bits, and no element may be missing."""
    return whole_of(ranks.gather({name: (sharding, local[name].detach().clone()) for name, sharding in table.items()}))


def whole_of(of_ranks: Sequence[Pieces]) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    is_there: dict[str, torch.Tensor] = {}
    for pieces in of_ranks:
        for name, (sharding, piece) in pieces.items():
            target = cut(whole.setdefault(name, torch.zeros(sharding.global_shape, dtype=piece.dtype)), sharding)
            known = cut(is_there.setdefault(name, torch.zeros(sharding.global_shape, dtype=torch.bool)), sharding)
            assert torch.equal(target[known], piece[known]), f"the copies of {name} differ"
            target.copy_(piece)
            known.fill_(True)
    missing = [name for name, known in is_there.items() if not bool(known.all())]
    assert not missing, missing
    return whole


def cut(whole: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """The piece of a whole tensor, as a view."""
    if sharding.axis is None:
        return whole
    return whole.narrow(sharding.axis, sharding.offset, sharding.local_shape[sharding.axis])
