"""Who writes which piece of a model's checkpoint.

Every rank tells which pieces of which tensors it holds; a piece that several ranks hold is written by one of them, so
that each element is on disk exactly once, and the bytes are spread over the holders. Each rank writes runs of what lies
side by side in its own buffers, so that a capture is a few large copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from trainer_cell.checkpoint.runs import Placed, find_spans
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.ranks import Ranks
from trainer_cell.training.adapter import Adapter, Sharding
from trainer_cell.vault.manifest import ITEM_BYTES, TensorDType
from trainer_cell.vault.shard_layout import PieceSpec, ShardLayout, lay_out
from trainer_cell.vault.tensor_index import TensorIndex, index_of

PARTS = ("weight", "master", "exp_avg", "exp_avg_sq")

# Of one rank: tensor name → how it is cut and where it begins in the rank's flat buffers, in elements.
Table = dict[str, tuple[Sharding, int]]


@dataclass(frozen=True)
class Piece:
    """One rank's part of one stored tensor; `key` is `<name>/<part>`. begin: in the rank's buffer of that part, in
    elements."""

    name: str
    part: str
    dtype: TensorDType
    sharding: Sharding
    begin: int

    @property
    def key(self) -> str:
        return f"{self.name}/{self.part}"

    @property
    def numel(self) -> int:
        return prod(self.sharding.local_shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def spec(self) -> PieceSpec:
        sharding = self.sharding
        return PieceSpec(
            self.key, self.dtype, sharding.local_shape, sharding.global_shape, sharding.axis, sharding.offset
        )


@dataclass(frozen=True)
class Stretch:
    """Elements that lie side by side both in a rank's buffer of `part`, from `source` on (elements), and in its file,
    from `target` on (bytes)."""

    part: str
    dtype: TensorDType
    source: int
    numel: int
    target: int


@dataclass(frozen=True)
class SavePlan:
    """pieces: for each rank what it writes, in order."""

    pieces: tuple[tuple[Piece, ...], ...]

    @cached_property
    def layouts(self) -> tuple[ShardLayout | None, ...]:
        """Each rank's file; None for a rank that writes nothing."""
        return tuple(
            lay_out(f"rank{rank:05d}.safetensors", [piece.spec for piece in of_rank]) if of_rank else None
            for rank, of_rank in enumerate(self.pieces)
        )

    def image_bytes(self, rank: int) -> int:
        """Of the memory that holds the image of that rank's file."""
        layout = self.layouts[rank]
        return layout.image_bytes if layout is not None else 0

    @cached_property
    def stretches(self) -> tuple[tuple[Stretch, ...], ...]:
        """Each rank's copies from its buffers into the image of its file."""
        return tuple(
            tuple(_stretches(of_rank, layout)) if layout is not None else ()
            for of_rank, layout in zip(self.pieces, self.layouts, strict=True)
        )

    @cached_property
    def index(self) -> TensorIndex:
        """Every tensor with all its pieces, as the manifest lists them."""
        return index_of([layout for layout in self.layouts if layout is not None])

    @cached_property
    def num_bytes(self) -> int:
        """Of all files together, their headers included."""
        return sum(layout.size for layout in self.layouts if layout is not None)


def stored_parts(dtype: str, include_optimizer: bool) -> tuple[str, ...]:
    """In FP32 the master is the weight, and is stored once."""
    if not include_optimizer:
        return ("weight",)
    return PARTS if dtype == "bf16" else ("weight", "exp_avg", "exp_avg_sq")


def part_dtype(part: str, dtype: str) -> TensorDType:
    """Of a part, as safetensors spells it: masters and moments are FP32 whatever the weights are."""
    return "BF16" if part == "weight" and dtype == "bf16" else "F32"


def make_plan(tables: Sequence[Table], parts: tuple[str, ...], dtype: str) -> SavePlan:
    """`tables`: for each rank what it holds. The same on every rank."""
    holders: dict[tuple[str, Sharding], list[int]] = {}
    for rank, table in enumerate(tables):
        for name, (sharding, _) in table.items():
            if prod(sharding.local_shape):  # a vocabulary smaller than its padding can leave a rank without rows
                holders.setdefault((name, sharding), []).append(rank)
    shared: dict[tuple[int, ...], list[tuple[str, Sharding]]] = {}
    for held, ranks in holders.items():
        shared.setdefault(tuple(ranks), []).append(held)
    pieces: list[list[Piece]] = [[] for _ in tables]
    for ranks_of, held_alike in shared.items():
        table = tables[ranks_of[0]]
        in_order = sorted(held_alike, key=lambda held: table[held[0]][1])
        wanted = [(part, *held) for part in parts for held in in_order]
        for rank, (part, name, sharding) in _spread(wanted, ranks_of, dtype):
            pieces[rank].append(Piece(name, part, part_dtype(part, dtype), sharding, tables[rank][name][1]))
    return SavePlan(tuple(tuple(sorted(of_rank, key=_in_file_order)) for of_rank in pieces))


def _in_file_order(piece: Piece) -> tuple[int, int]:
    return (PARTS.index(piece.part), piece.begin)


Wanted = tuple[str, str, Sharding]


def _spread(wanted: Sequence[Wanted], ranks: Sequence[int], dtype: str) -> Iterator[tuple[int, Wanted]]:
    """Each rank one stretch of what all of them hold, of about the same bytes."""
    sizes = [prod(one[2].local_shape) * ITEM_BYTES[part_dtype(one[0], dtype)] for one in wanted]
    share = sum(sizes) / len(ranks)
    before = 0
    for one, size in zip(wanted, sizes, strict=True):
        # By its middle, so that no rank is a whole tensor over its share.
        yield ranks[min(int((before + size / 2) / share), len(ranks) - 1)], one
        before += size


def _stretches(pieces: Sequence[Piece], layout: ShardLayout) -> Iterator[Stretch]:
    for part in PARTS:
        of_part = [piece for piece in pieces if piece.part == part]
        if not of_part:
            continue
        dtype = of_part[0].dtype
        records = {piece.key: layout.index[piece.key].pieces[0] for piece in of_part}
        placed = [Placed(piece.key, records[piece.key].begin, records[piece.key].end, piece.begin) for piece in of_part]
        for span in find_spans(placed, ITEM_BYTES[dtype]):
            yield Stretch(part, dtype, span.target, (span.end - span.begin) // ITEM_BYTES[dtype], span.begin)


class PlanCache:
    """Plans by adapter shape: the tables are gathered once, then saves of that shape need no collective for it."""

    def __init__(self, ranks: Ranks, dtype: str) -> None:
        self._ranks = ranks
        self._dtype = dtype
        self._plans: dict[tuple[AdapterSpec, bool], SavePlan] = {}

    def plan(self, adapter: Adapter, include_optimizer: bool) -> SavePlan:
        """All ranks together, with adapters of the same shape."""
        key = (adapter.spec, include_optimizer)
        if key not in self._plans:
            table: Table = {name: (sharding, adapter.begin[name]) for name, sharding in adapter.table.items()}
            parts = stored_parts(self._dtype, include_optimizer)
            self._plans[key] = make_plan(self._ranks.gather(table), parts, self._dtype)
        return self._plans[key]
