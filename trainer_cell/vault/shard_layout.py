"""How one rank's tensors lie in its file: known before a byte is written, and the same for every save of one shape.

The file is a valid safetensors file: header, then the tensors without gaps.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import msgspec

from trainer_cell.vault.manifest import ITEM_BYTES, PieceRecord, TensorDType, TensorRecord, is_shard_name

# Memory, offset and length of an unbuffered write are multiples of this.
PAGE_BYTES = 4096
# A smaller file has gone through the page cache before an unbuffered call has come back.
_LEAST_DIRECT = 1 << 20
_HUGE_PAGE_BYTES = 2 << 20
_MOST_KEPT_BYTES = 1 << 30
# Of the first tensor in the file, so that an image of the file in memory can be copied to at full width.
_ALIGNMENT = 64
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class PieceSpec:
    """What one rank holds of one tensor, without its data.

    shape: of this piece, global_shape: of the whole; axis: the dimension the tensor is cut along, None when this is
    the whole of it; offset: where on it the piece starts.
    """

    key: str
    dtype: TensorDType
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    axis: int | None
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ShardLayout:
    """specs: in the order of the file; header: the file's first bytes, all of them up to the first tensor.

    size: of the file; index: each tensor with its one piece that is in this file, begin and end counted from the
    file's start.
    """

    file: str
    header: bytes
    size: int
    index: Mapping[str, TensorRecord]
    specs: tuple[PieceSpec, ...]

    @property
    def image_bytes(self) -> int:
        """Of the memory that holds an image of this file: `size`, in whole pages."""
        return whole_pages(self.size)


def lay_out(file: str, specs: Iterable[PieceSpec]) -> ShardLayout:
    """Wide elements first, which keeps every tensor aligned to its own element; else the given order.

    Raises `ValueError` for a name that is not a shard's and for a key that comes twice.
    """
    if not is_shard_name(file):
        raise ValueError(f"{file!r} is not a shard's name")
    ordered = tuple(sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]))
    header = encode_header([(spec.key, spec.dtype, spec.shape) for spec in ordered])
    index = {}
    end = len(header)
    for spec in ordered:
        begin, end = end, end + spec.num_bytes
        record = PieceRecord(file, spec.axis, spec.offset, spec.shape, begin, end)
        index[spec.key] = TensorRecord(spec.dtype, spec.global_shape, (record,))
    return ShardLayout(file, header, end, index, ordered)


def encode_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a safetensors file whose tensors (key, dtype, shape) follow in this order, without gaps.

    Raises `ValueError` for a key that comes twice.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, dtype, shape in tensors:
        end = offset + prod(shape) * ITEM_BYTES[dtype]
        if key in entries:
            raise ValueError(f"{key} comes twice in one file")
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(entries)
    # A file of whole pages has no last part that an unbuffered write could not take as it is.
    is_whole = offset % _ALIGNMENT == 0 and offset >= _LEAST_DIRECT
    padded, data = (PAGE_BYTES, offset) if is_whole else (_ALIGNMENT, 0)
    text += b" " * (-(_LENGTH_BYTES + len(text) + data) % padded)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class Indexed(Protocol):
    """A shard's layout, or a shard that is written."""

    @property
    def index(self) -> Mapping[str, TensorRecord]: ...


def merge_index(shards: Iterable[Indexed]) -> dict[str, TensorRecord]:
    """The tensor index of a checkpoint from those of its shards, keys sorted, pieces in order of their offsets.

    Raises `ValueError` when shards disagree about a tensor.
    """
    merged: dict[str, TensorRecord] = {}
    for shard in shards:
        for key, tensor in shard.index.items():
            known = merged.setdefault(key, msgspec.structs.replace(tensor, pieces=()))
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"shards disagree about the dtype or shape of {key}")
            pieces = sorted((*known.pieces, *tensor.pieces), key=lambda piece: piece.offset)
            merged[key] = msgspec.structs.replace(known, pieces=tuple(pieces))
    return dict(sorted(merged.items()))


def whole_pages(num_bytes: int) -> int:
    """`num_bytes`, rounded up."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def is_worth_direct(size: int, chunk_size: int) -> bool:
    """Whether a file of `size` bytes should pass by the page cache, in calls of `chunk_size` bytes."""
    return size >= _LEAST_DIRECT and chunk_size % PAGE_BYTES == 0


def image_memory(num_bytes: int) -> memoryview:
    """Writable zeros that begin at a page: whole pages of them, at least `num_bytes`. Memory that is needed again is
    worth keeping: a page costs several times its copy when it is touched first."""
    memory = mmap.mmap(-1, max(whole_pages(num_bytes), PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class KeptMemory:
    """Gives the same memory again and again, more when more is asked for: for one reader at a time."""

    def __init__(self) -> None:
        self._memory: memoryview = memoryview(b"")

    def __call__(self, num_bytes: int) -> memoryview:
        """As `image_memory` does, but with any contents; what was given before is given away with it."""
        if num_bytes > _MOST_KEPT_BYTES:
            return image_memory(num_bytes)
        if self._memory.nbytes < num_bytes:
            self._memory = image_memory(num_bytes)
        return self._memory
