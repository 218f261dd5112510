"""What a save needs of the books beyond its own model: room in its tenant's quota, a name that is not held by a
checkpoint that has expired, and that somebody looks after what it replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.scheduling.futures import Future
from gateway.scheduling.requests import SaveRequest
from trainer_cell.protocol.commands import ByteQuota
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Progress
from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.inventory import Inventory


@dataclass
class OpenSave:
    """A save under way. quota: for its command. num_bytes: reserved for it, 0 until the cell has told."""

    future: Future
    request: SaveRequest
    command_id: str
    quota: ByteQuota | None = None
    num_bytes: int = 0

    def note_progress(self, said: Progress) -> None:
        self.num_bytes = max(self.num_bytes, said.bytes_total)
        self.future.note_progress(said)


class SaveBook:
    """The saves under way, and the bytes of all.

    quota_bytes: of each tenant, None for no limit. clear_name: removes a name whose checkpoint has expired, blocking.
    on_replaced: called when a save that may have replaced something is over.
    """

    def __init__(
        self,
        inventory: Inventory,
        tenant_digest: Callable[[str], str],
        quota_bytes: int | None,
        clear_name: Callable[[str, SaveRequest], None],
    ) -> None:
        self.quota_bytes = quota_bytes
        self.on_replaced: Callable[[], None] = lambda: None
        self._inventory = inventory
        self._tenant_digest = tenant_digest
        self._clear_name = clear_name
        self._open: list[OpenSave] = []

    async def open(self, future: Future, request: SaveRequest, command_id: str) -> OpenSave:
        """Before its command; to be closed. Raises `CommandFailed` when the disk cannot tell what is used."""
        await asyncio.to_thread(self._clear_name, future.model_id, request)
        save = OpenSave(future, request, command_id)
        if self.quota_bytes is not None:
            try:
                save.quota = ByteQuota(await self.used_bytes(future.tenant), self.quota_bytes)
            except StorageFailed as error:
                raise CommandFailed(ErrorKind.STORAGE_FAILED, str(error)) from error
        self._open.append(save)
        return save

    def adopt(self, future: Future, request: SaveRequest, command_id: str) -> OpenSave:
        """One that is under way already; to be closed."""
        save = OpenSave(future, request, command_id)
        self._open.append(save)
        return save

    def close(self, save: OpenSave) -> None:
        """It is over, whatever became of it."""
        self._open.remove(save)
        if save.request.overwrite:
            self.on_replaced()

    async def used_bytes(self, tenant: str) -> int:
        """On disk, whether a name points at it or not, and of saves under way. Raises `StorageFailed`."""
        under_way = {save.command_id: save.num_bytes for save in self._open if save.future.tenant == tenant}
        return await asyncio.to_thread(self._used_bytes, self._tenant_digest(tenant), under_way)

    def _used_bytes(self, owner: str, under_way: dict[str, int]) -> int:
        stored = [one for one in self._inventory.contents() if one.tenant_digest == owner]
        published = {one.command_id for one in stored}
        reserved = sum(num_bytes for command_id, num_bytes in under_way.items() if command_id not in published)
        return sum(one.num_bytes for one in stored) + reserved
