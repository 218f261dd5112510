"""A shard is an ordinary safetensors file, digested as written, and gone when the disk failed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import safetensors
import xxhash

from tests.trainer_cell.vault.checkpoints import ADDRESS, EPOCH, new_vault, whole_pieces
from tests.trainer_cell.vault.disks import FailingDisk, RecordingDisk
from trainer_cell.vault import shard_file
from trainer_cell.vault.disk import LOCAL_DISK, Disk
from trainer_cell.vault.errors import AlreadyThere, StorageFailed
from trainer_cell.vault.publish import begin
from trainer_cell.vault.shard_file import TensorPiece, merge_index, write_shard
from trainer_cell.vault.staging import Staging

NAME = "rank00000.safetensors"


def deserialize(path: Path) -> dict[str, dict[str, Any]]:
    """As the safetensors library reads it."""
    return dict(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]


def staging_at(root: Path, disk: Disk = LOCAL_DISK) -> Staging:
    return Staging(begin(new_vault(root), ADDRESS, False, 0, EPOCH).directory, "", disk)


@pytest.mark.parametrize("chunk_size", [8 << 20, 64, 1])
def test_the_safetensors_library_reads_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_size: int
) -> None:
    monkeypatch.setattr(shard_file, "CHUNK_SIZE", chunk_size)
    staging = staging_at(tmp_path)
    pieces = whole_pieces(1)
    write_shard(staging, NAME, pieces)
    read = deserialize(staging.directory / NAME)
    assert {key: bytes(tensor["data"]) for key, tensor in read.items()} == {piece.key: piece.data for piece in pieces}
    assert {key: (tensor["dtype"], tuple(tensor["shape"])) for key, tensor in read.items()} == {
        piece.key: (piece.dtype, piece.shape) for piece in pieces
    }


def test_the_record_holds_the_size_and_the_digest_of_every_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_file, "CHUNK_SIZE", 100)
    staging = staging_at(tmp_path)
    written = write_shard(staging, NAME, whole_pieces(1))
    raw = (staging.directory / NAME).read_bytes()
    chunks = [raw[at : at + 100] for at in range(0, len(raw), 100)]
    assert written.record.size == len(raw)
    assert written.record.chunk_digests == tuple(xxhash.xxh3_128_hexdigest(chunk) for chunk in chunks)
    assert written.record.digest == xxhash.xxh3_128_hexdigest(b"".join(xxhash.xxh3_128_digest(part) for part in chunks))
    assert {key: raw[begin:end] for key, (begin, end) in written.tensors.items()} == {
        piece.key: piece.data for piece in whole_pieces(1)
    }


def test_every_tensor_is_aligned_to_its_element(tmp_path: Path) -> None:
    odd = TensorPiece("a", "BF16", (3,), (3,), None, 0, bytes(6))
    wide = TensorPiece("b", "I64", (1,), (1,), None, 0, bytes(8))
    middle = TensorPiece("c", "F32", (1,), (1,), None, 0, bytes(4))
    written = write_shard(staging_at(tmp_path), NAME, [odd, middle, wide])
    assert [written.tensors[key][0] % size for key, size in (("a", 2), ("b", 8), ("c", 4))] == [0, 0, 0]


def test_progress_is_told_in_bytes_and_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "CHUNK_SIZE", 100)
    told: list[int] = []
    written = write_shard(staging_at(tmp_path), NAME, whole_pieces(1), told.append)
    assert len(told) > 2
    assert sum(told) == written.record.size


def test_a_shard_is_reserved_written_synced_and_closed_in_that_order(tmp_path: Path) -> None:
    disk = RecordingDisk()
    write_shard(staging_at(tmp_path, disk), NAME, whole_pieces(1))
    assert [operation for operation, _ in disk.calls] == ["create", "allocate", "write", "fsync", "close"]


def test_more_buffers_than_one_call_takes_and_writes_cut_short_by_the_kernel_arrive_whole(tmp_path: Path) -> None:
    class Stingy(Disk):
        def _write_some(self, descriptor: int, path: Path, views: object, offset: int) -> int:
            first = views[0]  # type: ignore[index]
            return super()._write_some(descriptor, path, [first[: max(1, len(first) // 2)]], offset)

    many = [TensorPiece(f"t{at}", "F32", (2,), (2,), None, 0, at.to_bytes(8, "little")) for at in range(1500)]
    for disk in (LOCAL_DISK, Stingy()):
        staging = staging_at(tmp_path / type(disk).__name__, disk)
        write_shard(staging, NAME, many)
        read = deserialize(staging.directory / NAME)
        assert {key: bytes(tensor["data"]) for key, tensor in read.items()} == {piece.key: piece.data for piece in many}


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_leaves_no_file_and_another_name_works(tmp_path: Path, at: int, number: int) -> None:
    staging = staging_at(tmp_path)
    failing = Staging(staging.directory, staging.token, FailingDisk(at, number))
    with pytest.raises(StorageFailed, match=errno.errorcode[number]) as failure:
        write_shard(failing, NAME, whole_pieces(1))
    assert failure.value.errno == number
    assert list(staging.directory.iterdir()) == []
    write_shard(staging, "again.safetensors", whole_pieces(1))


def test_a_file_that_is_there_is_neither_written_nor_removed(tmp_path: Path) -> None:
    staging = staging_at(tmp_path)
    (staging.directory / NAME).write_text("first")
    with pytest.raises(AlreadyThere):
        write_shard(staging, NAME, whole_pieces(1))
    assert (staging.directory / NAME).read_text() == "first"


@pytest.mark.parametrize("name", ["../x.safetensors", "a/b.safetensors", "manifest.json", ""])
def test_a_shard_cannot_be_named_out_of_its_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a shard's name"):
        write_shard(staging_at(tmp_path), name, whole_pieces(1))


def test_pieces_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    staging = staging_at(tmp_path)
    short = TensorPiece("a", "F32", (2,), (2,), None, 0, bytes(7))
    with pytest.raises(ValueError, match="7 bytes"):
        write_shard(staging, NAME, [short])
    twice = TensorPiece("a", "F32", (2,), (2,), None, 0, bytes(8))
    with pytest.raises(ValueError, match="twice"):
        write_shard(staging, NAME, [twice, twice])
    assert list(staging.directory.iterdir()) == []


def test_the_index_of_a_checkpoint_is_merged_in_the_order_of_offsets(tmp_path: Path) -> None:
    staging = staging_at(tmp_path)
    lower = TensorPiece("a", "F32", (1, 2), (3, 2), 0, 2, bytes(8))
    upper = TensorPiece("a", "F32", (2, 2), (3, 2), 0, 0, bytes(16))
    shards = [write_shard(staging, f"{at}.safetensors", [piece]) for at, piece in enumerate((lower, upper))]
    assert [piece.offset for piece in merge_index(shards)["a"].pieces] == [0, 2]
    other = write_shard(staging, "2.safetensors", [TensorPiece("a", "BF16", (1, 2), (3, 2), 0, 2, bytes(4))])
    with pytest.raises(ValueError, match="disagree"):
        merge_index([shards[1], other])
