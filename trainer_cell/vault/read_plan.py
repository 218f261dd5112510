"""What a reader needs of the files of a checkpoint, and where in its memory that comes to lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from trainer_cell.vault.manifest import ITEM_BYTES, Manifest, PieceRecord, TensorDType, TensorRecord
from trainer_cell.vault.region import Region, copy_overlap
from trainer_cell.vault.shard_chunks import chunks_of
from trainer_cell.vault.shard_layout import whole_pages

# No element is wider; parts that are put together begin at multiples of it.
_ROOM_BYTES = 64


@dataclass(frozen=True)
class Wanted:
    """The part of a tensor a reader holds: `shape` from `offset` on along `axis`, the whole when `axis` is None.

    global_shape, dtype: what the whole tensor must be, where the reader knows.
    """

    axis: int | None
    offset: int
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None = None
    dtype: TensorDType | None = None


@dataclass(frozen=True)
class ReadPlan:
    """files: for each its chunks to read and where in memory its image begins; places: begin and end in memory of
    each wanted part; num_bytes: of the memory."""

    files: Mapping[str, tuple[Sequence[int], int]]
    places: Mapping[str, tuple[int, int]]
    num_bytes: int
    _assembled: Sequence[tuple[_Found, int]]

    def assemble(self, memory: memoryview) -> None:
        """Put together, behind the images, the parts that no file holds just as they are wanted."""
        begins = {name: begin for name, (_, begin) in self.files.items()}
        for found, begin in self._assembled:
            found.assemble(memory, begins, begin)


def plan_read(manifest: Manifest, wanted: Mapping[str, Wanted]) -> ReadPlan:
    """Of a manifest whose index is sound and has the parts wanted."""
    found = {key: _Found.of(manifest.tensors[key], part) for key, part in wanted.items()}
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for place in found.values():
        for piece in place.pieces:
            # Whole, also for a part of it: the digests need every byte.
            spans[piece.file].append((piece.begin, piece.end))
    begins, end = {}, 0
    for name in spans:
        begins[name] = end
        end += whole_pages(manifest.files[name].size)
    places, assembled = {}, []
    for key, place in found.items():
        if place.is_exact:
            (piece,) = place.pieces
            places[key] = (begins[piece.file] + piece.begin, begins[piece.file] + piece.end)
        else:
            places[key] = (end, end + place.num_bytes)
            assembled.append((place, end))
            end += -(-place.num_bytes // _ROOM_BYTES) * _ROOM_BYTES
    headers = _headers(manifest) if spans else {}
    chunks = {
        name: chunks_of([(0, headers[name]), *of_file], manifest.files[name].chunk_size)
        for name, of_file in spans.items()
    }
    return ReadPlan({name: (chunks[name], begins[name]) for name in spans}, places, end, assembled)


def _headers(manifest: Manifest) -> dict[str, int]:
    """How long each file's header is: up to where its first tensor begins."""
    ends: dict[str, int] = {}
    for tensor in manifest.tensors.values():
        for piece in tensor.pieces:
            ends[piece.file] = min(piece.begin, ends.get(piece.file, piece.begin))
    return ends


@dataclass(frozen=True)
class _Found:
    """Where a wanted part is stored. is_exact: in one piece, just as it is wanted, aligned to its element."""

    tensor: TensorRecord
    part: Wanted
    pieces: Sequence[PieceRecord]
    is_exact: bool

    @classmethod
    def of(cls, tensor: TensorRecord, part: Wanted) -> _Found:
        wanted = _region(part)
        pieces = [piece for piece in tensor.pieces if _region(piece).overlaps(wanted)]
        is_same = len(pieces) == 1 and _region(pieces[0]) == wanted
        return cls(tensor, part, pieces, is_same and pieces[0].begin % ITEM_BYTES[tensor.dtype] == 0)

    @property
    def num_bytes(self) -> int:
        return prod(self.part.shape) * ITEM_BYTES[self.tensor.dtype]

    def assemble(self, memory: memoryview, images: Mapping[str, int], begin: int) -> None:
        target = memory[begin : begin + self.num_bytes]
        for piece in self.pieces:
            stored = memory[images[piece.file] + piece.begin : images[piece.file] + piece.end]
            copy_overlap(stored, _region(piece), target, _region(self.part), ITEM_BYTES[self.tensor.dtype])


def _region(part: Wanted | PieceRecord) -> Region:
    return Region.cut(part.shape, part.axis, part.offset)
