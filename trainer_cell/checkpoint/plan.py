"""Who writes which piece of a model's checkpoint.

Every rank tells which pieces of which tensors it holds; a piece that several ranks hold is written by one of them, so
that each element is on disk exactly once, and the bytes are spread over the holders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.ranks import Ranks
from trainer_cell.training.adapter import Sharding
from trainer_cell.vault.manifest import ITEM_BYTES, TensorDType

PARTS = ("weight", "master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """One rank's part of one stored tensor; `key` is `<name>/<part>`, `axis` None means the whole of it."""

    name: str
    part: str
    dtype: TensorDType
    sharding: Sharding

    @property
    def key(self) -> str:
        return f"{self.name}/{self.part}"

    @property
    def num_bytes(self) -> int:
        return prod(self.sharding.local_shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class SavePlan:
    """pieces: for each rank what it writes, in order."""

    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for of_rank in self.pieces for piece in of_rank)


def stored_parts(dtype: str, include_optimizer: bool) -> tuple[str, ...]:
    """In FP32 the master is the weight, and is stored once."""
    if not include_optimizer:
        return ("weight",)
    return PARTS if dtype == "bf16" else ("weight", "exp_avg", "exp_avg_sq")


def part_dtype(part: str, dtype: str) -> TensorDType:
    """Of a part, as safetensors spells it: masters and moments are FP32 whatever the weights are."""
    return "BF16" if part == "weight" and dtype == "bf16" else "F32"


def make_plan(tables: list[Mapping[str, Sharding]], parts: tuple[str, ...], dtype: str) -> SavePlan:
    """`tables`: for each rank its tensor names and what it holds of them. The same on every rank."""
    holders: dict[tuple[str, Sharding], list[int]] = {}
    for rank, table in enumerate(tables):
        for name, sharding in table.items():
            if prod(sharding.local_shape) == 0:
                continue  # a vocabulary smaller than its padding can leave a rank without rows
            holders.setdefault((name, sharding), []).append(rank)
    load = [0] * len(tables)
    pieces: list[list[Piece]] = [[] for _ in tables]
    for part in parts:
        for (name, sharding), ranks in sorted(holders.items(), key=lambda item: (item[0][0], item[0][1].offset)):
            piece = Piece(name, part, part_dtype(part, dtype), sharding)
            writer = min(ranks, key=lambda rank: (load[rank], rank))
            load[writer] += piece.num_bytes
            pieces[writer].append(piece)
    return SavePlan(tuple(tuple(of_rank) for of_rank in pieces))


class PlanCache:
    """Plans by adapter shape: the tables are gathered once, then saves of that shape need no collective for it."""

    def __init__(self, ranks: Ranks, dtype: str) -> None:
        self._ranks = ranks
        self._dtype = dtype
        self._plans: dict[tuple[AdapterSpec, bool], SavePlan] = {}

    def plan(self, spec: AdapterSpec, table: Mapping[str, Sharding], include_optimizer: bool) -> SavePlan:
        """All ranks together, with the same arguments but for `table`, which is this rank's own."""
        key = (spec, include_optimizer)
        if key not in self._plans:
            parts = stored_parts(self._dtype, include_optimizer)
            self._plans[key] = make_plan(self._ranks.gather(dict(table)), parts, self._dtype)
        return self._plans[key]
