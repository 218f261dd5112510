"""What became of a publish that nobody was there to answer for: told from the disk, never guessed."""

from __future__ import annotations

from trainer_cell.vault.errors import CheckpointDamaged, CheckpointExists, NotThere, UnsupportedFormat
from trainer_cell.vault.layout import CheckpointAddress, Vault, VersionName
from trainer_cell.vault.manifest import Manifest, read_manifest
from trainer_cell.vault.point import Pointer
from trainer_cell.vault.retention_record import read_record
from trainer_cell.vault.staging import discard
from trainer_cell.vault.ulid import new_ulid
from trainer_cell.vault.verify import verify_version


def settle_publish(
    vault: Vault, address: CheckpointAddress, command_id: str, overwrite: bool, epoch: str
) -> tuple[str, Manifest] | None:
    """The version that command published under `address`, visible and durable now; None when there is none.

    A version that was frozen and not pointed to is pointed to if it verifies and the name has no later version, and
    removed if the name has one, or is taken and not to be overwritten. One that does not verify is left where it is,
    and so is one that was deleted meanwhile. The caller knows that nobody publishes for this command any more.
    Raises `StorageFailed`, also when the disk does not let the version be read: whether it is good is then unknown.
    """
    try:
        lock = vault.lock_model(address.model_id)
    except NotThere:
        return None
    with lock:
        found = _version_of(vault, address, command_id)
        if found is None:
            return None
        version, manifest = found
        if read_record(vault, address.model_id, version).doomed is not None:
            return None
        told = vault.version(address.model_id, version)
        if verify_version(vault.version_dir(told), disk=vault.disk, unreadable_is_wrong=False):
            return None
        pointer = Pointer(vault, address, version, f"{epoch}.{new_ulid()}")
        current = vault.resolve(address)  # of one name, versions sort as their ids do
        if current == told:
            pointer.confirm()
        elif current is not None and current > told:
            discard(vault, vault.version_dir(told))
            return None
        else:
            vault.make_durable(vault.kind_dir(address))
            try:
                pointer.point(overwrite)
            except CheckpointExists:
                discard(vault, vault.version_dir(told))
                return None
        return told, manifest


def _version_of(vault: Vault, address: CheckpointAddress, command_id: str) -> tuple[VersionName, Manifest] | None:
    """The latest of the name's versions that says it was made by that command."""
    directory = vault.versions_dir(address.model_id)
    for name in reversed(vault.disk.names(directory)):
        version = VersionName.parse(name)
        if version is None or (version.kind, version.name) != (address.kind, address.name):
            continue
        try:
            manifest = read_manifest(directory / name, vault.disk)
        except (CheckpointDamaged, UnsupportedFormat):
            continue
        if manifest.command_id == command_id:
            return version, manifest
    return None
