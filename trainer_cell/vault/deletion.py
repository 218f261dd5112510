"""Deleting a public name: the decision, then the name, then the versions, each durable before the next.

    decide   every version of the name is marked `doomed` in its retention record
    unlink   the name is gone
    remove   each version goes into `.staging`, then away; its record last

Without the mark nobody could tell, after a crash, the versions of a name that was deleted from a version that was
frozen and not yet pointed to, which a start-up makes visible. Whatever is marked is removed by the next deletion,
sweep or start-up. A version on which a reader holds a lease stays until it is let go.

A mark takes room, and deleting must work on a full disk. There the name goes without it, and the versions follow from
the oldest on: a crash in between leaves the latest, which a start-up brings back; the deletion, which nobody was told
of, was none then. What has a lease is marked when the others have made room.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from trainer_cell.vault.errors import CheckpointPinned, NotThere, StorageFailed
from trainer_cell.vault.inventory import version_names
from trainer_cell.vault.layout import CheckpointAddress, Vault, VersionName
from trainer_cell.vault.locks import lock_version
from trainer_cell.vault.point import pointed_version
from trainer_cell.vault.retention import Reason
from trainer_cell.vault.retention_record import RetentionRecord, drop_records, read_record, write_records
from trainer_cell.vault.staging import discard, set_aside


def delete_checkpoint(vault: Vault, address: CheckpointAddress) -> bool:
    """Delete a public name, its version and the replaced versions behind it; whether the name was there.

    Raises `CheckpointPinned` with nothing changed, or `StorageFailed`; a retry is fine.
    """
    return _delete(vault, address, "deleted", lambda: True)


def delete_expired(vault: Vault, address: CheckpointAddress, is_expired: Callable[[], bool]) -> bool:
    """The same for a checkpoint whose TTL is over. is_expired: asked once nobody can publish under the name any more.

    Raises `CheckpointPinned` with nothing changed, or `StorageFailed`; a retry is fine.
    """
    return _delete(vault, address, "expired", is_expired)


def _delete(vault: Vault, address: CheckpointAddress, reason: Reason, is_due: Callable[[], bool]) -> bool:
    try:
        lock = vault.lock_model(address.model_id)
    except NotThere:
        return is_due() and unlink_name(vault, address)
    with lock:
        if not is_due():
            return False
        versions = [name for name in version_names(vault, address.model_id) if name.is_of(address)]
        records = {name: read_record(vault, address.model_id, name) for name in versions}
        if any(record.pinned for record in records.values()):
            raise CheckpointPinned(address.uri)
        is_marked = doom_if_there_is_room(vault, address, records, reason)
        was_there = unlink_name(vault, address)
        gone = set_versions_aside(vault, address.model_id, versions)
        if not is_marked:
            for aside in gone.values():
                vault.disk.remove_tree(aside)
            doom(vault, address, {name: records[name] for name in versions if name not in gone}, reason)
    for aside in gone.values():
        vault.disk.remove_tree(aside)
    return was_there


def doom_if_there_is_room(
    vault: Vault, address: CheckpointAddress, records: dict[VersionName, RetentionRecord], reason: Reason
) -> bool:
    """As `doom`; False, and some of them marked or none, when the disk is full."""
    try:
        doom(vault, address, records, reason)
    except StorageFailed as failure:
        if not failure.is_no_space:
            raise
        return False
    return True


def doom(vault: Vault, address: CheckpointAddress, records: dict[VersionName, RetentionRecord], reason: Reason) -> None:
    """Mark the versions of a name durably, the one it points at last: once that is marked, all are."""
    public = pointed_version(vault, address)
    fresh = {
        name: msgspec.structs.replace(record, doomed=reason)
        for name, record in records.items()
        if record.doomed is None
    }
    # One after the other: a file system need not keep the order of what is synced together.
    write_records(vault, address.model_id, {name: record for name, record in fresh.items() if name != public})
    write_records(vault, address.model_id, {name: record for name, record in fresh.items() if name == public})


def unlink_name(vault: Vault, address: CheckpointAddress) -> bool:
    """Remove a public name, durably, and with it a plain directory that an older layout left there."""
    public = vault.public_path(address)
    try:
        status = vault.disk.stat(public)
    except NotThere:
        return False
    if stat.S_ISDIR(status.st_mode):
        discard(vault, public)
        return True
    if not stat.S_ISLNK(status.st_mode):
        return False
    vault.disk.unlink(public)
    vault.disk.fsync_directory(public.parent)
    return True


def set_versions_aside(vault: Vault, model_id: str, versions: Sequence[VersionName]) -> dict[VersionName, Path]:
    """Take versions that no name points at out of sight, durably and in that order, but for those with a lease; where
    they are now.

    The caller holds the model's lock, and removes what is told once it has let go of it: that may take long.
    """
    gone: dict[VersionName, Path] = {}
    for name in versions:
        directory = vault.versions_dir(model_id) / str(name)
        lease = lock_version(vault.disk, directory, exclusive=True)
        if lease is not None:
            with lease:
                aside = set_aside(vault, directory)
            if aside is not None:
                gone[name] = aside
    drop_records(vault, model_id, [*gone])
    return gone
