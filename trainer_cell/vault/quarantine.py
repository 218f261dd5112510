"""Quarantine: where a start-up puts what bears a version's name and does not verify. Nothing here is ever removed by
itself, and no public name leads here.

    <root>/.quarantine/<model>/<kind>.<name>.<ulid>.<ulid>   the second id is that of the move
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer_cell.vault.errors import NotThere, StorageFailed
from trainer_cell.vault.layout import KINDS, CheckpointAddress, Vault, VersionName, directory_name, model_id_of
from trainer_cell.vault.locks import lock_version
from trainer_cell.vault.ulid import ULID_PATTERN, new_ulid

_ENTRY = re.compile(rf"(.+)\.{ULID_PATTERN}")


@dataclass(frozen=True)
class Quarantined:
    """what: `<kind>.<name>.<ulid>` of a version, `<kind>.<name>` of a link that was not the vault's."""

    path: Path
    model_id: str
    what: str
    num_bytes: int


def quarantine_version(vault: Vault, model_id: str, version: VersionName) -> Path | None:
    """Move a version there, durably; None when it is gone or somebody holds a lease. The caller holds the model's lock.

    Raises `StorageFailed`.
    """
    directory = vault.versions_dir(model_id) / str(version)
    lease = lock_version(vault.disk, directory, exclusive=True)
    if lease is None:
        return None
    with lease:
        return _move(vault, directory, model_id, str(version))


def quarantine_link(vault: Vault, address: CheckpointAddress) -> Path:
    """Move what is at a public name there, durably. Raises `StorageFailed`."""
    return _move(vault, vault.public_path(address), address.model_id, f"{address.kind}.{address.name}")


def list_quarantined(vault: Vault) -> Iterator[Quarantined]:
    """By model. What the disk refuses to tell is passed over."""
    for directory in _names(vault, vault.quarantine_root):
        model_id = model_id_of(directory)
        if model_id is None:
            continue
        for name in _names(vault, vault.quarantine_root / directory):
            match = _ENTRY.fullmatch(name)
            if match and match[1].startswith(KINDS):
                path = vault.quarantine_root / directory / name
                yield Quarantined(path, model_id, match[1], _num_bytes(vault, path))


def empty_quarantine(vault: Vault) -> list[Quarantined]:
    """Remove everything that `list_quarantined` tells; what was removed. Raises `StorageFailed`."""
    removed = []
    for found in list_quarantined(vault):
        vault.disk.remove_tree(found.path)
        removed.append(found)
    return removed


def _move(vault: Vault, path: Path, model_id: str, what: str) -> Path:
    holder = vault.quarantine_root / directory_name(model_id)
    vault.make_durable(vault.quarantine_root, holder)
    place = holder / f"{what}.{new_ulid()}"
    vault.disk.rename(path, place)
    vault.disk.fsync_directory(holder)
    vault.disk.fsync_directory(path.parent)
    return place


def _names(vault: Vault, directory: Path) -> list[str]:
    try:
        return vault.disk.names(directory)
    except NotThere:
        return []


def _num_bytes(vault: Vault, path: Path) -> int:
    total = 0
    with suppress(StorageFailed):
        if not stat.S_ISDIR(vault.disk.stat(path).st_mode):
            return vault.disk.stat(path).st_size
        for name in vault.disk.names(path):
            total += vault.disk.stat(path / name).st_size
    return total
