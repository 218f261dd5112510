"""Ways of publishing that lose data. A harness that does not see them lose it sees nothing.

They write the same files to the same places as the vault does, through the same `Disk`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.crash.power import PoweredDisk, T, Which
from tests.crash.workload import ADDRESS, pieces
from tests.trainer_cell.vault.checkpoints import manifest_of
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import AlreadyThere, StorageFailed
from trainer_cell.vault.layout import CheckpointAddress, Vault, VersionName, link_target, new_ulid
from trainer_cell.vault.manifest import MANIFEST_NAME, encode_manifest
from trainer_cell.vault.shard_file import write_shard
from trainer_cell.vault.staging import Staging


class ThroughDisk(Disk):
    """Another way to the file system of `disk`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        return self._disk.call(operation, path, act)


class UnsyncingDisk(ThroughDisk):
    """Syncs are left out."""

    def fsync(self, descriptor: int, path: Path) -> None:
        return


def reference_save(vault: Vault, seed: int, shards: int = 1, address: CheckpointAddress = ADDRESS) -> str:
    """No sync of anything, one temporary directory for all attempts, rename, then a swap of links."""
    disk = UnsyncingDisk(vault.disk)
    for directory in (vault.model_dir(address.model_id), vault.versions_dir(address.model_id), vault.kind_dir(address)):
        make(disk, directory)
    temporary = vault.kind_dir(address) / f"_tmp_{address.name}"
    disk.remove_tree(temporary)
    disk.make_directory(temporary)
    staging = Staging(temporary, "", disk)
    of_slot = pieces(seed)
    written = [write_shard(staging, f"rank{rank:05d}.safetensors", of_slot[rank::shards]) for rank in range(shards)]
    write_file(disk, temporary / MANIFEST_NAME, encode_manifest(manifest_of(written, address, iteration=seed)))
    version = VersionName(address.kind, address.name, new_ulid())
    disk.rename(temporary, vault.versions_dir(address.model_id) / str(version))
    link = vault.kind_dir(address) / f"_link_{address.name}"
    disk.remove_tree(link)
    disk.symlink(link_target(version), link)
    disk.rename(link, vault.public_path(address))
    return vault.version(address.model_id, version)


def make(disk: Disk, directory: Path) -> None:
    try:
        disk.make_directory(directory)
    except AlreadyThere:
        return


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    with disk.closing(disk.open_new(path), path) as descriptor:
        disk.write(descriptor, path, [memoryview(data)], 0)


class SyncedTooEarly(PoweredDisk):
    """Every file is synced before each write to it and not after the last, as when a buffer is flushed too late."""

    def __init__(self, top: Path) -> None:
        super().__init__(top, ignores=lambda path: path.is_file())

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        if operation == "write":
            self.sync(path)
        return super().call(operation, path, act)


class RetryingDisk(PoweredDisk):
    """The first sync of a shard fails, and is tried again on the same file; then it seems to be well."""

    def __init__(self, top: Path) -> None:
        super().__init__(top, fails=FirstTimes(1, lambda path: path.suffix == ".safetensors"))

    def fsync(self, descriptor: int, path: Path) -> None:
        try:
            super().fsync(descriptor, path)
        except StorageFailed:
            super().fsync(descriptor, path)


class FirstTimes:
    """Of the paths that `which` is true of, the first `times` that it is asked about."""

    def __init__(self, times: int, which: Which) -> None:
        self._left, self._which = times, which

    def __call__(self, path: Path) -> bool:
        if self._left and self._which(path):
            self._left -= 1
            return True
        return False
