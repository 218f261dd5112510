"""An imported state as an ordinary checkpoint: the steps of a save, by one process that is no cell."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from trainer_cell.checkpoint.formats.foreign import Foreign
from trainer_cell.checkpoint.manifest_of import library_versions
from trainer_cell.checkpoint.plan import part_dtype
from trainer_cell.protocol.commands import ByteQuota
from trainer_cell.protocol.outcomes import Layout
from trainer_cell.training.adapter_names import target_modules
from trainer_cell.vault.errors import StorageFailed, VaultError
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.locks import epoch_lock_path
from trainer_cell.vault.manifest import Manifest
from trainer_cell.vault.publish import begin, finish
from trainer_cell.vault.shard_file import TensorPiece, merge_index, write_shard
from trainer_cell.vault.staging import Staging, abandon
from trainer_cell.vault.ulid import new_ulid

_ONE_PROCESS = Layout(world=1, tensor=1, pipeline=1, data=1)


@dataclass(frozen=True)
class Destination:
    """Under which name and for whom an import is published, and over which base model it is. quota: the tenant's;
    iteration: where the import does not tell its own; command_id: what its manifest says it was made by."""

    address: CheckpointAddress
    overwrite: bool
    tenant_digest: str
    base_model: str
    base_digest: str
    quota: ByteQuota | None = None
    iteration: int = 0
    command_id: str | None = None


def publish(vault: Vault, foreign: Foreign, destination: Destination) -> tuple[str, Manifest]:
    """The version, visible and durable, and its manifest.

    Raises `VaultError`, or `CommandFailed` (QUOTA_EXCEEDED), with nothing left behind.
    """
    epoch = f"import-{new_ulid()}"
    pieces = _pieces(foreign)
    num_bytes = sum(memoryview(piece.data).nbytes for piece in pieces)
    if destination.quota is not None:
        destination.quota.check(num_bytes)
    with vault.hold_epoch(epoch):
        try:
            staging = begin(vault, destination.address, destination.overwrite, num_bytes, epoch)
            return _write(vault, staging, pieces, foreign, destination)
        finally:
            # Nobody will live under this epoch again.
            with suppress(StorageFailed):
                vault.disk.unlink(epoch_lock_path(vault.staging_root, epoch))


def _write(
    vault: Vault, staging: Staging, pieces: list[TensorPiece], foreign: Foreign, destination: Destination
) -> tuple[str, Manifest]:
    try:
        shard = write_shard(staging, "rank00000.safetensors", pieces)
    except VaultError:
        abandon(staging)
        raise
    counters, address = foreign.counters, destination.address
    manifest = Manifest(
        command_id=destination.command_id or f"import-{new_ulid()}",
        model_id=address.model_id,
        kind=address.kind,
        name=address.name,
        tenant_digest=destination.tenant_digest,
        base_model=destination.base_model,
        base_digest=destination.base_digest,
        adapter=foreign.spec,
        targets=target_modules(foreign.spec),
        iteration=destination.iteration if counters.iteration is None else counters.iteration,
        step=counters.step,
        has_optimizer=foreign.has_optimizer,
        has_scheduler=counters.scheduler is not None,
        scheduler=counters.scheduler,
        adam_params=counters.adam_params,
        layout=_ONE_PROCESS,
        dtype=foreign.dtype,
        created=datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        expires=None,
        user_metadata={},
        libraries=library_versions(),
        non_finite=False,
        tensors=merge_index([shard]),
        files={shard.file: shard.record},
    )
    return finish(vault, staging, manifest, destination.overwrite), manifest


def _pieces(foreign: Foreign) -> list[TensorPiece]:
    return [
        TensorPiece(
            key=f"{name}/{part}",
            dtype=part_dtype(part, foreign.dtype),
            shape=tuple(tensor.shape),
            global_shape=tuple(tensor.shape),
            axis=None,
            offset=0,
            data=memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B"),
        )
        for part, tensors in foreign.parts.items()
        for name, tensor in tensors.items()
    ]
