"""Which checkpoints there are, from the directories alone."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trainer_cell.vault.cover import directory_problems
from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import CheckpointDamaged, NotThere, VaultError
from trainer_cell.vault.layout import (
    CLIENT_KINDS,
    CheckpointAddress,
    Kind,
    Vault,
    VersionName,
    directory_name,
    kind_directory,
    model_id_of,
)
from trainer_cell.vault.manifest import MANIFEST_NAME, Manifest, read_manifest
from trainer_cell.vault.retention_record import NO_RECORD, RetentionRecord, moment, read_record


@dataclass(frozen=True)
class Listed:
    """A public name. version: relative to the root, as `Vault.resolve` tells it.

    manifest: None when it cannot be read; problem: why the checkpoint cannot be taken for complete (its bytes have not
    been read), None when it can. size_bytes: of the files, 0 when there is no manifest.
    record: what was decided about it since it was published.
    """

    address: CheckpointAddress
    version: str
    manifest: Manifest | None
    problem: str | None
    size_bytes: int
    record: RetentionRecord = NO_RECORD

    @property
    def expires(self) -> datetime | None:
        """When it goes, as its TTL has it now; only for one without a problem."""
        stated = None if self.manifest is None else self.manifest.expires
        return self.record.expires_over(None if stated is None else moment(stated))


def list_checkpoints(
    vault: Vault, model_id: str | None = None, kinds: Sequence[Kind] = CLIENT_KINDS
) -> Iterator[Listed]:
    """All public names, the latest save first; plain directories, which no save has numbered, come last.

    What is not a checkpoint is passed over. Raises `StorageFailed` only if the root itself cannot be listed.
    """
    with suppress(NotThere):
        models = [directory_name(model_id)] if model_id else vault.disk.names(vault.root)
        found = [pair for model in models for pair in _resolved(vault, model, kinds)]
        for address, version in sorted(found, key=_latest_last, reverse=True):
            yield _listed(vault, address, version)


def _latest_last(pair: tuple[CheckpointAddress, str]) -> tuple[str, str]:
    address, version = pair
    name = VersionName.parse(version.rpartition("/")[2])
    return (name.ulid if name else "", address.uri)


def _resolved(vault: Vault, model: str, kinds: Sequence[Kind]) -> Iterator[tuple[CheckpointAddress, str]]:
    model_id = model_id_of(model)
    if model_id is None:
        return
    for kind in kinds:
        try:
            names = vault.disk.names(vault.root / model / kind_directory(kind))
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
        record = record_of(vault, address, version)
    except VaultError as error:
        return Listed(address, version, None, str(error), 0)
    problem = _problem(directory, manifest, address, vault.disk)
    return Listed(address, version, manifest, problem, manifest.size_bytes, record)


def record_of(vault: Vault, address: CheckpointAddress, version: str) -> RetentionRecord:
    """Of a version as `Vault.resolve` tells it; a plain directory has none. Raises `StorageFailed`."""
    name = VersionName.parse(version.rpartition("/")[2])
    return NO_RECORD if name is None else read_record(vault, address.model_id, name)


def _problem(directory: Path, manifest: Manifest, address: CheckpointAddress, disk: Disk) -> str | None:
    try:
        check_identity(directory, manifest, address)
        for time in (manifest.created, manifest.expires):
            if time is not None:
                moment(time)
        return next(directory_problems(directory, manifest, disk), None)
    except (VaultError, ValueError) as error:
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
