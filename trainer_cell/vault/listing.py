"""Which checkpoints there are, from the directories alone, and deleting them."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer_cell.vault.cover import directory_problems
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import CheckpointDamaged, NotThere, VaultError
from trainer_cell.vault.layout import (
    KINDS,
    CheckpointAddress,
    Vault,
    VersionName,
    directory_name,
    model_id_of,
)
from trainer_cell.vault.locks import lock_version
from trainer_cell.vault.manifest import MANIFEST_NAME, Manifest, read_manifest
from trainer_cell.vault.staging import discard


@dataclass(frozen=True)
class Listed:
    """A public name. version: relative to the root, as `Vault.resolve` tells it.

    manifest: None when it cannot be read; problem: why the checkpoint cannot be taken for complete (its bytes have not
    been read), None when it can. size_bytes: of the files, 0 when there is no manifest.
    """

    address: CheckpointAddress
    version: str
    manifest: Manifest | None
    problem: str | None
    size_bytes: int


def list_checkpoints(vault: Vault, model_id: str | None = None) -> Iterator[Listed]:
    """All public names, the latest save first; plain directories, which no save has numbered, come last.

    What is not a checkpoint is passed over. Raises `StorageFailed` only if the root itself cannot be listed.
    """
    with suppress(NotThere):
        models = [directory_name(model_id)] if model_id else vault.disk.names(vault.root)
        found = [pair for model in models for pair in _resolved(vault, model)]
        for address, version in sorted(found, key=_latest_last, reverse=True):
            yield _listed(vault, address, version)


def _latest_last(pair: tuple[CheckpointAddress, str]) -> tuple[str, str]:
    address, version = pair
    name = VersionName.parse(version.rpartition("/")[2])
    return (name.ulid if name else "", address.uri)


def _resolved(vault: Vault, model: str) -> Iterator[tuple[CheckpointAddress, str]]:
    model_id = model_id_of(model)
    if model_id is None:
        return
    for kind in KINDS:
        try:
            names = vault.disk.names(vault.root / model / kind)
        except VaultError:
            continue
        for name in names:
            # A stray is not a name, no link of ours, or gone again.
            with suppress(VaultError):
                address = CheckpointAddress(model_id, kind, name)
                version = vault.resolve(address)
                if version and _is_ours(vault, vault.version_dir(version), version):
                    yield address, version


def _is_ours(vault: Vault, directory: Path, version: str) -> bool:
    """A link to a version is, even when the version is missing; a plain directory is by its manifest."""
    if VersionName.parse(version.rpartition("/")[2]):
        return True
    return stat.S_ISREG(vault.disk.stat(directory / MANIFEST_NAME).st_mode)


def find_checkpoint(vault: Vault, address: CheckpointAddress) -> Listed | None:
    """What a public name stands for now, None when it is free.

    Raises `CheckpointDamaged` when something else than a checkpoint is there, or `StorageFailed`.
    """
    version = vault.resolve(address)
    return None if version is None else _listed(vault, address, version)


def _listed(vault: Vault, address: CheckpointAddress, version: str) -> Listed:
    directory = vault.version_dir(version)
    try:
        manifest = read_manifest(directory, vault.disk)
    except VaultError as error:
        return Listed(address, version, None, str(error), 0)
    return Listed(address, version, manifest, _problem(directory, manifest, address, vault.disk), manifest.size_bytes)


def _problem(directory: Path, manifest: Manifest, address: CheckpointAddress, disk: Disk) -> str | None:
    try:
        check_identity(directory, manifest, address)
        return next(directory_problems(directory, manifest, disk), None)
    except VaultError as error:
        return str(error)


def check_identity(directory: Path, manifest: Manifest, address: CheckpointAddress) -> None:
    """Raises `CheckpointDamaged` when the manifest is another checkpoint's than the one it was found under.

    A plain directory may be a copy made by hand, under another name or model; its kind must be right all the same.
    """
    fields = ("kind",) if VersionName.parse(directory.name) is None else ("model_id", "kind", "name")
    for field in fields:
        if getattr(manifest, field) != getattr(address, field):
            raise CheckpointDamaged(
                directory / MANIFEST_NAME, f"{field} is {getattr(manifest, field)}, not {getattr(address, field)}"
            )


def delete_checkpoint(vault: Vault, address: CheckpointAddress) -> bool:
    """Delete a public name, its version and the replaced versions behind it; whether the name was there.

    The name goes first, durably; a crash after that leaves versions that a second call, or a sweep, removes. A version
    that a reader holds a lease on stays for a later call. Raises `StorageFailed`; a retry is fine.
    """
    try:
        lock = vault.lock_model(address.model_id)
    except NotThere:
        return _delete_name(vault, address)
    with lock:
        was_there = _delete_name(vault, address)
        for name in vault.disk.names(vault.versions_dir(address.model_id)):
            version = VersionName.parse(name)
            if version and (version.kind, version.name) == (address.kind, address.name):
                _delete_version(vault, vault.versions_dir(address.model_id) / name)
        return was_there


def _delete_name(vault: Vault, address: CheckpointAddress) -> bool:
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


def _delete_version(vault: Vault, directory: Path) -> None:
    lease = lock_version(vault.disk, directory, exclusive=True)
    if lease is not None:
        with lease:
            discard(vault, directory)
