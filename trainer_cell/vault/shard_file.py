"""One rank's file of a checkpoint: a valid safetensors file, written once, digested while it is in cache, fsynced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import xxhash

from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.manifest import (
    CHUNK_SIZE,
    ITEM_BYTES,
    FileRecord,
    PieceRecord,
    TensorDType,
    TensorRecord,
    digest_of_chunks,
    is_shard_name,
)
from trainer_cell.vault.staging import Staging

_ALIGNMENT = 8
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class TensorPiece:
    """What one rank holds of one tensor.

    shape: of this piece, global_shape: of the whole; axis: the dimension the tensor is cut along, None when this is
    the whole of it; offset: where on it the piece starts. data: little-endian, C order, `prod(shape)` elements.
    """

    key: str
    dtype: TensorDType
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    axis: int | None
    offset: int
    data: memoryview | bytes | bytearray


class WrittenShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that is on disk; index: its tensors, each with the one piece that is in this file."""

    file: str
    record: FileRecord
    index: dict[str, TensorRecord]

    @property
    def tensors(self) -> dict[str, tuple[int, int]]:
        """The bytes of each piece: begin and end, counted from the start of the file."""
        return {key: (tensor.pieces[0].begin, tensor.pieces[0].end) for key, tensor in self.index.items()}


def merge_index(shards: Iterable[WrittenShard]) -> dict[str, TensorRecord]:
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


def write_shard(
    staging: Staging,
    file_name: str,
    pieces: Sequence[TensorPiece],
    on_bytes: Callable[[int], None] | None = None,
) -> WrittenShard:
    """Write the pieces to a new file of the staging directory; it is durable when this returns.

    on_bytes: told the number of bytes of each write. Raises `StorageFailed`, and then removes the file: a file whose
    fsync failed is of no use any more, a retry takes another name.
    """
    if not is_shard_name(file_name):
        raise ValueError(f"{file_name!r} is not a shard's name")
    # Wide elements first keeps every tensor aligned to its own element.
    ordered = sorted(pieces, key=lambda piece: -ITEM_BYTES[piece.dtype])
    views = [_checked(piece) for piece in ordered]
    header = encode_header([(piece.key, piece.dtype, piece.shape) for piece in ordered])
    size = len(header) + sum(view.nbytes for view in views)
    path, disk = staging.directory / file_name, staging.disk
    descriptor = disk.open_new(path)
    try:
        with disk.closing(descriptor, path):
            disk.allocate(descriptor, path, size)
            digests = []
            offset = 0
            for chunk in _chunks([memoryview(header), *views]):
                digests.append(_digest(chunk))
                disk.write(descriptor, path, chunk, offset)
                count = sum(view.nbytes for view in chunk)
                offset += count
                if on_bytes:
                    on_bytes(count)
            disk.fsync(descriptor, path)
    except StorageFailed:
        with suppress(StorageFailed):
            disk.unlink(path)
        raise
    record = FileRecord(size, CHUNK_SIZE, digest_of_chunks(tuple(digests)), tuple(digests))
    return WrittenShard(file_name, record, _index(file_name, ordered, len(header)))


def _checked(piece: TensorPiece) -> memoryview:
    view = memoryview(piece.data).cast("B")
    if view.nbytes != prod(piece.shape) * ITEM_BYTES[piece.dtype]:
        raise ValueError(f"{piece.key}: {view.nbytes} bytes are not {piece.dtype} {piece.shape}")
    return view


def _chunks(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Cut the bytes of `views`, taken as one run, every `CHUNK_SIZE` bytes."""
    chunk: list[memoryview] = []
    room = CHUNK_SIZE
    for view in views:
        while view.nbytes:
            part, view = view[:room], view[room:]
            chunk.append(part)
            room -= part.nbytes
            if room == 0:
                yield chunk
                chunk, room = [], CHUNK_SIZE
    if chunk:
        yield chunk


def _digest(chunk: Sequence[memoryview]) -> str:
    digest = xxhash.xxh3_128()
    for view in chunk:
        digest.update(view)
    return digest.hexdigest()


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
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _index(file_name: str, pieces: Sequence[TensorPiece], begin: int) -> dict[str, TensorRecord]:
    index = {}
    for piece in pieces:
        end = begin + prod(piece.shape) * ITEM_BYTES[piece.dtype]
        record = PieceRecord(file_name, piece.axis, piece.offset, piece.shape, begin, end)
        index[piece.key] = TensorRecord(piece.dtype, piece.global_shape, (record,))
        begin = end
    return index
