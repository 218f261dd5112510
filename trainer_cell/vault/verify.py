"""Reading what was published, and believing none of it unread: files, sizes, digests, headers, tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from trainer_cell.vault.cover import directory_problems, fits, index_problems
from trainer_cell.vault.disk import LOCAL_DISK, Disk
from trainer_cell.vault.errors import CheckpointDamaged, TensorsDisagree, VaultError
from trainer_cell.vault.manifest import (
    ITEM_BYTES,
    FileRecord,
    Manifest,
    PieceRecord,
    TensorDType,
    TensorRecord,
    read_manifest,
)
from trainer_cell.vault.region import Region, copy_overlap
from trainer_cell.vault.shard_chunks import chunks_of, read_chunks
from trainer_cell.vault.shard_layout import image_memory, whole_pages

_MOST_PROBLEMS_TOLD = 20


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


class _HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def verify_version(version_dir: Path, deep: bool = True, disk: Disk = LOCAL_DISK) -> list[str]:
    """Everything wrong with a version, each problem naming file, tensor or field; empty when it is good.

    Not deep: the manifest, and the shards' presence and sizes. Deep: also the index, and every byte of the shards.
    """
    problems: list[str] = []
    try:
        manifest = read_manifest(version_dir, disk)
        problems += directory_problems(version_dir, manifest, disk)
        if deep and not problems:
            problems += index_problems(manifest)
        if deep and not problems:
            for name in manifest.files:
                problems += _shard_problems(version_dir / name, manifest, disk)
    except VaultError as error:
        problems.append(str(error))
    return problems


def _shard_problems(path: Path, manifest: Manifest, disk: Disk) -> Iterator[str]:
    record = manifest.files[path.name]
    try:
        read_chunks(path, record, range(len(record.chunk_digests)), None, disk)
        if _read_header(path, record, disk) != _expected_header(path.name, manifest):
            yield f"file {path.name}: the safetensors header does not agree with the manifest"
    except VaultError as error:
        yield f"file {error}"


def _read_header(path: Path, record: FileRecord, disk: Disk) -> dict[str, _HeaderEntry]:
    with disk.closing(disk.open_read(path), path) as descriptor:
        length = memoryview(bytearray(8))
        disk.read(descriptor, path, [length], 0)
        text = memoryview(bytearray(min(int.from_bytes(length, "little"), record.size)))
        disk.read(descriptor, path, [text], 8)
    try:
        entries = msgspec.json.decode(text, type=dict[str, Any])
        entries.pop("__metadata__", None)
        return msgspec.convert(entries, dict[str, _HeaderEntry])
    except msgspec.DecodeError as error:
        raise CheckpointDamaged(path, f"has no safetensors header: {error}") from error


def _expected_header(name: str, manifest: Manifest) -> dict[str, _HeaderEntry]:
    pieces = _pieces_in(name, manifest)
    first = min(piece.begin for piece, _, _ in pieces)
    return {
        key: _HeaderEntry(dtype, piece.shape, (piece.begin - first, piece.end - first)) for piece, key, dtype in pieces
    }


def _pieces_in(name: str, manifest: Manifest) -> list[tuple[PieceRecord, str, TensorDType]]:
    """The pieces a file holds, each with its tensor's key and dtype."""
    return [
        (piece, key, tensor.dtype)
        for key, tensor in manifest.tensors.items()
        for piece in tensor.pieces
        if piece.file == name
    ]


def read_tensors(
    version_dir: Path,
    manifest: Manifest,
    wanted: Mapping[str, Wanted],
    ignored: Collection[str] = (),
    disk: Disk = LOCAL_DISK,
    memory: Callable[[int], memoryview] = image_memory,
) -> dict[str, memoryview]:
    """The wanted part of each tensor, C order over `Wanted.shape`, aligned to its element, every byte read verified.

    The checkpoint's tensors must be exactly those of `wanted` and, where it has them, of `ignored`, which are not
    read. memory: gives what the shards are read to, of which the result is slices as far as may be.
    Raises `TensorsDisagree`, `CheckpointDamaged` (both naming file or tensor) or `StorageFailed`.
    """
    for problem in (*directory_problems(version_dir, manifest, disk), *index_problems(manifest)):
        raise CheckpointDamaged(version_dir, problem)
    _check_wanted(version_dir, manifest, wanted, ignored)
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for key, part in wanted.items():
        region = Region.cut(part.shape, part.axis, part.offset)
        for piece in manifest.tensors[key].pieces:
            if _region(piece).overlaps(region):
                # Whole, also for a part of it: the digests need every byte.
                spans[piece.file].append((piece.begin, piece.end))
    images = _images({name: manifest.files[name].size for name in spans}, memory)
    starts = _starts(manifest)
    for name, image in images.items():
        record = manifest.files[name]
        chunks = chunks_of([(0, starts[name]), *spans[name]], record.chunk_size)
        read_chunks(version_dir / name, record, chunks, image, disk)
    return {key: _part(manifest.tensors[key], part, images) for key, part in wanted.items()}


def _images(sizes: Mapping[str, int], memory: Callable[[int], memoryview]) -> dict[str, memoryview]:
    """A place for each file in one piece of memory, each beginning at a page."""
    ends = [0, *accumulate(whole_pages(size) for size in sizes.values())]
    whole = memory(ends[-1])
    return {name: whole[begin:end] for name, begin, end in zip(sizes, ends, ends[1:], strict=False)}


def _starts(manifest: Manifest) -> dict[str, int]:
    """Where in each file the tensors begin: so long is its header."""
    starts: dict[str, int] = {}
    for tensor in manifest.tensors.values():
        for piece in tensor.pieces:
            starts[piece.file] = min(piece.begin, starts.get(piece.file, piece.begin))
    return starts


def _region(piece: PieceRecord) -> Region:
    return Region.cut(piece.shape, piece.axis, piece.offset)


def _part(tensor: TensorRecord, part: Wanted, images: Mapping[str, memoryview]) -> memoryview:
    """A slice of an image, if the part lies there just as it is wanted; else a copy."""
    item_bytes = ITEM_BYTES[tensor.dtype]
    region = Region.cut(part.shape, part.axis, part.offset)
    overlapping = [piece for piece in tensor.pieces if _region(piece).overlaps(region)]
    stored = [images[piece.file][piece.begin : piece.end] for piece in overlapping]
    if len(stored) == 1 and _region(overlapping[0]) == region and overlapping[0].begin % item_bytes == 0:
        return stored[0]
    copy = memoryview(bytearray(prod(part.shape) * item_bytes))
    for piece, data in zip(overlapping, stored, strict=True):
        copy_overlap(data, _region(piece), copy, region, item_bytes)
    return copy


def _check_wanted(
    version_dir: Path, manifest: Manifest, wanted: Mapping[str, Wanted], ignored: Collection[str]
) -> None:
    if not wanted and not ignored:
        raise TensorsDisagree(version_dir, "no tensor is asked for: the model has none")
    problems = [f"tensor {key} is missing" for key in wanted if key not in manifest.tensors]
    known = {*wanted, *ignored}
    problems += [f"tensor {key} is unexpected" for key in manifest.tensors if key not in known]
    for key, part in wanted.items():
        if key in manifest.tensors:
            problems += [f"tensor {key} {problem}" for problem in _part_problems(manifest, key, part)]
    if problems:
        told = problems[:_MOST_PROBLEMS_TOLD]
        more = [f"and {len(problems) - len(told)} more"] if len(problems) > len(told) else []
        raise TensorsDisagree(version_dir, "; ".join(told + more))


def _part_problems(manifest: Manifest, key: str, part: Wanted) -> Iterator[str]:
    stored = manifest.tensors[key]
    if part.dtype not in (None, stored.dtype):
        yield f"is {stored.dtype}, not {part.dtype}"
    if part.global_shape not in (None, stored.shape):
        yield f"has shape {list(stored.shape)}, not {list(part.global_shape or ())}"
    elif part.axis is None:
        if part.shape != stored.shape:
            yield f"has shape {list(stored.shape)}, not {list(part.shape)}"
    elif not (
        0 <= part.axis < len(stored.shape)
        and fits(part.shape, stored.shape, part.axis)
        and 0 <= part.offset <= stored.shape[part.axis] - part.shape[part.axis]
    ):
        yield f"of shape {list(stored.shape)} has no part {list(part.shape)} at {part.offset} on axis {part.axis}"
