"""Reading a shard: whole chunks, each of which must match its digest before anybody sees a byte of it."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import xxhash

from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import CheckpointDamaged, NotThere, StorageFailed
from trainer_cell.vault.manifest import FileRecord
from trainer_cell.vault.shard_layout import image_memory, is_worth_direct, whole_pages
from trainer_cell.vault.side_by_side import run_side_by_side

OnChunk = Callable[[int, int], None]

_THREADS = 2


def chunks_of(spans: Iterable[tuple[int, int]], chunk_size: int) -> list[int]:
    """The chunks that hold a byte of a span (begin, end), in order."""
    found: set[int] = set()
    for begin, end in spans:
        if begin < end:
            found.update(range(begin // chunk_size, (end - 1) // chunk_size + 1))
    return sorted(found)


def read_chunks(
    path: Path,
    record: FileRecord,
    chunks: Iterable[int],
    image: memoryview | None,
    disk: Disk,
    on_chunk: OnChunk | None = None,
    direct: bool = True,
) -> None:
    """Read these chunks to their places in an image of the file (whole pages of `record.size`); without an image
    they are only verified. direct: the page cache is passed by where the file system lets.

    on_chunk: told where a verified chunk begins and ends, while it is in cache; by two threads at once.
    Raises `CheckpointDamaged` or `StorageFailed`.
    """
    try:
        descriptor = disk.open_read(path)
    except NotThere as error:
        raise CheckpointDamaged(path, "is missing") from error
    with disk.closing(descriptor, path):
        reading = _Reading(disk, descriptor, path, record, image, on_chunk, direct)
        run_side_by_side((partial(reading.read, chunk) for chunk in chunks), "shard reader")


class _Reading:
    def __init__(
        self,
        disk: Disk,
        descriptor: int,
        path: Path,
        record: FileRecord,
        image: memoryview | None,
        on_chunk: OnChunk | None,
        direct: bool,
    ) -> None:
        self._on_chunk = on_chunk
        self._disk, self._descriptor, self._path = disk, descriptor, path
        self._record, self._image = record, image
        wants_direct = direct and is_worth_direct(record.size, record.chunk_size)
        self._is_direct = wants_direct and disk.set_direct(descriptor, path, True)
        scratch_bytes = 0 if image is not None else min(record.chunk_size, record.size)
        self._scratch = deque(image_memory(scratch_bytes) for _ in range(_THREADS))

    def read(self, chunk: int) -> None:
        begin = chunk * self._record.chunk_size
        end = min(begin + self._record.chunk_size, self._record.size)
        if self._image is not None:
            self._verify(chunk, begin, end, self._image[begin : whole_pages(end)])
        else:
            memory = self._scratch.popleft()
            self._verify(chunk, begin, end, memory[: whole_pages(end - begin)])
            self._scratch.append(memory)

    def _verify(self, chunk: int, begin: int, end: int, memory: memoryview) -> None:
        if self._fill(memory, begin, end - begin) < end - begin:
            raise CheckpointDamaged(self._path, "is truncated")
        if xxhash.xxh3_128_hexdigest(memory[: end - begin]) != self._record.chunk_digests[chunk]:
            raise CheckpointDamaged(self._path, f"bytes {begin} to {end} do not match their digest")
        if self._on_chunk:
            self._on_chunk(begin, end)

    def _fill(self, memory: memoryview, offset: int, count: int) -> int:
        if self._is_direct:
            try:
                return self._disk.read(self._descriptor, self._path, [memory], offset)
            except StorageFailed as failure:
                if failure.errno != errno.EINVAL:
                    raise
            # Not this memory, not at the file's end, or not on this file system after all.
            self._is_direct = False
            self._disk.set_direct(self._descriptor, self._path, False)
        return self._disk.read(self._descriptor, self._path, [memory[:count]], offset)
