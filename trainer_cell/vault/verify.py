"""Reading what was published, and believing none of it unread: files, sizes, digests, headers, tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from trainer_cell.vault.cover import directory_problems, fits, index_problems
from trainer_cell.vault.disk import LOCAL_DISK, Disk
from trainer_cell.vault.errors import CheckpointDamaged, NotThere, TensorsDisagree, UnsupportedFormat, VaultError
from trainer_cell.vault.manifest import ITEM_BYTES, FileRecord, Manifest, PieceRecord, TensorDType, read_manifest
from trainer_cell.vault.region import Region, copy_overlap

_MOST_PROBLEMS_TOLD = 20
_WRONG = (CheckpointDamaged, UnsupportedFormat)


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


def verify_version(
    version_dir: Path, deep: bool = True, disk: Disk = LOCAL_DISK, unreadable_is_wrong: bool = True
) -> list[str]:
    """Everything wrong with a version, each problem naming file, tensor or field; empty when it is good.

    Not deep: the manifest, and the shards' presence and sizes. Deep: also the index, and every byte of the shards.
    unreadable_is_wrong: whether a disk that fails to answer is one more problem; otherwise `StorageFailed` is raised.
    """
    problems: list[str] = []
    told = VaultError if unreadable_is_wrong else _WRONG
    try:
        manifest = read_manifest(version_dir, disk)
        problems += directory_problems(version_dir, manifest, disk)
        if deep and not problems:
            problems += index_problems(manifest)
        if deep and not problems:
            for name in manifest.files:
                problems += _shard_problems(version_dir / name, manifest, disk, told)
    except told as error:
        problems.append(str(error))
    return problems


def _shard_problems(
    path: Path, manifest: Manifest, disk: Disk, told: type[VaultError] | tuple[type[VaultError], ...]
) -> Iterator[str]:
    record = manifest.files[path.name]
    try:
        _read_shard(path, record, [(0, record.size, None)], disk)
        if _read_header(path, record, disk) != _expected_header(path.name, manifest):
            yield f"file {path.name}: the safetensors header does not agree with the manifest"
    except told as error:
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
) -> dict[str, bytearray]:
    """The wanted part of each tensor, C order over `Wanted.shape`, every byte read verified.

    The checkpoint's tensors must be exactly those of `wanted` and, where it has them, of `ignored`, which are not
    read. Raises `TensorsDisagree`, `CheckpointDamaged` (both naming file or tensor) or `StorageFailed`.
    """
    for problem in (*directory_problems(version_dir, manifest, disk), *index_problems(manifest)):
        raise CheckpointDamaged(version_dir, problem)
    _check_wanted(version_dir, manifest, wanted, ignored)
    buffers = {key: bytearray(_num_bytes(manifest, key, part.shape)) for key, part in wanted.items()}
    targets: dict[str, list[tuple[int, int, memoryview | None]]] = defaultdict(list)
    # Pieces that are not just what the reader holds are read aside, whole, for their digests need every byte.
    aside: list[tuple[str, Region, memoryview]] = []
    for key, part in wanted.items():
        region = Region.cut(part.shape, part.axis, part.offset)
        for piece in manifest.tensors[key].pieces:
            held = Region.cut(piece.shape, piece.axis, piece.offset)
            if held == region:
                memory = memoryview(buffers[key])
            elif held.overlaps(region):
                memory = memoryview(bytearray(piece.end - piece.begin))
                aside.append((key, held, memory))
            else:
                continue
            targets[piece.file].append((piece.begin, piece.end, memory))
    for name, of_file in targets.items():
        header = (0, min(piece.begin for piece, _, _ in _pieces_in(name, manifest)), None)
        _read_shard(version_dir / name, manifest.files[name], [header, *of_file], disk)
    for key, held, memory in aside:
        part = wanted[key]
        region = Region.cut(part.shape, part.axis, part.offset)
        copy_overlap(memory, held, memoryview(buffers[key]), region, ITEM_BYTES[manifest.tensors[key].dtype])
    return buffers


def _num_bytes(manifest: Manifest, key: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * ITEM_BYTES[manifest.tensors[key].dtype]


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


def _read_shard(
    path: Path, record: FileRecord, targets: Sequence[tuple[int, int, memoryview | None]], disk: Disk
) -> None:
    """Fill the targets (begin and end in the file, memory or None to verify only), reading whole chunks that each
    match their digest. Chunks that hold nothing of a target are not read.

    Raises `CheckpointDamaged` or `StorageFailed`.
    """
    spare = memoryview(bytearray(min(record.chunk_size, record.size)))
    left = sorted((target for target in targets if target[0] < target[1]), key=lambda target: target[0])
    try:
        descriptor = disk.open_read(path)
    except NotThere as error:
        raise CheckpointDamaged(path, "is missing") from error
    with disk.closing(descriptor, path):
        for index, expected in enumerate(record.chunk_digests):
            begin = index * record.chunk_size
            end = min(begin + record.chunk_size, record.size)
            while left and left[0][1] <= begin:
                left.pop(0)
            if not left or left[0][0] >= end:
                continue
            views = list(_views(left, begin, end, spare))
            if disk.read(descriptor, path, views, begin) != end - begin:
                raise CheckpointDamaged(path, "is truncated")
            digest = xxhash.xxh3_128()
            for view in views:
                digest.update(view)
            if digest.hexdigest() != expected:
                raise CheckpointDamaged(path, f"bytes {begin} to {end} do not match their digest")


def _views(
    targets: Sequence[tuple[int, int, memoryview | None]], begin: int, end: int, spare: memoryview
) -> Iterator[memoryview]:
    """Memory for the bytes from `begin` to `end`, in order: the targets', and between them parts of `spare`."""
    position = begin
    for first, last, memory in targets:
        if first >= end:
            break
        start, stop = max(first, begin), min(last, end)
        if position < start:
            yield spare[position - begin : start - begin]
        yield spare[start - begin : stop - begin] if memory is None else memory[start - first : stop - first]
        position = stop
    if position < end:
        yield spare[position - begin : end - begin]
