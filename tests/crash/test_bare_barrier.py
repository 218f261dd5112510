"""A control: a barrier says "arrived", not "succeeded", and can pair with the barrier of the next save.

What votes make of the same fault is tested on real ranks, in `test_ranks`.
"""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.crash.workload import ADDRESS, NEW, OLD, Violation, pieces, prepared, state_of
from tests.crash.wrong_orders import write_file
from tests.trainer_cell.vault.checkpoints import manifest_of
from tests.trainer_cell.vault.disks import UnsyncedDisk
from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.layout import Vault, VersionName, link_target, new_ulid
from trainer_cell.vault.manifest import MANIFEST_NAME, encode_manifest
from trainer_cell.vault.shard_file import WrittenShard, write_shard
from trainer_cell.vault.staging import Staging

PATIENCE_S = 20


class _Full(UnsyncedDisk):
    """Has no room for the second rank's shard."""

    def open_new(self, path: Path) -> int:
        if path.name == "rank00001.safetensors":
            raise StorageFailed("create", path, errno.ENOSPC)
        return super().open_new(path)


class BarrierRanks:
    """Two ranks that save by barriers: one when the directory is there, one when all shards are written."""

    def __init__(self, vault: Vault, full: bool) -> None:
        self._vault, self._barrier = vault, threading.Barrier(2)
        self._disk = _Full() if full else UnsyncedDisk()
        # What the second rank would tell of its shard if it were asked: it is known beforehand.
        self._expected: dict[str, WrittenShard] = {}

    def save(self, rank: int, seed: int) -> None:
        version = VersionName(ADDRESS.kind, ADDRESS.name, f"{seed:026d}")
        directory = self._vault.versions_dir(ADDRESS.model_id) / str(version)
        if rank == 0:
            directory.mkdir()
        self._barrier.wait(PATIENCE_S)
        shard = write_shard(Staging(directory, "", self._disk), f"rank{rank:05d}.safetensors", pieces(seed)[rank::2])
        self._expected[shard.file] = shard
        self._barrier.wait(PATIENCE_S)
        if rank == 0:
            self._publish(directory, version, seed)

    def _publish(self, directory: Path, version: VersionName, seed: int) -> None:
        manifest = manifest_of(list(self._expected.values()), ADDRESS, iteration=seed)
        write_file(self._disk, directory / MANIFEST_NAME, encode_manifest(manifest))
        link = self._vault.kind_dir(ADDRESS) / f".link.{new_ulid()}"
        link.symlink_to(link_target(version))
        link.rename(self._vault.public_path(ADDRESS))


def saves(ranks: BarrierRanks, rank: int) -> None:
    """What a rank does that goes on after a failed save."""
    try:
        ranks.save(rank, NEW)
    except StorageFailed:
        # The client was told; its next save begins.
        ranks.save(rank, NEW + 1)


@pytest.mark.parametrize("full", [False, True])
def test_a_bare_barrier_is_caught_publishing_one_shard_of_two(scratch: Path, full: bool) -> None:
    vault = prepared(scratch / "root", overwrite=True, shards=2)
    assert state_of(vault) == OLD
    ranks = BarrierRanks(vault, full)
    if full:
        ranks._expected["rank00001.safetensors"] = _as_written_elsewhere(scratch)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(saves, ranks, rank) for rank in (0, 1)]
        both[0].result(PATIENCE_S)
        second = both[1].exception(PATIENCE_S)
        assert isinstance(second, StorageFailed) if full else second is None
    if full:
        with pytest.raises(Violation, match="published and damaged"):
            state_of(vault)
    else:
        assert state_of(vault) == NEW


def _as_written_elsewhere(scratch: Path) -> WrittenShard:
    directory = scratch / "elsewhere"
    directory.mkdir()
    return write_shard(Staging(directory, "", UnsyncedDisk()), "rank00001.safetensors", pieces(NEW)[1::2])
