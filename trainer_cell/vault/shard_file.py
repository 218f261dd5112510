"""One rank's file of a checkpoint, written once from its image in memory, digested on the way, fsynced.

What is to be written lies in one run of memory already. So nothing is copied: where the file system takes unbuffered
writes, the disk fetches the pages itself while this process digests others, and the page cache is left to whoever
needs it. All long calls (write, fsync, digest) leave the interpreter to other threads.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

import msgspec
import xxhash

from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.manifest import CHUNK_SIZE, FileRecord, TensorRecord, digest_of_chunks
from trainer_cell.vault.shard_layout import (
    PieceSpec,
    ShardLayout,
    image_memory,
    is_worth_direct,
    lay_out,
    merge_index,
    whole_pages,
)
from trainer_cell.vault.side_by_side import Task, run_side_by_side
from trainer_cell.vault.staging import Staging

__all__ = ["PieceSpec", "ShardLayout", "TensorPiece", "WrittenShard", "image_memory", "lay_out", "merge_index"]
__all__ += ["write_image", "write_shard"]

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class TensorPiece(PieceSpec):
    """data: little-endian, C order, `prod(shape)` elements."""

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


def write_shard(
    staging: Staging, file_name: str, pieces: Sequence[TensorPiece], on_bytes: OnBytes | None = None
) -> WrittenShard:
    """`write_image` for pieces that lie anywhere: they are copied together first. Raises what that raises, and
    `ValueError` for pieces that contradict themselves."""
    views = {piece.key: _checked(piece) for piece in pieces}
    layout = lay_out(file_name, pieces)
    image = image_memory(layout.size)
    image[: len(layout.header)] = layout.header
    for key, tensor in layout.index.items():
        image[tensor.pieces[0].begin : tensor.pieces[0].end] = views[key]
    return WrittenShard(file_name, write_image(staging, layout, image, on_bytes), dict(layout.index))


def _checked(piece: TensorPiece) -> memoryview:
    view = memoryview(piece.data).cast("B")
    if view.nbytes != piece.num_bytes:
        raise ValueError(f"{piece.key}: {view.nbytes} bytes are not {piece.dtype} {piece.shape}")
    return view


def write_image(
    staging: Staging, layout: ShardLayout, image: memoryview, on_bytes: OnBytes | None = None
) -> FileRecord:
    """Write a new file of the staging directory; it is durable when this returns.

    image: the bytes of the whole file, header and tensors in their places, then anything up to `layout.image_bytes`;
    memory that begins at a page is written without the page cache. It must not change before this returns.
    on_bytes: told the number of bytes of each write; the call may come from another thread, never from two at once.
    Raises `StorageFailed`, and then removes the file: a file whose fsync failed is of no use any more, a retry takes
    another name.
    """
    if image.nbytes < layout.image_bytes:
        raise ValueError(f"the image of {layout.file} is {image.nbytes} bytes, not {layout.image_bytes}")
    path, disk = staging.directory / layout.file, staging.disk
    descriptor = disk.open_new(path)
    try:
        with disk.closing(descriptor, path):
            writing = _Writing(disk, descriptor, path, layout.size, image.cast("B"), on_bytes or _tell_nobody)
            writing.run()
            disk.fsync(descriptor, path)
    except StorageFailed:
        with suppress(StorageFailed):
            disk.unlink(path)
        raise
    digests = writing.digests()
    return FileRecord(layout.size, CHUNK_SIZE, digest_of_chunks(digests), digests)


def _tell_nobody(_count: int) -> None:
    pass


class _Writing:
    """The bytes of one file on their way, a chunk at a time: to the disk, and through the digest."""

    def __init__(
        self, disk: Disk, descriptor: int, path: Path, size: int, image: memoryview, on_bytes: OnBytes
    ) -> None:
        self._disk, self._descriptor, self._path = disk, descriptor, path
        self._size, self._image = size, image
        self._is_direct = False
        self._on_bytes, self._telling = on_bytes, Lock()
        self._digests: dict[int, str] = {}

    def run(self) -> None:
        """Reserve, write and digest the whole file; raises the first error of either thread, once both are done."""
        end = self._size
        if is_worth_direct(self._size, CHUNK_SIZE):
            self._is_direct = self._disk.set_direct(self._descriptor, self._path, True)
            end = whole_pages(end) if self._is_direct else end
        self._disk.allocate(self._descriptor, self._path, end)
        if self._size > CHUNK_SIZE:
            run_side_by_side(self._tasks(), "shard writer")
        else:
            # One write has nothing to wait beside it but a digest, which takes no longer than a thread's start.
            for task in self._tasks():
                task()
        if end != self._size:
            self._disk.truncate(self._descriptor, self._path, self._size)

    def digests(self) -> tuple[str, ...]:
        return tuple(digest for _, digest in sorted(self._digests.items()))

    def _tasks(self) -> Iterator[Task]:
        for begin in range(0, self._size, CHUNK_SIZE):
            end = min(begin + CHUNK_SIZE, self._size)
            yield partial(self._write, begin, end)
            yield partial(self._digest, begin, end)

    def _digest(self, begin: int, end: int) -> None:
        self._digests[begin] = xxhash.xxh3_128_hexdigest(self._image[begin:end])

    def _write(self, begin: int, end: int) -> None:
        if not (self._is_direct and self._write_direct(begin, end)):
            self._disk.write(self._descriptor, self._path, [self._image[begin:end]], begin)
        with self._telling:
            self._on_bytes(end - begin)

    def _write_direct(self, begin: int, end: int) -> bool:
        """False when the file system does not take this memory unbuffered; then it is asked no more."""
        try:
            self._disk.write(self._descriptor, self._path, [self._image[begin : whole_pages(end)]], begin)
        except StorageFailed as failure:
            if failure.errno != errno.EINVAL:
                raise
            self._is_direct = False
            self._disk.set_direct(self._descriptor, self._path, False)
            return False
        return True
