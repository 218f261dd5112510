"""What became of a save whose answer was lost with its cell: told from the disk by command id, never guessed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gateway.scheduling.futures import Future
from gateway.scheduling.identity import command_id_of
from gateway.scheduling.requests import SaveRequest
from trainer_cell.protocol.outcomes import StateSaved
from trainer_cell.vault.errors import VaultError, VaultLocked
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.recovery import settle_publish

log = logging.getLogger(__name__)


async def settle_save(vault: Vault, future: Future, epoch: str, is_back: Callable[[], bool]) -> StateSaved | None:
    """The outcome the cell could not tell any more; None when the save did not come to be, or when the cell turns out
    to live: it `is_back`."""
    return await asyncio.to_thread(_settle, vault, future, epoch, is_back)


async def settle_forgotten(vault: Vault, future: Future, epoch: str) -> StateSaved | None:
    """As `settle_save`, of a save that the cell which is attached, of that epoch, knows nothing of."""
    return await asyncio.to_thread(_look_in_peace, vault, future, epoch)


def _settle(vault: Vault, future: Future, epoch: str, is_back: Callable[[], bool]) -> StateSaved | None:
    try:
        # Once the epoch's lock is ours, nobody of that cell can still be writing.
        with vault.hold_epoch(epoch, is_in_vain=is_back):
            return _look(vault, future, epoch)
    except VaultLocked:
        if is_back():
            # It tells. The disk may hold what an earlier attempt made, in whose place this one's is about to come.
            return None
        log.error("cell epoch %s has hung up and lives on", epoch)
    except VaultError as error:
        log.error("save %s of the lost cell cannot be settled: %s", future.request_id, error)
    return _look_in_peace(vault, future, epoch)


def _look_in_peace(vault: Vault, future: Future, epoch: str) -> StateSaved | None:
    try:
        return _look(vault, future, epoch)
    except VaultError as error:
        log.error("save %s of the lost cell cannot be settled: %s", future.request_id, error)
        return None


def _look(vault: Vault, future: Future, epoch: str) -> StateSaved | None:
    request, command_id = future.request, command_id_of(future.request_id)
    assert isinstance(request, SaveRequest)
    address = CheckpointAddress(future.model_id, request.kind, request.name)
    settled = settle_publish(vault, address, command_id, request.overwrite, epoch)
    if settled is None:
        return None
    version, manifest = settled
    return StateSaved(
        command_id=command_id,
        version=version,
        step=manifest.step,
        iteration=manifest.iteration,
        has_optimizer=manifest.has_optimizer,
        size_bytes=manifest.size_bytes,
    )
