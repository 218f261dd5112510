"""Published checkpoints as their owner sees them, read from the files at each call. The disk is the truth.

An owner is known by the tenant digest in a manifest; nobody else learns that a checkpoint exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.scheduling.errors import CheckpointUnreadable, CheckpointUnsupported, InvalidRequest, UnknownCheckpoint
from trainer_cell.vault.cover import directory_problems
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import CheckpointDamaged, UnsupportedFormat
from trainer_cell.vault.layout import CheckpointAddress, InvalidAddress, Vault
from trainer_cell.vault.listing import check_identity, list_checkpoints
from trainer_cell.vault.manifest import Manifest, read_manifest


@dataclass(frozen=True)
class Entry:
    """One published checkpoint. version: its directory, relative to the checkpoint root."""

    address: CheckpointAddress
    manifest: Manifest
    version: str
    size_bytes: int

    @property
    def uri(self) -> str:
        return self.address.uri

    @property
    def created(self) -> datetime:
        return datetime.fromisoformat(self.manifest.created)

    @property
    def expires(self) -> datetime | None:
        return datetime.fromisoformat(self.manifest.expires) if self.manifest.expires else None


@dataclass(frozen=True)
class Run:
    """A model known from its checkpoints, newest first; at least one."""

    model_id: str
    checkpoints: tuple[Entry, ...]


Entries = list[Entry]
Runs = list[Run]


class Catalog:
    """Reads the vault in threads. Raises `trainer_cell.vault.errors.StorageFailed` when the disk fails.

    known_owner: tenant of a model the gateway knows, None for others; it vouches for a checkpoint whose own manifest
    cannot be read.
    """

    def __init__(self, vault: Vault, tenant_digest: Callable[[str], str]) -> None:
        self.vault = vault
        self.tenant_digest = tenant_digest
        self.known_owner: Callable[[str], str | None] = lambda model_id: None

    async def list(self, tenant: str, model_id: str | None = None) -> Entries:
        """The tenant's readable, unexpired checkpoints, newest first; of one model if `model_id` is given."""
        return await asyncio.to_thread(self._list, self.tenant_digest(tenant), model_id)

    async def runs(self, tenant: str) -> Runs:
        """The tenant's models that have checkpoints, the one with the newest checkpoint first."""
        by_model: dict[str, Entries] = {}
        for entry in await self.list(tenant):
            by_model.setdefault(entry.address.model_id, []).append(entry)
        return [Run(model_id, tuple(entries)) for model_id, entries in by_model.items()]

    async def find(self, tenant: str, address: str | CheckpointAddress) -> Entry:
        """One checkpoint, by its tinker:// address.

        Raises `InvalidRequest` (no address), `UnknownCheckpoint` (absent, expired, or another's),
        `CheckpointUnreadable` (the tenant's own, damaged).
        """
        return await asyncio.to_thread(self._find, tenant, parse_address(address))

    async def delete(self, tenant: str, address: str | CheckpointAddress) -> None:
        """Remove one checkpoint, damaged or not; raises `InvalidRequest`, `UnknownCheckpoint`."""
        await asyncio.to_thread(self._delete, tenant, parse_address(address))

    def _list(self, owner: str, model_id: str | None) -> Entries:
        now = datetime.now(UTC)
        entries = []
        for listed in list_checkpoints(self.vault, model_id):
            if listed.manifest is None or listed.problem is not None or listed.manifest.tenant_digest != owner:
                continue
            entry = Entry(listed.address, listed.manifest, listed.version, listed.size_bytes)
            if not _is_expired(entry, now):
                entries.append(entry)
        return entries

    def _find(self, tenant: str, address: CheckpointAddress) -> Entry:
        try:
            version = self.vault.resolve(address)
            if version is None:
                raise _unknown(address)
            manifest = read_manifest(self.vault.version_dir(version))
        except (CheckpointDamaged, UnsupportedFormat) as damage:
            if not self._is_owner_by_evidence(tenant, address.model_id, default=True):
                raise _unknown(address) from None
            raise _unreadable(address, damage) from damage
        entry = Entry(address, manifest, version, manifest.size_bytes)
        if manifest.tenant_digest != self.tenant_digest(tenant) or _is_expired(entry, datetime.now(UTC)):
            raise _unknown(address)
        self._check_whole(entry)
        return entry

    def _check_whole(self, entry: Entry) -> None:
        """The manifest is of this address, and its files are there in full; their bytes are for the cell to verify."""
        directory = self.vault.version_dir(entry.version)
        try:
            check_identity(directory, entry.manifest, entry.address)
            for problem in directory_problems(directory, entry.manifest):
                raise CheckpointDamaged(directory, problem)
        except CheckpointDamaged as damage:
            raise _unreadable(entry.address, damage) from damage

    def _delete(self, tenant: str, address: CheckpointAddress) -> None:
        try:
            self._find(tenant, address)
        except CheckpointUnreadable:
            if not self._is_owner_by_evidence(tenant, address.model_id, default=False):
                raise _unknown(address) from None
        except UnknownCheckpoint:
            # What an earlier delete had to leave, since it was being read or the gateway died in it, goes now.
            if self._is_owner_by_evidence(tenant, address.model_id, default=False) and self._is_absent(address):
                delete_checkpoint(self.vault, address)
            raise
        if not delete_checkpoint(self.vault, address):
            raise _unknown(address)

    def _is_absent(self, address: CheckpointAddress) -> bool:
        return self.vault.resolve(address) is None

    def _is_owner_by_evidence(self, tenant: str, model_id: str, default: bool) -> bool:
        """Whose a checkpoint without a readable manifest is: its model's, or that of its readable siblings.

        `default` when nothing tells: model ids are not to be guessed, so who names one has seen it.
        """
        known = self.known_owner(model_id)
        if known is not None:
            return known == tenant
        for listed in list_checkpoints(self.vault, model_id):
            if listed.manifest is not None:
                return listed.manifest.tenant_digest == self.tenant_digest(tenant)
        return default


def parse_address(address: str | CheckpointAddress) -> CheckpointAddress:
    """Raises `InvalidRequest` for anything but tinker://<model_id>/<kind>/<name>."""
    if isinstance(address, CheckpointAddress):
        return address
    try:
        return CheckpointAddress.parse(address)
    except InvalidAddress as error:
        raise InvalidRequest(str(error)) from error


def _unreadable(address: CheckpointAddress, damage: CheckpointDamaged | UnsupportedFormat) -> CheckpointUnreadable:
    kind = CheckpointUnsupported if isinstance(damage, UnsupportedFormat) else CheckpointUnreadable
    return kind(f"checkpoint {address.uri} cannot be read: {damage}")


def _unknown(address: CheckpointAddress) -> UnknownCheckpoint:
    return UnknownCheckpoint(f"no checkpoint {address.uri}")


def _is_expired(entry: Entry, now: datetime) -> bool:
    return entry.expires is not None and entry.expires <= now
