"""What a manifest says of a slot that has just been written."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from trainer_cell.protocol.commands import AdamParams, AdapterSpec, SaveState
from trainer_cell.protocol.outcomes import BaseModel, Layout
from trainer_cell.training.adapter import target_modules
from trainer_cell.training.slots import Slot
from trainer_cell.vault.manifest import FileRecord, Manifest, TensorRecord

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


@dataclass(frozen=True)
class Captured:
    """What of a slot is no tensor, as it was when its tensors were copied."""

    spec: AdapterSpec
    step: int
    iteration: int
    adam_params: AdamParams | None
    has_optimizer: bool
    scheduler: dict[str, float | int | str | bool] | None

    @classmethod
    def of(cls, slot: Slot, has_optimizer: bool) -> Captured:
        optimizer = slot.optimizer
        scheduler = None if optimizer.scheduler is None else optimizer.scheduler.state()
        return cls(slot.spec, optimizer.step, optimizer.iteration, optimizer.last_params, has_optimizer, scheduler)


def compose_manifest(
    facts: SaveFacts,
    captured: Captured,
    command: SaveState,
    index: dict[str, TensorRecord],
    files: dict[str, FileRecord],
    non_finite: bool,
) -> Manifest:
    """The manifest of a version that consists of `files`, which hold the tensors of `index`.

    non_finite: whether NaN or infinity is in any of them.
    """
    return Manifest(
        command_id=command.command_id,
        model_id=command.model_id,
        kind=command.kind,
        name=command.name,
        tenant_digest=command.tenant_digest,
        base_model=facts.base_model.name,
        base_digest=facts.base_model.digest,
        adapter=captured.spec,
        targets=target_modules(captured.spec),
        iteration=captured.iteration,
        step=captured.step,
        has_optimizer=captured.has_optimizer,
        has_scheduler=captured.scheduler is not None,
        scheduler=captured.scheduler,
        adam_params=captured.adam_params,
        layout=facts.layout,
        dtype=facts.dtype,
        created=command.created,
        expires=command.expires,
        user_metadata=command.user_metadata,
        libraries=facts.libraries,
        non_finite=non_finite,
        tensors=index,
        files=files,
    )
