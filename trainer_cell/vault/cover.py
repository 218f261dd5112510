"""What can be seen of a checkpoint without reading its shards: are the right files there, and does the index add up?

Each problem is a sentence that names the file, tensor or field.
"""

from __future__ import annotations

import re
import stat
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from trainer_cell.vault.disk import LOCAL_DISK, Disk
from trainer_cell.vault.errors import NotThere
from trainer_cell.vault.manifest import (
    ITEM_BYTES,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    PieceRecord,
    TensorRecord,
    digest_of_chunks,
)

_DIGEST = re.compile(r"[0-9a-f]{32}")
# Indexes and file sizes without a problem: most checkpoints share theirs with others (`read_manifest`).
_sound: deque[tuple[Mapping[str, TensorRecord], Mapping[str, int]]] = deque(maxlen=16)


def directory_problems(directory: Path, manifest: Manifest, disk: Disk = LOCAL_DISK) -> Iterator[str]:
    """Files that are missing, too many, not files, or not of the size the manifest says."""
    try:
        found = set(disk.names(directory)) - {MANIFEST_NAME}
    except NotThere:
        yield "the directory is missing"
        return
    for name in sorted(found | manifest.files.keys()):
        if name not in found:
            yield f"file {name} is missing"
        elif name not in manifest.files:
            yield f"file {name} is not in the manifest"
        else:
            status = disk.stat(directory / name)
            size = manifest.files[name].size
            if not stat.S_ISREG(status.st_mode):
                yield f"file {name} is not a regular file"
            elif status.st_size != size:
                yield f"file {name} is {status.st_size} bytes long, the manifest says {size}"


def index_problems(manifest: Manifest) -> Iterator[str]:
    """Whatever keeps the pieces from covering each tensor, and each file's data, exactly once."""
    for name, record in manifest.files.items():
        yield from (f"file {name}: {problem}" for problem in record_problems(record))
    sizes = {name: record.size for name, record in manifest.files.items()}
    if any(tensors is manifest.tensors and known == sizes for tensors, known in tuple(_sound)):
        return
    problems = list(tensor_problems(manifest.tensors, sizes))
    if not problems:
        _sound.append((manifest.tensors, sizes))
    yield from problems


def tensor_problems(tensors: Mapping[str, TensorRecord], sizes: Mapping[str, int]) -> Iterator[str]:
    """`index_problems` as far as tensors and the files' sizes show them."""
    if not tensors:
        yield "tensors: the checkpoint holds none"
    pieces_of: dict[str, list[PieceRecord]] = defaultdict(list)
    for key, tensor in tensors.items():
        yield from (f"tensor {key}: {problem}" for problem in _tensor_problems(tensor, sizes))
        for piece in tensor.pieces:
            pieces_of[piece.file].append(piece)
    for name, size in sizes.items():
        yield from (f"file {name}: {problem}" for problem in _layout_problems(size, pieces_of[name]))


def record_problems(record: FileRecord) -> Iterator[str]:
    """What of a file's record contradicts itself."""
    if record.size <= 0 or record.chunk_size <= 0:
        yield "size and chunk_size must be positive"
    elif len(record.chunk_digests) != -(-record.size // record.chunk_size):
        yield f"chunk_digests holds {len(record.chunk_digests)} digests for {record.size} bytes"
    elif not all(map(_DIGEST.fullmatch, record.chunk_digests)):
        yield "chunk_digests holds what is not a digest"
    elif record.digest != digest_of_chunks(record.chunk_digests):
        yield "digest does not match chunk_digests"


def _tensor_problems(tensor: TensorRecord, sizes: Mapping[str, int]) -> Iterator[str]:
    if any(size < 0 for size in tensor.shape):
        yield f"shape {list(tensor.shape)} has a negative size"
    for piece in tensor.pieces:
        if piece.file not in sizes:
            yield f"file {piece.file} is not in the manifest"
        if any(size < 0 for size in piece.shape):
            yield f"a piece's shape {list(piece.shape)} has a negative size"
        elif piece.end - piece.begin != prod(piece.shape) * ITEM_BYTES[tensor.dtype]:
            yield f"{piece.end - piece.begin} bytes in {piece.file} are not {tensor.dtype} {list(piece.shape)}"
    yield from _cover_problems(tensor)


def _cover_problems(tensor: TensorRecord) -> Iterator[str]:
    if not tensor.pieces:
        yield "no piece of it is stored"
        return
    axis = tensor.pieces[0].axis
    if any(piece.axis != axis for piece in tensor.pieces):
        yield "its pieces are cut along different axes"
    elif axis is None:
        first, *others = tensor.pieces
        if others:
            yield "it is stored whole more than once"
        if first.shape != tensor.shape or first.offset != 0:
            yield f"a piece of shape {list(first.shape)} is not the whole of {list(tensor.shape)}"
    elif not 0 <= axis < len(tensor.shape):
        yield f"axis {axis} is not one of {list(tensor.shape)}"
    else:
        yield from _axis_problems(tensor, axis)


def _axis_problems(tensor: TensorRecord, axis: int) -> Iterator[str]:
    position = 0
    for piece in sorted(tensor.pieces, key=lambda piece: piece.offset):
        if not fits(piece.shape, tensor.shape, axis) or piece.shape[axis] == 0:
            yield f"a piece of shape {list(piece.shape)} is not a part of {list(tensor.shape)} along axis {axis}"
            return
        if piece.offset != position:
            what = "stored twice" if piece.offset < position else "not stored"
            yield f"axis {axis} between {min(position, piece.offset)} and {max(position, piece.offset)} is {what}"
            return
        position += piece.shape[axis]
    if position != tensor.shape[axis]:
        yield f"axis {axis} is stored up to {position} of {tensor.shape[axis]}"


def fits(shape: Sequence[int], whole: Sequence[int], axis: int) -> bool:
    """Whether a piece of `shape` can be a part of `whole` cut along `axis`."""
    return len(shape) == len(whole) and all(
        size <= whole[at] if at == axis else size == whole[at] for at, size in enumerate(shape)
    )


def _layout_problems(size: int, pieces: list[PieceRecord]) -> Iterator[str]:
    """A file is a header, then its pieces without gap or overlap."""
    if not pieces:
        yield "it holds no tensor"
        return
    pieces.sort(key=lambda piece: (piece.begin, piece.end))
    position = pieces[0].begin
    if position < 8:
        yield f"tensors start at {position}, inside the header"
    for piece in pieces:
        if piece.begin != position:
            what = "two tensors" if piece.begin < position else "no tensor"
            yield f"bytes between {min(position, piece.begin)} and {max(position, piece.begin)} belong to {what}"
            return
        position = piece.end
    if position != size:
        yield f"tensors end at {position}, the file at {size}"
