"""Staging: where a checkpoint is written before anybody can see it, and how what crashed saves left is swept away.

A `Staging` knows its own directory and nothing of the public name, so that who writes cannot touch that by accident.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import NotThere, StorageFailed
from trainer_cell.vault.layout import KINDS, Vault, kind_directory, model_id_of
from trainer_cell.vault.locks import epoch_lock_path, try_lock_epoch
from trainer_cell.vault.ulid import ULID_PATTERN, new_ulid

_EPOCH = r"([A-Za-z0-9_-]{1,64})"
_STAGED = re.compile(rf"{_EPOCH}\.{ULID_PATTERN}")
_LOCK_FILE = re.compile(rf"{_EPOCH}\.lock")
_POINTER = re.compile(rf"\.point\.{_EPOCH}\.{ULID_PATTERN}")
# The epoch of what is being deleted: it has no holder, so a sweep finishes what a crash left of it.
_DELETED = "deleted"


@dataclass(frozen=True)
class Staging:
    """One attempt's directory. token: its name, by which other ranks find it."""

    directory: Path
    token: str
    disk: Disk

    @classmethod
    def attach(cls, vault: Vault, token: str) -> Staging:
        """The staging that `begin` has made; raises `ValueError` for what is not a token."""
        if not _STAGED.fullmatch(token):
            raise ValueError(f"{token!r} is not a staging token")
        return cls(vault.staging_root / token, token, vault.disk)


def abandon(staging: Staging) -> None:
    """Remove the staging directory, as far as the disk lets; what is left is swept with its epoch."""
    with suppress(StorageFailed):
        staging.disk.remove_tree(staging.directory)


def discard(vault: Vault, path: Path) -> None:
    """Take a directory out of sight, durably, then remove it; a crash between leaves it to the sweep."""
    aside = set_aside(vault, path)
    if aside is not None:
        vault.disk.remove_tree(aside)


def set_aside(vault: Vault, path: Path) -> Path | None:
    """Take a directory out of sight, durably; where it is now, for `Disk.remove_tree` or the next sweep."""
    aside = vault.staging_root / f"{_DELETED}.{new_ulid()}"
    try:
        vault.disk.rename(path, aside)
    except NotThere:
        return None
    vault.disk.fsync_directory(path.parent)
    return aside


def sweep_staging(vault: Vault) -> list[str]:
    """Remove what epochs that no longer live left in staging and beside public names; the names removed.

    What the disk refuses to remove is left for the next sweep. Nothing else is touched.
    """
    leftovers: dict[str, list[Path]] = defaultdict(list)
    with suppress(NotThere):
        for name in vault.disk.names(vault.staging_root):
            match = _STAGED.fullmatch(name)
            lock_file = _LOCK_FILE.fullmatch(name)
            if match:
                leftovers[match[1]].append(vault.staging_root / name)
            elif lock_file:
                leftovers[lock_file[1]] += []
    for pointer in _pointers(vault):
        match = _POINTER.fullmatch(pointer.name)
        if match:
            leftovers[match[1]].append(pointer)
    return [name for epoch, paths in leftovers.items() for name in _sweep_epoch(vault, epoch, paths)]


def _pointers(vault: Vault) -> list[Path]:
    found = []
    for model in vault.disk.names(vault.root):
        if model_id_of(model) is None:
            continue
        for kind in KINDS:
            directory = vault.root / model / kind_directory(kind)
            with suppress(StorageFailed):
                found += [directory / name for name in vault.disk.names(directory) if name.startswith(".point.")]
    return found


def _sweep_epoch(vault: Vault, epoch: str, paths: list[Path]) -> list[str]:
    removed: list[str] = []
    with suppress(StorageFailed):
        lock = try_lock_epoch(vault.disk, vault.staging_root, epoch)
        if lock is None:
            return removed
        with lock:
            for path in paths:
                with suppress(StorageFailed):
                    vault.disk.remove_tree(path)
                    removed.append(path.name)
            vault.disk.unlink(epoch_lock_path(vault.staging_root, epoch))
    return removed
