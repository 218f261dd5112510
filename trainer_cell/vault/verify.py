"""Reading what was published, and believing none of it unread: files, sizes, digests, headers, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainer_cell.vault.cover import directory_problems, fits, index_problems
from trainer_cell.vault.disk import LOCAL_DISK, Disk
from trainer_cell.vault.errors import CheckpointDamaged, TensorsDisagree, UnsupportedFormat, VaultError
from trainer_cell.vault.manifest import (
    FileRecord,
    Manifest,
    PieceRecord,
    TensorDType,
    TensorRecord,
    read_manifest,
)
from trainer_cell.vault.read_plan import ReadPlan, Wanted, plan_read
from trainer_cell.vault.shard_chunks import OnChunk, read_chunks
from trainer_cell.vault.shard_layout import image_memory, whole_pages

__all__ = ["TensorReader", "Wanted", "read_tensors", "verify_version"]

Look = Callable[[memoryview, Mapping[str, tuple[int, int]]], OnChunk]

_MOST_PROBLEMS_TOLD = 20
_WRONG = (CheckpointDamaged, UnsupportedFormat)


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
        read_chunks(path, record, range(len(record.chunk_digests)), None, disk)
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


class TensorReader:
    """Reads the same tensors, or parts of them, of one checkpoint or of many.

    The checkpoint's tensors must be exactly those of `wanted` and, where it has them, of `ignored`, which are not read.
    """

    def __init__(self, wanted: Mapping[str, Wanted], ignored: Collection[str] = ()) -> None:
        self._wanted, self._ignored = dict(wanted), frozenset(ignored)
        # For the shape of the last checkpoint: its tensors, its files' sizes, and the plan.
        self._last: tuple[Mapping[str, TensorRecord], dict[str, tuple[int, int]], ReadPlan] | None = None

    def read(
        self,
        version_dir: Path,
        manifest: Manifest,
        disk: Disk = LOCAL_DISK,
        allocate: Callable[[int], memoryview] = image_memory,
        look: Look | None = None,
        reader: int = 0,
        num_readers: int = 1,
    ) -> tuple[memoryview, Mapping[str, tuple[int, int]]]:
        """Memory, and where in it (begin, end) each wanted part is: C order over `Wanted.shape`, aligned to its
        element, every byte read verified. Parts lie there in the order of the files as far as may be; of checkpoints
        of one shape the places are the same object.

        allocate: as `image_memory`. look: given memory and places, what to call with begin and end of every stretch of
        memory that has been read and verified, while it is in cache; two threads call it at once. reader, num_readers:
        which of how many processes that read the same now.
        Raises `TensorsDisagree`, `CheckpointDamaged` (both naming file or tensor) or `StorageFailed`.
        """
        for problem in (*directory_problems(version_dir, manifest, disk), *index_problems(manifest)):
            raise CheckpointDamaged(version_dir, problem)
        plan = self._plan(version_dir, manifest)
        memory = allocate(plan.num_bytes)
        on_stretch = look(memory, plan.places) if look else None
        for name, (chunks, begin) in plan.files.items():
            record = manifest.files[name]
            image = memory[begin : begin + whole_pages(record.size)]
            on_chunk = on_stretch and _shifted(on_stretch, begin)
            # What one has read, the others find in the page cache: each begins with another part.
            first = len(chunks) * reader // num_readers
            ordered = (*chunks[first:], *chunks[:first])
            read_chunks(version_dir / name, record, ordered, image, disk, on_chunk, direct=num_readers == 1)
        plan.assemble(memory)
        return memory, plan.places

    def _plan(self, version_dir: Path, manifest: Manifest) -> ReadPlan:
        sizes = {name: (record.size, record.chunk_size) for name, record in manifest.files.items()}
        if self._last is not None:
            tensors, known, plan = self._last
            # One object stands for many checkpoints of a shape: `read_manifest` sees to that.
            if tensors is manifest.tensors and known == sizes:
                return plan
        _check_wanted(version_dir, manifest, self._wanted, self._ignored)
        plan = plan_read(manifest, self._wanted)
        self._last = (manifest.tensors, sizes, plan)
        return plan


def _shifted(on_stretch: OnChunk, by: int) -> OnChunk:
    return lambda begin, end: on_stretch(by + begin, by + end)


def read_tensors(
    version_dir: Path,
    manifest: Manifest,
    wanted: Mapping[str, Wanted],
    ignored: Collection[str] = (),
    disk: Disk = LOCAL_DISK,
) -> dict[str, memoryview]:
    """The wanted part of each tensor, as a `TensorReader` reads them."""
    memory, places = TensorReader(wanted, ignored).read(version_dir, manifest, disk)
    return {key: memory[begin:end] for key, (begin, end) in places.items()}


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
