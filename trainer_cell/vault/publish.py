"""Publish: the steps that make a written checkpoint visible, whole and durable.

    begin     name free or overwrite asked, space, a fresh staging directory
    (write)   every rank its shard, `write_shard`; then a vote
    finish    manifest, fsyncs → freeze (staging becomes a version) → point (the public name points at it)

At every instant the public name is absent, the complete old version, or the complete new one. A failure before the
name points at the new version leaves nothing behind; an error after it does not make the publish fail, because the
new version may be what a reader, or the next boot, finds: it is pointed to once more until the disk confirms it.
"""

from __future__ import annotations

import errno
from contextlib import suppress

from trainer_cell.vault.cover import directory_problems, index_problems
from trainer_cell.vault.errors import CheckpointDamaged, NotThere, PublishUnknown, StorageFailed, VaultError
from trainer_cell.vault.layout import CheckpointAddress, Vault, VersionName
from trainer_cell.vault.locks import epoch_lock_path
from trainer_cell.vault.manifest import MANIFEST_NAME, Manifest, encode_manifest
from trainer_cell.vault.point import Pointer, check_name
from trainer_cell.vault.staging import Staging, abandon, sweep_staging
from trainer_cell.vault.tensor_index import TensorIndex
from trainer_cell.vault.ulid import new_ulid

__all__ = ["Staging", "abandon", "begin", "finish", "sweep_staging"]

# Room for the manifest and for what the file system itself adds.
_SPARE_BYTES = 64 << 10


def begin(vault: Vault, address: CheckpointAddress, overwrite: bool, num_bytes: int, epoch: str) -> Staging:
    """Step 1. `num_bytes`: of all shards together. The caller holds `vault.hold_epoch(epoch)`.

    Raises `CheckpointExists` (`NotReplaceable`) or `StorageFailed`.
    """
    disk = vault.disk
    epoch_lock_path(vault.staging_root, epoch)  # refuses what is not an epoch
    check_name(vault, address, overwrite)
    if disk.free_bytes(vault.root) < num_bytes + _SPARE_BYTES:
        raise StorageFailed("reserve", vault.root, errno.ENOSPC)
    vault.make_durable(vault.staging_root)
    token = f"{epoch}.{new_ulid(after=_newest(vault, address.model_id))}"
    staging = Staging.attach(vault, token)
    try:
        disk.make_directory(staging.directory)
    except StorageFailed:
        abandon(staging)
        raise
    return staging


def _newest(vault: Vault, model_id: str) -> str | None:
    """The latest version's id: ids are the order of saves, also when the clock went back."""
    try:
        names = vault.disk.names(vault.versions_dir(model_id))
    except NotThere:
        return None
    return max((version.ulid for version in map(VersionName.parse, names) if version), default=None)


def finish(
    vault: Vault, staging: Staging, manifest: Manifest, overwrite: bool, index: TensorIndex | None = None
) -> str:
    """Steps 5 to 7, by one rank, once every shard is durable. The public name is the manifest's.

    index: `manifest.tensors` is its `tensors`; without it the tensors are checked and encoded anew.

    Returns the version, relative to the root, once it is visible and durable. Raises `CheckpointExists`,
    `CheckpointDamaged` (the files are not those of the manifest) or `StorageFailed`, and then nothing has changed
    and staging is gone; but for `PublishUnknown`, after which the new version is what the public name says.
    """
    address = CheckpointAddress(manifest.model_id, manifest.kind, manifest.name)
    try:
        _seal(vault, staging, manifest, index)
        vault.make_durable(
            vault.model_dir(address.model_id), vault.versions_dir(address.model_id), vault.kind_dir(address)
        )
        with vault.lock_model(address.model_id):
            version = _show(vault, staging, address, overwrite)
        return vault.version(address.model_id, version)
    except (VaultError, ValueError):
        abandon(staging)
        raise


def _seal(vault: Vault, staging: Staging, manifest: Manifest, index: TensorIndex | None) -> None:
    """Step 5: what is in staging is what the manifest says, and is durable with it."""
    of_index = index.problems(manifest) if index is not None else index_problems(manifest)
    for problem in (*directory_problems(staging.directory, manifest, vault.disk), *of_index):
        raise CheckpointDamaged(staging.directory, problem)
    raw = encode_manifest(manifest, index.text if index is not None else None)
    path, disk = staging.directory / MANIFEST_NAME, vault.disk
    with disk.closing(disk.open_new(path), path) as descriptor:
        disk.write(descriptor, path, [memoryview(raw)], 0)
        disk.fsync(descriptor, path)
    disk.fsync_directory(staging.directory)


def _show(vault: Vault, staging: Staging, address: CheckpointAddress, overwrite: bool) -> VersionName:
    """Steps 6 and 7, under the model's lock."""
    version = VersionName(address.kind, address.name, staging.token.rpartition(".")[2])
    directory = vault.versions_dir(address.model_id) / str(version)
    try:
        vault.disk.rename(staging.directory, directory)
        vault.disk.fsync_directory(directory.parent)
        Pointer(vault, address, version, staging.token).point(overwrite)
    except PublishUnknown:
        raise
    except VaultError:
        # No name points at it: back to staging, durably, before that is abandoned: no part of it may come back.
        with suppress(StorageFailed):
            vault.disk.rename(directory, staging.directory)
            vault.disk.fsync_directory(directory.parent)
        raise
    return version
