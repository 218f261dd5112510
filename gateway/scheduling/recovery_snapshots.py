"""Recovery snapshots on disk: what each holds, found by the files alone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping

from gateway.scheduling.history import Snapshot
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import VaultError
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import read_manifest

log = logging.getLogger(__name__)

SNAPSHOT_NAME = "latest"
# In a snapshot's metadata: the turn of the last command whose effect it holds, and that command; and when the model was
# made, for a journal that was lost may have known another of the same id.
TURN, COMMAND, BORN = "turn", "command", "born"


class SnapshotAhead(Exception):
    """A snapshot holds what the journal knows nothing of: the journal is older than the disk it goes with."""


def address_of(model_id: str) -> CheckpointAddress:
    return CheckpointAddress(model_id, "recovery", SNAPSHOT_NAME)


def newest_snapshot(
    vault: Vault, model_id: str, born: str, noted: Snapshot | None, done: Mapping[int, str]
) -> Snapshot | None:
    """The model's newest whole snapshot, leased: what its name points at, or the one that was `noted` last.

    A snapshot is noted after it is published, so the disk may know a later one. done: by turn, the finished commands
    that the journal knows of. Blocks for the disk; raises `SnapshotAhead`, or `VaultError` when neither can be read
    though one was noted.
    """
    try:
        version = vault.resolve(address_of(model_id))
        if version is not None:
            facts = read_manifest(vault.version_dir(version)).user_metadata
            turn = int(facts[TURN])
            if facts[BORN] == born and (noted is None or turn > noted.turn):
                if done.get(turn) != facts[COMMAND]:
                    raise SnapshotAhead(f"the snapshot {version} of {model_id} is newer than the journal")
                return Snapshot(version, turn, vault.lease(version))
    except (VaultError, KeyError, ValueError) as error:
        if noted is None:
            log.error("the snapshot of %s cannot be read: %s", model_id, error)
    if noted is None:
        return None
    return Snapshot(noted.version, noted.turn, vault.lease(noted.version))


def with_snapshots(vault: Vault, model_ids: Iterable[str]) -> list[str]:
    """Those of the models that have one on disk; blocks."""
    return [model_id for model_id in model_ids if os.path.lexists(vault.public_path(address_of(model_id)))]


async def forget_snapshots(vault: Vault, model_id: str) -> None:
    """Remove them: the model is over. What the disk does not let go is tried again at the next start."""
    try:
        await asyncio.to_thread(delete_checkpoint, vault, address_of(model_id))
    except VaultError as error:
        log.warning("the snapshots of %s could not be removed: %s", model_id, error)
