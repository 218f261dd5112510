"""What became of a save whose answer was lost with its cell: told from the disk by command id, never guessed."""

from __future__ import annotations

import asyncio
import logging

from trainer_cell.protocol.commands import SaveState
from trainer_cell.protocol.outcomes import StateSaved
from trainer_cell.vault.errors import VaultError, VaultLocked
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.recovery import settle_publish

log = logging.getLogger(__name__)


async def settle_save(vault: Vault, command: SaveState, epoch: str) -> StateSaved | None:
    """The outcome the cell could not tell any more; None when the save did not come to be."""
    return await asyncio.to_thread(_settle, vault, command, epoch)


def _settle(vault: Vault, command: SaveState, epoch: str) -> StateSaved | None:
    try:
        # Once the epoch's lock is ours, nobody of that cell can still be writing.
        with vault.hold_epoch(epoch):
            return _look(vault, command, epoch)
    except VaultLocked:
        log.error("cell epoch %s has hung up and lives on", epoch)
    except VaultError as error:
        log.error("save %s of the lost cell cannot be settled: %s", command.command_id, error)
        return None
    try:
        return _look(vault, command, epoch)
    except VaultError as error:
        log.error("save %s of the lost cell cannot be settled: %s", command.command_id, error)
        return None


def _look(vault: Vault, command: SaveState, epoch: str) -> StateSaved | None:
    address = CheckpointAddress(command.model_id, command.kind, command.name)
    settled = settle_publish(vault, address, command.command_id, command.overwrite, epoch)
    if settled is None:
        return None
    version, manifest = settled
    return StateSaved(
        command_id=command.command_id,
        version=version,
        step=manifest.step,
        iteration=manifest.iteration,
        has_optimizer=manifest.has_optimizer,
        size_bytes=manifest.size_bytes,
    )
