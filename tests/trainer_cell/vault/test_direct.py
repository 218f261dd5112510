"""Past the page cache where the file system lets, through it where not: the same bytes, and the same errors."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.trainer_cell.vault.checkpoints import ADDRESS, EPOCH, new_vault
from tests.trainer_cell.vault.disks import FailingDisk, RecordingDisk
from trainer_cell.vault import shard_file
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import CheckpointDamaged, StorageFailed
from trainer_cell.vault.manifest import FileRecord
from trainer_cell.vault.publish import begin
from trainer_cell.vault.shard_chunks import chunks_of, read_chunks
from trainer_cell.vault.shard_file import PieceSpec, ShardLayout, image_memory, lay_out, write_image
from trainer_cell.vault.shard_layout import PAGE_BYTES
from trainer_cell.vault.staging import Staging

NAME = "rank00000.safetensors"
CHUNK = 1 << 20
# Four chunks, the last not of whole pages.
LAYOUT = lay_out(NAME, [PieceSpec("a", "F32", (900_001,), (900_001,), None, 0)])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "CHUNK_SIZE", CHUNK)


def image(layout: ShardLayout = LAYOUT) -> memoryview:
    memory = image_memory(layout.image_bytes)
    memory[:] = random.Random(4).randbytes(memory.nbytes)
    memory[: len(layout.header)] = layout.header
    return memory


def staging_at(root: Path, disk: Disk) -> Staging:
    return Staging(begin(new_vault(root), ADDRESS, False, 0, EPOCH).directory, "", disk)


def written(root: Path, disk: Disk, memory: memoryview | None = None) -> tuple[Path, FileRecord]:
    staging = staging_at(root, disk)
    record = write_image(staging, LAYOUT, image() if memory is None else memory)
    return staging.directory / NAME, record


class _NoDirect(RecordingDisk):
    """As a file system that does not know unbuffered calls."""

    def set_direct(self, descriptor: int, path: Path, on: bool) -> bool:
        return False


class _RefusesDirect(RecordingDisk):
    """As a file system that finds out at the call: not this memory, or not this length."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0
        self._is_direct: set[int] = set()

    def set_direct(self, descriptor: int, path: Path, on: bool) -> bool:
        (self._is_direct.add if on else self._is_direct.discard)(descriptor)
        return on

    def _write_some(self, descriptor: int, path: Path, views: Sequence[memoryview], offset: int) -> int:
        self._refuse(descriptor, path)
        return super()._write_some(descriptor, path, views, offset)

    def _read_some(self, descriptor: int, path: Path, views: Sequence[memoryview], offset: int) -> int:
        self._refuse(descriptor, path)
        return super()._read_some(descriptor, path, views, offset)

    def _refuse(self, descriptor: int, path: Path) -> None:
        if descriptor in self._is_direct:
            self.refused += 1
            raise StorageFailed("write", path, errno.EINVAL)


@pytest.mark.parametrize("kind", [RecordingDisk, _NoDirect, _RefusesDirect])
def test_a_file_is_the_same_whatever_the_file_system_knows(tmp_path: Path, kind: type[RecordingDisk]) -> None:
    disk = kind()
    path, record = written(tmp_path, disk)
    assert path.read_bytes() == image()[: LAYOUT.size]
    assert record.size == LAYOUT.size
    memory = image_memory(LAYOUT.image_bytes)
    read_chunks(path, record, range(4), memory, disk)
    assert memory[: LAYOUT.size] == image()[: LAYOUT.size]
    read_chunks(path, record, range(4), None, disk)
    assert not isinstance(disk, _RefusesDirect) or disk.refused >= 2


class _TakesDirect(RecordingDisk):
    """As a file system that takes unbuffered calls; they are looked at."""

    def set_direct(self, descriptor: int, path: Path, on: bool) -> bool:
        return on

    def _write_some(self, descriptor: int, path: Path, views: Sequence[memoryview], offset: int) -> int:
        assert offset % PAGE_BYTES == 0
        assert all(view.nbytes % PAGE_BYTES == 0 for view in views)
        return super()._write_some(descriptor, path, views, offset)


def test_unbuffered_writes_are_whole_pages_and_the_file_is_cut_to_its_size_before_its_sync(tmp_path: Path) -> None:
    disk = _TakesDirect()
    path, _ = written(tmp_path, disk)
    operations = [operation for operation, _ in disk.calls]
    assert operations == ["create", "allocate", *["write"] * 4, "truncate", "fsync", "close"]
    assert path.read_bytes() == image()[: LAYOUT.size]


def test_memory_that_does_not_begin_at_a_page_is_written_all_the_same(tmp_path: Path) -> None:
    shifted = image_memory(LAYOUT.image_bytes + 4096)[1 : 1 + LAYOUT.image_bytes]
    shifted[:] = image()
    path, _ = written(tmp_path, Disk(), shifted)
    assert path.read_bytes() == image()[: LAYOUT.size]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EINVAL])
def test_an_error_at_any_call_leaves_no_file_or_is_got_over(tmp_path: Path, number: int) -> None:
    counted = RecordingDisk()
    written(tmp_path / "counted", counted)
    survived = []
    for at in range(len(counted.calls)):
        staging = staging_at(tmp_path / str(at), FailingDisk(at, number))
        failure = failure_of(staging)
        if failure is None:
            survived.append(counted.calls[at][0])
            assert (staging.directory / NAME).read_bytes() == image()[: LAYOUT.size]
        else:
            assert failure.errno == number
            assert list(staging.directory.iterdir()) == []
    # Of an unbuffered write, EINVAL says only that it must be tried another way.
    assert set(survived) <= ({"write"} if number == errno.EINVAL else set())


def failure_of(staging: Staging) -> StorageFailed | None:
    try:
        write_image(staging, LAYOUT, image())
    except StorageFailed as failure:
        return failure
    return None


class _FailsElsewhere(Disk):
    """A write by another thread than the one that made this fails; the one that made it waits for that."""

    def __init__(self) -> None:
        self._mine = threading.get_ident()
        self._failed = threading.Event()
        self.written = 0

    def _write_some(self, descriptor: int, path: Path, views: Sequence[memoryview], offset: int) -> int:
        if threading.get_ident() == self._mine:
            assert self._failed.wait(60)
            self.written += 1
            return super()._write_some(descriptor, path, views, offset)
        self._failed.set()
        raise StorageFailed("write", path, errno.EIO)


def test_an_error_in_the_other_thread_is_raised_here_and_ends_the_writing(tmp_path: Path) -> None:
    disk = _FailsElsewhere()
    staging = staging_at(tmp_path, disk)
    with pytest.raises(StorageFailed, match="EIO"):
        write_image(staging, LAYOUT, image())
    assert list(staging.directory.iterdir()) == []
    assert disk.written < 4


def test_every_write_is_told_once(tmp_path: Path) -> None:
    told: list[int] = []
    write_image(staging_at(tmp_path, Disk()), LAYOUT, image(), told.append)
    assert sorted(told) == sorted([CHUNK, CHUNK, CHUNK, LAYOUT.size - 3 * CHUNK])


@pytest.mark.parametrize("chunk", range(4))
def test_a_flipped_bit_in_a_large_file_is_found_in_its_chunk_and_only_there(tmp_path: Path, chunk: int) -> None:
    path, record = written(tmp_path, Disk())
    with path.open("r+b") as file:
        file.seek(chunk * CHUNK + 77)
        byte = file.read(1)[0]
        file.seek(chunk * CHUNK + 77)
        file.write(bytes([byte ^ 1]))
    for memory in (None, image_memory(LAYOUT.image_bytes)):
        with pytest.raises(CheckpointDamaged, match=f"bytes {chunk * CHUNK} to"):
            read_chunks(path, record, range(4), memory, Disk())
        read_chunks(path, record, [other for other in range(4) if other != chunk], memory, Disk())


def test_a_large_file_that_is_cut_short_is_truncated_or_damaged(tmp_path: Path) -> None:
    path, record = written(tmp_path, Disk())
    for size in (LAYOUT.size - 1, LAYOUT.size - 5000, 2 * CHUNK, 1):
        with path.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(CheckpointDamaged, match="truncated"):
            read_chunks(path, record, range(4), image_memory(LAYOUT.image_bytes), Disk())


def test_chunks_are_those_that_hold_a_byte_of_a_span() -> None:
    assert chunks_of([(0, 1), (9, 11), (30, 30)], 10) == [0, 1]
    assert chunks_of([(10, 20)], 10) == [1]
    assert chunks_of([], 10) == []
