"""Load a version into a slot: read and verify aside on every rank, agree, then apply. Before the last step nothing
has changed; in it nothing can fail."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from trainer_cell.checkpoint.failures import vault_failures
from trainer_cell.checkpoint.plan import stored_parts
from trainer_cell.checkpoint.slot_reader import Run, SlotReader
from trainer_cell.protocol.commands import AdapterSpec, LoadState
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import BaseModel, StateLoaded
from trainer_cell.ranks import Ranks
from trainer_cell.training.lr_schedule import LrScheduler, read_scheduler
from trainer_cell.training.slots import Slot, SlotTable
from trainer_cell.vault.layout import RECOVERY, Vault
from trainer_cell.vault.manifest import Manifest, read_manifest
from trainer_cell.vault.shard_layout import KeptMemory

_MOST_READERS = 16


@dataclass(frozen=True)
class LoadContext:
    """What loading needs of its cell, the same for every load.

    memory: what is read comes there first; readers: by what they read, those that were made before.
    """

    ranks: Ranks
    vault: Vault
    base_model: BaseModel
    dtype: str
    no_load_optim: bool
    memory: KeptMemory = dataclasses.field(default_factory=KeptMemory)
    readers: dict[object, SlotReader] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class _Read:
    """A checkpoint as read, aside from any slot: what this rank holds of each part, there until the next load."""

    manifest: Manifest
    parts: dict[str, list[Run]]
    with_optimizer: bool
    scheduler: LrScheduler | None


def load_slot(context: LoadContext, slots: SlotTable, command: LoadState) -> StateLoaded:
    """Put the version into the model's slot; a model that is not resident becomes so.

    Raises `CommandFailed` with the slot as it was before, bit for bit, and a model that was not resident still not so.
    """
    is_new = not slots.is_resident(command.model_id)
    if not is_new:
        _check_adapter(command.adapter, slots.get(command.model_id).spec)
    try:
        if is_new:
            context.ranks.agree(lambda: slots.create(command.model_id, command.adapter, seed=0))
        slot = slots.get(command.model_id)
        read = context.ranks.agree(lambda: _read(context, slot, command))
    except CommandFailed:
        if is_new:
            slots.free(command.model_id)
        raise
    _apply(slot, read)
    return StateLoaded(
        command_id=command.command_id,
        step=slot.optimizer.step,
        iteration=slot.optimizer.iteration,
        optimizer_restored=read.with_optimizer,
        scheduler_restored=read.scheduler is not None,
        reason=_reason(context, command),
    )


def _reason(context: LoadContext, command: LoadState) -> Literal["not_requested", "no_load_optim"] | None:
    if _loads_no_optimizer(context, command):
        return "no_load_optim"
    return None if command.load_optimizer else "not_requested"


def _loads_no_optimizer(context: LoadContext, command: LoadState) -> bool:
    """Whatever the command asks for."""
    return context.no_load_optim and command.obeys_flags


def _check_adapter(stored: AdapterSpec, live: AdapterSpec) -> None:
    for field in AdapterSpec.__struct_fields__:
        if getattr(stored, field) != getattr(live, field):
            raise CommandFailed(
                ErrorKind.CHECKPOINT_INCOMPATIBLE,
                f"{field} is {getattr(stored, field)} in the checkpoint and {getattr(live, field)} in the model",
            )


def _read(context: LoadContext, slot: Slot, command: LoadState) -> _Read:
    with vault_failures():
        directory = context.vault.version_dir(command.version)
        manifest = read_manifest(directory)
    _check_manifest(context, slot, manifest)
    scheduler = None if manifest.scheduler is None else read_scheduler(manifest.scheduler)
    with_optimizer = command.load_optimizer and not _loads_no_optimizer(context, command)
    if with_optimizer and not manifest.has_optimizer:
        raise CommandFailed(
            ErrorKind.NO_OPTIMIZER_STATE, "the checkpoint holds no optimizer state; load it with optimizer=false"
        )
    stored = stored_parts(manifest.dtype, manifest.has_optimizer)
    needed = _needed_parts(stored, with_optimizer, manifest.dtype, context.dtype)
    reader = _reader(context, slot, stored, needed, manifest.dtype)
    with vault_failures():
        parts = reader.read(
            directory, manifest, context.memory, context.ranks.rank, context.ranks.world, manifest.kind == RECOVERY
        )
    return _Read(manifest, parts, with_optimizer, scheduler)


def _reader(
    context: LoadContext, slot: Slot, stored: tuple[str, ...], needed: tuple[str, ...], dtype: str
) -> SlotReader:
    kind = (slot.spec, stored, needed, dtype)
    if kind not in context.readers:
        if len(context.readers) >= _MOST_READERS:
            context.readers.clear()
        context.readers[kind] = SlotReader(slot.adapter, stored, needed, dtype)
    return context.readers[kind]


def _needed_parts(stored: tuple[str, ...], with_optimizer: bool, saved: str, live: str) -> tuple[str, ...]:
    """A cell whose weights are FP32 takes them from the masters of a BF16 checkpoint, where it holds any."""
    if with_optimizer:
        return stored
    return ("master",) if saved == "bf16" and live == "fp32" and "master" in stored else ("weight",)


def _check_manifest(context: LoadContext, slot: Slot, manifest: Manifest) -> None:
    if manifest.base_digest != context.base_model.digest:
        raise CommandFailed(
            ErrorKind.CHECKPOINT_INCOMPATIBLE,
            f"the checkpoint was made over other base weights: {manifest.base_model} {manifest.base_digest}, "
            f"served is {context.base_model.name} {context.base_model.digest}",
        )
    _check_adapter(manifest.adapter, slot.spec)
    if manifest.non_finite and manifest.kind != RECOVERY:
        raise CommandFailed(ErrorKind.NON_FINITE_STATE, "the checkpoint holds NaN or infinite values")


def _apply(slot: Slot, read: _Read) -> None:
    """Copies into memory that is there already; in FP32 master and weight are the same memory."""
    adapter, optimizer = slot.adapter, slot.optimizer
    if "weight" in read.parts:
        _copy(read.parts["weight"], adapter.flat)
        optimizer.masters_from_weights()
    exact = read.parts.get("master") or (read.parts["weight"] if read.manifest.dtype == "fp32" else [])
    if exact and not (exact is read.parts.get("weight") and optimizer.master is adapter.flat):
        _copy(exact, optimizer.master)
        optimizer.weights_from_masters()
    if read.with_optimizer:
        _copy(read.parts["exp_avg"], optimizer.exp_avg)
        _copy(read.parts["exp_avg_sq"], optimizer.exp_avg_sq)
        optimizer.step = read.manifest.step
    else:
        optimizer.fresh_moments()
    optimizer.iteration = read.manifest.iteration
    optimizer.last_params = read.manifest.adam_params
    if read.scheduler is not None:  # else the model keeps its own, if it has one
        optimizer.scheduler = read.scheduler
    optimizer.clear_gradients()


def _copy(runs: list[Run], flat: torch.Tensor) -> None:
    with torch.no_grad():
        for run in runs:
            run.copy_to(flat)
