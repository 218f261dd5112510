"""Reading what was published, and believing none of it unread: files, sizes, digests, headers, tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
) -> dict[str, memoryview]:
    """The wanted part of each tensor, C order over `Wanted.shape`, as `place_tensors` reads them."""
    memory, places = place_tensors(version_dir, manifest, wanted, ignored, disk)
    return {key: memory[begin:end] for key, (begin, end) in places.items()}


def place_tensors(
    version_dir: Path,
    manifest: Manifest,
    wanted: Mapping[str, Wanted],
    ignored: Collection[str] = (),
    disk: Disk = LOCAL_DISK,
    allocate: Callable[[int], memoryview] = image_memory,
) -> tuple[memoryview, dict[str, tuple[int, int]]]:
    """Memory, and where in it (begin, end) the wanted part of each tensor is: C order over `Wanted.shape`, aligned to
    its element, every byte read verified. Tensors lie there in the order of the files as far as may be.

    The checkpoint's tensors must be exactly those of `wanted` and, where it has them, of `ignored`, which are not
    read. allocate: as `image_memory`. Raises `TensorsDisagree`, `CheckpointDamaged` (both naming file or tensor) or
    `StorageFailed`.
    """
    for problem in (*directory_problems(version_dir, manifest, disk), *index_problems(manifest)):
        raise CheckpointDamaged(version_dir, problem)
    _check_wanted(version_dir, manifest, wanted, ignored)
    found = {key: _Found.of(manifest.tensors[key], part) for key, part in wanted.items()}
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for place in found.values():
        for piece in place.pieces:
            # Whole, also for a part of it: the digests need every byte.
            spans[piece.file].append((piece.begin, piece.end))
    memory, images, end = _allocate({name: manifest.files[name].size for name in spans}, found.values(), allocate)
    starts = _starts(manifest) if spans else {}
    for name, of_file in spans.items():
        record = manifest.files[name]
        chunks = chunks_of([(0, starts[name]), *of_file], record.chunk_size)
        read_chunks(version_dir / name, record, chunks, memory[images[name] :][: whole_pages(record.size)], disk)
    places = {}
    for key, place in found.items():
        if place.is_exact:
            (piece,) = place.pieces
            places[key] = (images[piece.file] + piece.begin, images[piece.file] + piece.end)
        else:
            places[key] = (end, end + place.num_bytes)
            place.assemble(memory, images, end)
            end += place.room
    return memory, places


@dataclass(frozen=True)
class _Found:
    """Where a wanted part is stored. is_exact: in one piece, just as it is wanted, aligned to its element."""

    tensor: TensorRecord
    part: Wanted
    pieces: Sequence[PieceRecord]
    is_exact: bool

    @classmethod
    def of(cls, tensor: TensorRecord, part: Wanted) -> _Found:
        if len(tensor.pieces) == 1:
            piece = tensor.pieces[0]
            is_same = (piece.axis, piece.offset, piece.shape) == (part.axis, part.offset, part.shape)
            if is_same and piece.begin % ITEM_BYTES[tensor.dtype] == 0 and piece.begin < piece.end:
                return cls(tensor, part, tensor.pieces, True)
        wanted = _region(part)
        overlapping = [piece for piece in tensor.pieces if _region(piece).overlaps(wanted)]
        is_same = len(overlapping) == 1 and _region(overlapping[0]) == wanted
        return cls(tensor, part, overlapping, is_same and overlapping[0].begin % ITEM_BYTES[tensor.dtype] == 0)

    @property
    def num_bytes(self) -> int:
        return prod(self.part.shape) * ITEM_BYTES[self.tensor.dtype]

    @property
    def room(self) -> int:
        """Of the part when it is put together apart from the files: no tensor needs a wider alignment."""
        return -(-self.num_bytes // _ROOM_BYTES) * _ROOM_BYTES

    def assemble(self, memory: memoryview, images: Mapping[str, int], begin: int) -> None:
        target = memory[begin : begin + self.num_bytes]
        for piece in self.pieces:
            stored = memory[images[piece.file] + piece.begin : images[piece.file] + piece.end]
            copy_overlap(stored, _region(piece), target, _region(self.part), ITEM_BYTES[self.tensor.dtype])


def _region(part: Wanted | PieceRecord) -> Region:
    return Region.cut(part.shape, part.axis, part.offset)


def _allocate(
    sizes: Mapping[str, int], found: Iterable[_Found], allocate: Callable[[int], memoryview]
) -> tuple[memoryview, dict[str, int], int]:
    """Memory for the files and what is put together from them: where each file begins, at a page, and all end."""
    begins: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        begins[name] = end
        end += whole_pages(size)
    return allocate(end + sum(place.room for place in found if not place.is_exact)), begins, end


def _starts(manifest: Manifest) -> dict[str, int]:
    """Where in each file the tensors begin: so long is its header."""
    starts: dict[str, int] = {}
    for tensor in manifest.tensors.values():
        for piece in tensor.pieces:
            starts[piece.file] = min(piece.begin, starts.get(piece.file, piece.begin))
    return starts


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
