"""What an owner decides of a published checkpoint afterwards: until when it stays, and whether rules may take it.

Both hold for the version the name points at when the decision is made; a later save under the name brings its own TTL,
and comes only about when the name is not pinned.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from trainer_cell.vault.errors import NotThere
from trainer_cell.vault.inventory import version_names
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.point import pointed_version
from trainer_cell.vault.retention_record import UNREADABLE, RetentionRecord, moment, read_record, write_records


def set_expiry(vault: Vault, address: CheckpointAddress, expires: str | None) -> bool:
    """Let the checkpoint go at that time (UTC, ISO 8601 with `Z`), or never, whatever its manifest says.

    True once that is durable; False when the name points at no version, or is being deleted. Raises `StorageFailed`.
    """
    if expires is not None:
        moment(expires)
    return _change(vault, address, lambda record: msgspec.structs.replace(record, expires=expires))


def pin(vault: Vault, address: CheckpointAddress) -> bool:
    """Keep the checkpoint from TTL, rules, deletion and overwriting. As `set_expiry` otherwise."""
    return _change(vault, address, lambda record: msgspec.structs.replace(record, pinned=True))


def unpin(vault: Vault, address: CheckpointAddress) -> bool:
    """Take the pins from all versions of the name, also from those it points at no more. As `set_expiry` otherwise."""
    try:
        lock = vault.lock_model(address.model_id)
    except NotThere:
        return False
    with lock:
        versions = [name for name in version_names(vault, address.model_id) if name.is_of(address)]
        records = {name: read_record(vault, address.model_id, name) for name in versions}
        pinned = {
            name: msgspec.structs.replace(_readable(record), pinned=False)
            for name, record in records.items()
            if record.pinned
        }
        write_records(vault, address.model_id, pinned)
        return pointed_version(vault, address) in versions


def _change(vault: Vault, address: CheckpointAddress, change: Callable[[RetentionRecord], RetentionRecord]) -> bool:
    try:
        lock = vault.lock_model(address.model_id)
    except NotThere:
        return False
    with lock:
        version = pointed_version(vault, address)
        if version is None or version not in version_names(vault, address.model_id):
            return False
        record = read_record(vault, address.model_id, version)
        if record.doomed is not None:
            return False
        changed = change(_readable(record))
        if changed != record:
            write_records(vault, address.model_id, {version: changed})
        return True


def _readable(record: RetentionRecord) -> RetentionRecord:
    """Where the old record cannot be read, a decision of its owner takes its place."""
    return RetentionRecord(pinned=True) if record is UNREADABLE else record
