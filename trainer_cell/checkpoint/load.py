"""Load a version into a slot: read and verify aside on every rank, agree, then apply. Before the last step nothing
has changed; in it nothing can fail."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from trainer_cell.checkpoint.failures import vault_failures
from trainer_cell.checkpoint.plan import part_dtype, stored_parts
from trainer_cell.protocol.commands import AdapterSpec, LoadState
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import BaseModel, StateLoaded
from trainer_cell.ranks import Ranks
from trainer_cell.training.lr_schedule import LrScheduler, read_scheduler
from trainer_cell.training.slots import Slot, SlotTable
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.manifest import ITEM_BYTES, Manifest, read_manifest
from trainer_cell.vault.verify import Wanted, read_tensors

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class LoadContext:
    """What loading needs of its cell, the same for every load."""

    ranks: Ranks
    vault: Vault
    base_model: BaseModel
    dtype: str
    no_load_optim: bool


@dataclass(frozen=True)
class _Read:
    """A checkpoint as read, aside from any slot: part → tensor name → tensor of this rank's local shape."""

    manifest: Manifest
    tensors: dict[str, dict[str, torch.Tensor]]
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
    if context.no_load_optim:
        return "no_load_optim"
    return None if command.load_optimizer else "not_requested"


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
    with_optimizer = command.load_optimizer and not context.no_load_optim
    if with_optimizer and not manifest.has_optimizer:
        raise CommandFailed(
            ErrorKind.NO_OPTIMIZER_STATE, "the checkpoint holds no optimizer state; load it with optimizer=false"
        )
    stored = stored_parts(manifest.dtype, manifest.has_optimizer)
    needed = _needed_parts(stored, with_optimizer, manifest.dtype, context.dtype)
    wanted = {
        f"{name}/{part}": Wanted(
            sharding.axis,
            sharding.offset,
            sharding.local_shape,
            sharding.global_shape,
            part_dtype(part, manifest.dtype),
        )
        for part in needed
        for name, sharding in slot.adapter.table.items()
    }
    # What other ranks read, they check; here it must only be known, so that a tensor no rank asks for is found.
    left = {f"{name}/{part}" for part in stored for name in slot.adapter.whole} - wanted.keys()
    with vault_failures():
        buffers = read_tensors(directory, manifest, wanted, left)
    tensors: dict[str, dict[str, torch.Tensor]] = {part: {} for part in needed}
    for part in needed:
        for name, sharding in slot.adapter.table.items():
            dtype = part_dtype(part, manifest.dtype)
            tensors[part][name] = _as_tensor(f"{name}/{part}", buffers, dtype, sharding.local_shape)
    return _Read(manifest, tensors, with_optimizer, scheduler)


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
    if manifest.non_finite:
        raise CommandFailed(ErrorKind.NON_FINITE_STATE, "the checkpoint holds NaN or infinite values")


def _as_tensor(key: str, buffers: dict[str, bytearray], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    buffer = buffers[key]
    if len(buffer) != prod(shape) * ITEM_BYTES[dtype]:
        raise CommandFailed(
            ErrorKind.CHECKPOINT_CORRUPT, f"tensor {key} holds {len(buffer)} bytes, not those of {dtype} {shape}"
        )
    if not buffer:
        return torch.empty(shape, dtype=_TORCH_DTYPES[dtype])
    tensor = torch.frombuffer(buffer, dtype=_TORCH_DTYPES[dtype]).view(shape)
    if not bool(torch.isfinite(tensor).all()):
        raise CommandFailed(ErrorKind.NON_FINITE_STATE, f"tensor {key} of the checkpoint holds NaN or infinite values")
    return tensor


def _apply(slot: Slot, read: _Read) -> None:
    """Copies into memory that is there already; in FP32 master and weight are the same memory."""
    live, optimizer = slot.state(), slot.optimizer
    if "weight" in read.tensors:
        _copy(read.tensors["weight"], live.weight)
        optimizer.masters_from_weights()
    exact = read.tensors.get("master") or (read.tensors["weight"] if read.manifest.dtype == "fp32" else {})
    if exact:
        _copy(exact, live.master)
        optimizer.weights_from_masters()
    if read.with_optimizer:
        _copy(read.tensors["exp_avg"], live.exp_avg)
        _copy(read.tensors["exp_avg_sq"], live.exp_avg_sq)
        optimizer.step = read.manifest.step
    else:
        optimizer.fresh_moments()
    optimizer.iteration = read.manifest.iteration
    optimizer.last_params = read.manifest.adam_params
    if read.scheduler is not None:  # else the model keeps its own, if it has one
        optimizer.scheduler = read.scheduler
    optimizer.clear_gradients()


def _copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in source.items():
            target[name].copy_(tensor)
