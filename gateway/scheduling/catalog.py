"""Published checkpoints as their owner sees and keeps them, read from the files at each call. The disk is the truth.

An owner is known by the tenant digest in a manifest; nobody else learns that a checkpoint exists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from gateway.scheduling import errors
from gateway.scheduling.errors import CheckpointUnreadable, CheckpointUnsupported, InvalidRequest, UnknownCheckpoint
from gateway.scheduling.identity import timestamp
from gateway.scheduling.requests import SaveRequest
from gateway.scheduling.saving import SaveBook
from trainer_cell.vault.cover import directory_problems
from trainer_cell.vault.deletion import delete_checkpoint, delete_expired
from trainer_cell.vault.errors import CheckpointDamaged, CheckpointPinned, UnsupportedFormat, VaultError
from trainer_cell.vault.inventory import Inventory
from trainer_cell.vault.layout import RECOVERY, CheckpointAddress, InvalidAddress, Vault
from trainer_cell.vault.lifetime import pin, set_expiry, unpin
from trainer_cell.vault.listing import Listed, check_identity, find_checkpoint, list_checkpoints, record_of
from trainer_cell.vault.manifest import Manifest, read_manifest
from trainer_cell.vault.retention_record import RetentionRecord, moment

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One published checkpoint. version: its directory, relative to the checkpoint root.

    record: what was decided about it since it was published.
    """

    address: CheckpointAddress
    manifest: Manifest
    version: str
    size_bytes: int
    record: RetentionRecord

    @property
    def uri(self) -> str:
        return self.address.uri

    @property
    def created(self) -> datetime:
        return datetime.fromisoformat(self.manifest.created)

    @property
    def expires(self) -> datetime | None:
        return self.record.expires_over(moment(self.manifest.expires) if self.manifest.expires else None)

    def is_expired(self, now: datetime) -> bool:
        return self.expires is not None and self.expires <= now and not self.record.pinned


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
    cannot be read. quota_bytes: what a tenant's checkpoints may take, None for no limit.
    """

    def __init__(self, vault: Vault, tenant_digest: Callable[[str], str], quota_bytes: int | None = None) -> None:
        self.vault = vault
        self.tenant_digest = tenant_digest
        self.inventory = Inventory(vault)
        self.saves = SaveBook(self.inventory, tenant_digest, quota_bytes, self._clear_for_save)
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
        """Remove one checkpoint, damaged or not; raises `InvalidRequest`, `UnknownCheckpoint`, `CheckpointPinned`."""
        await asyncio.to_thread(self._delete, tenant, _clients_own(address))

    async def set_ttl(self, tenant: str, address: str | CheckpointAddress, ttl_seconds: int | None) -> Entry:
        """Let it go so many seconds from now, or never; the checkpoint as it is then. Raises as `find`."""
        expires = None if ttl_seconds is None else timestamp(datetime.now(UTC) + timedelta(seconds=ttl_seconds))
        return await self._decide(tenant, address, lambda found: set_expiry(self.vault, found, expires))

    async def pin(self, tenant: str, address: str | CheckpointAddress) -> Entry:
        """Keep it from TTL, rules, deletion and overwriting; the checkpoint as it is then. Raises as `find`."""
        return await self._decide(tenant, address, lambda found: pin(self.vault, found))

    async def unpin(self, tenant: str, address: str | CheckpointAddress) -> Entry:
        return await self._decide(tenant, address, lambda found: unpin(self.vault, found))

    async def _decide(
        self, tenant: str, address: str | CheckpointAddress, decide: Callable[[CheckpointAddress], bool]
    ) -> Entry:
        found = (await self.find(tenant, _clients_own(address))).address
        if not await asyncio.to_thread(decide, found):
            # Gone meanwhile, or a plain directory.
            await self.find(tenant, found)
            raise InvalidRequest(f"{found.uri} is of an older layout: neither TTL nor pin can be changed")
        return await self.find(tenant, found)

    def _list(self, owner: str, model_id: str | None) -> Entries:
        now = datetime.now(UTC)
        entries = []
        for listed in list_checkpoints(self.vault, model_id):
            if listed.manifest is None or listed.problem is not None or listed.manifest.tenant_digest != owner:
                continue
            entry = _entry(listed)
            if not entry.is_expired(now):
                entries.append(entry)
        return entries

    def _find(self, tenant: str, address: CheckpointAddress) -> Entry:
        version = None
        try:
            version = self.vault.resolve(address)
            if version is None:
                raise _unknown(address)
            manifest, record = read_manifest(self.vault.version_dir(version)), record_of(self.vault, address, version)
        except (CheckpointDamaged, UnsupportedFormat) as damage:
            if version is not None and self._has_moved(address, version):
                return self._find(tenant, address)
            if not self._is_owner_by_evidence(tenant, address.model_id, default=True):
                raise _unknown(address) from None
            raise _unreadable(address, damage) from damage
        entry = Entry(address, manifest, version, manifest.size_bytes, record)
        if manifest.tenant_digest != self.tenant_digest(tenant) or entry.is_expired(datetime.now(UTC)):
            raise _unknown(address)
        try:
            self._check_whole(entry)
        except CheckpointDamaged as damage:
            if self._has_moved(address, version):
                return self._find(tenant, address)
            raise _unreadable(address, damage) from damage
        return entry

    def _has_moved(self, address: CheckpointAddress, version: str) -> bool:
        """Whether the name stood for it only until just now: then its files may have gone while they were read."""
        try:
            return self.vault.resolve(address) != version
        except CheckpointDamaged:
            return False

    def _check_whole(self, entry: Entry) -> None:
        """The manifest is of this address, and its files are there in full; their bytes are for the cell to verify.

        Raises `CheckpointDamaged`.
        """
        directory = self.vault.version_dir(entry.version)
        check_identity(directory, entry.manifest, entry.address)
        for problem in directory_problems(directory, entry.manifest):
            raise CheckpointDamaged(directory, problem)

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
        try:
            was_there = delete_checkpoint(self.vault, address)
        except CheckpointPinned as refusal:
            raise errors.CheckpointPinned(str(refusal)) from refusal
        if not was_there:
            raise _unknown(address)

    def _clear_for_save(self, model_id: str, request: SaveRequest) -> None:
        self.clear_name(CheckpointAddress(model_id, request.kind, request.name))

    def clear_name(self, address: CheckpointAddress) -> None:
        """An expired checkpoint is no longer there for its owner, so it must not be in the way of a new one either.

        Blocks for the disk.
        """

        def is_expired() -> bool:
            found = find_checkpoint(self.vault, address)
            return found is not None and found.problem is None and _entry(found).is_expired(datetime.now(UTC))

        try:
            if is_expired():
                delete_expired(self.vault, address, is_expired)
        except VaultError as error:
            # The save itself meets what is wrong there, and tells its client.
            log.warning("whether %s has expired cannot be told: %s", address.uri, error)

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


def _entry(listed: Listed) -> Entry:
    """Of one that has a manifest."""
    assert listed.manifest is not None
    return Entry(listed.address, listed.manifest, listed.version, listed.size_bytes, listed.record)


def parse_address(address: str | CheckpointAddress) -> CheckpointAddress:
    """Raises `InvalidRequest` for anything but tinker://<model_id>/<kind>/<name>."""
    if isinstance(address, CheckpointAddress):
        return address
    try:
        return CheckpointAddress.parse(address)
    except InvalidAddress as error:
        raise InvalidRequest(str(error)) from error


def _clients_own(address: str | CheckpointAddress) -> CheckpointAddress:
    """Raises `InvalidRequest` also for a recovery snapshot: the service replaces and removes those by itself."""
    parsed = parse_address(address)
    if parsed.kind == RECOVERY:
        raise InvalidRequest(f"{parsed.uri} is the service's own: it can be loaded, not changed or deleted")
    return parsed


def _unreadable(address: CheckpointAddress, damage: CheckpointDamaged | UnsupportedFormat) -> CheckpointUnreadable:
    kind = CheckpointUnsupported if isinstance(damage, UnsupportedFormat) else CheckpointUnreadable
    return kind(f"checkpoint {address.uri} cannot be read: {damage}")


def _unknown(address: CheckpointAddress) -> UnknownCheckpoint:
    return UnknownCheckpoint(f"no checkpoint {address.uri}")
