"""What lies in the vault, version by version, public or not: for the rules of retention and for counting bytes.

A version never changes, so its manifest is read once; names, links and retention records are read at every call. The
disk stays the truth: what was removed meanwhile, by whomever, is no longer told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trainer_cell.vault.cover import directory_problems
from trainer_cell.vault.errors import CheckpointDamaged, NotThere, UnsupportedFormat
from trainer_cell.vault.layout import (
    KINDS,
    RECOVERY,
    CheckpointAddress,
    InvalidAddress,
    Vault,
    VersionName,
    kind_directory,
)
from trainer_cell.vault.listing import check_identity
from trainer_cell.vault.manifest import MANIFEST_NAME, read_manifest
from trainer_cell.vault.point import pointed_version
from trainer_cell.vault.retention_record import NO_RECORD, RetentionRecord, moment, read_records


@dataclass(frozen=True)
class Contents:
    """What a version's manifest says. num_bytes: of all its files, the manifest among them."""

    command_id: str
    tenant_digest: str
    created: datetime
    expires: datetime | None
    iteration: int
    is_finite: bool
    num_bytes: int


@dataclass(frozen=True)
class Stored:
    """A version directory. contents: None when it does not verify (its bytes have not been read)."""

    version: VersionName
    contents: Contents | None
    is_public: bool
    record: RetentionRecord

    def is_expired(self, now: datetime) -> bool:
        expires = self.record.expires_over(self.contents.expires if self.contents else None)
        return expires is not None and expires <= now


class Inventory:
    """Reads without locks, from any thread. A lock on the model makes what is told of it stay true."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._known: dict[str, dict[VersionName, Contents]] = {}

    def forget(self, model_id: str, versions: Collection[VersionName]) -> None:
        """Read these anew the next time: they may have been damaged since."""
        known = self._known.get(model_id, {})
        self._known[model_id] = {name: contents for name, contents in known.items() if name not in versions}

    def versions(self, model_id: str) -> list[Stored]:
        """All of a model's, in the order of their saves. Raises `StorageFailed`."""
        known = self._known.get(model_id, {})
        records = read_records(self._vault, model_id)
        names = version_names(self._vault, model_id)
        public = set(public_versions(self._vault, model_id))
        found = {name: known.get(name) or self._contents(model_id, name) for name in names}
        self._known[model_id] = {name: contents for name, contents in found.items() if contents is not None}
        return [
            Stored(name, contents, name in public, records.get(name, NO_RECORD)) for name, contents in found.items()
        ]

    def contents(self) -> Iterator[Contents]:
        """Of every version that verifies, recovery snapshots aside. Raises `StorageFailed`."""
        models = self._vault.models()
        for model_id in models:
            known = self._known.get(model_id, {})
            names = [name for name in version_names(self._vault, model_id) if name.kind != RECOVERY]
            found = {name: known.get(name) or self._contents(model_id, name) for name in names}
            told = {name: contents for name, contents in found.items() if contents is not None}
            self._known[model_id] = {**{name: known[name] for name in known if name.kind == RECOVERY}, **told}
            yield from told.values()
        for gone in self._known.keys() - set(models):
            self._known.pop(gone, None)

    def _contents(self, model_id: str, name: VersionName) -> Contents | None:
        try:
            return read_contents(self._vault, model_id, name)
        except (CheckpointDamaged, UnsupportedFormat):
            return None


def version_names(vault: Vault, model_id: str) -> list[VersionName]:
    """Of a model's version directories, in the order of their saves; other things there are passed over."""
    try:
        names = vault.disk.names(vault.versions_dir(model_id))
    except NotThere:
        return []
    return sorted((name for name in map(VersionName.parse, names) if name), key=lambda name: name.ulid)


def public_names(vault: Vault, model_id: str) -> list[CheckpointAddress]:
    """Every entry of a model that could be a public name, whatever it is."""
    found = []
    for kind in KINDS:
        with suppress(NotThere):
            for name in vault.disk.names(vault.model_dir(model_id) / kind_directory(kind)):
                with suppress(InvalidAddress):
                    found.append(CheckpointAddress(model_id, kind, name))
    return found


def public_versions(vault: Vault, model_id: str) -> Iterator[VersionName]:
    """What a model's public names point at, there or not."""
    for address in public_names(vault, model_id):
        version = pointed_version(vault, address)
        if version is not None:
            yield version


def read_contents(vault: Vault, model_id: str, name: VersionName) -> Contents:
    """Raises `CheckpointDamaged` (files, sizes, manifest, or another's manifest), `UnsupportedFormat`,
    `StorageFailed`."""
    directory = vault.versions_dir(model_id) / str(name)
    manifest = read_manifest(directory, vault.disk)
    check_identity(directory, manifest, CheckpointAddress(model_id, name.kind, name.name))
    for problem in directory_problems(directory, manifest, vault.disk):
        raise CheckpointDamaged(directory, problem)
    return Contents(
        command_id=manifest.command_id,
        tenant_digest=manifest.tenant_digest,
        created=_moment(directory, manifest.created),
        expires=None if manifest.expires is None else _moment(directory, manifest.expires),
        iteration=manifest.iteration,
        is_finite=not manifest.non_finite,
        num_bytes=manifest.size_bytes + vault.disk.stat(directory / MANIFEST_NAME).st_size,
    )


def _moment(directory: Path, text: str) -> datetime:
    try:
        return moment(text)
    except ValueError as error:
        raise CheckpointDamaged(directory / MANIFEST_NAME, str(error)) from error
