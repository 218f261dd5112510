"""What a manifest says of a slot that has just been written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from trainer_cell.protocol.commands import SaveState
from trainer_cell.protocol.outcomes import BaseModel, Layout
from trainer_cell.training.adapter import target_modules
from trainer_cell.training.slots import Slot
from trainer_cell.vault.manifest import Manifest
from trainer_cell.vault.shard_file import WrittenShard, merge_index

_LIBRARIES = ("cellgate", "torch", "megatron-core")


@dataclass(frozen=True)
class SaveFacts:
    """What every manifest of a cell says alike."""

    epoch: str
    base_model: BaseModel
    layout: Layout
    dtype: Literal["fp32", "bf16"]
    libraries: dict[str, str]


def library_versions() -> dict[str, str]:
    return {name: version(name) for name in _LIBRARIES}


def compose_manifest(
    facts: SaveFacts, slot: Slot, command: SaveState, shards: Sequence[WrittenShard], has_optimizer: bool
) -> Manifest:
    """The manifest of a version that consists of `shards`; the slot is read for its counters alone."""
    optimizer = slot.optimizer
    return Manifest(
        command_id=command.command_id,
        model_id=command.model_id,
        kind=command.kind,
        name=command.name,
        tenant_digest=command.tenant_digest,
        base_model=facts.base_model.name,
        base_digest=facts.base_model.digest,
        adapter=slot.spec,
        targets=target_modules(slot.spec),
        iteration=optimizer.iteration,
        step=optimizer.step,
        has_optimizer=has_optimizer,
        has_scheduler=optimizer.scheduler is not None,
        scheduler=None if optimizer.scheduler is None else optimizer.scheduler.state(),
        adam_params=optimizer.last_params,
        layout=facts.layout,
        dtype=facts.dtype,
        created=command.created,
        expires=command.expires,
        user_metadata=command.user_metadata,
        libraries=facts.libraries,
        non_finite=False,  # the capture has refused anything else
        tensors=merge_index(shards),
        files={shard.file: shard.record for shard in shards},
    )
