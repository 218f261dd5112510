"""Receive, broadcast, execute, answer: one command at a time on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from trainer_cell import watchdog
from trainer_cell.checkpoint.load import LoadContext, load_slot
from trainer_cell.checkpoint.save import SaveContext, prepare_save, save_slot
from trainer_cell.gateway_link import GatewayLink
from trainer_cell.protocol.commands import (
    Acknowledge,
    Command,
    CreateModel,
    DiscardGradients,
    ForgetModels,
    ForwardBackward,
    FreeModel,
    LoadState,
    ModelCommand,
    OptimStep,
    SaveState,
    Stop,
    Tick,
    decode_command,
    encode_command,
)
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import (
    Failed,
    GradientsDiscarded,
    ModelCreated,
    ModelFreed,
    ModelsForgotten,
    ResidentModel,
    Said,
    Success,
)
from trainer_cell.ranks import COLLECTIVE_TIMEOUT, Ranks
from trainer_cell.training import step
from trainer_cell.training.build import Base
from trainer_cell.training.slots import SlotTable

log = logging.getLogger(__name__)

SlotCommand = CreateModel | LoadState | ForwardBackward | OptimStep | DiscardGradients

_TICK = encode_command(Tick())
_STOP = encode_command(Stop())


@dataclass(frozen=True)
class Cell:
    """Everything a command may need; the same on every rank but for `ranks.rank`."""

    ranks: Ranks
    base: Base
    slots: SlotTable
    saving: SaveContext
    loading: LoadContext

    def resident(self) -> tuple[ResidentModel, ...]:
        return tuple(
            ResidentModel(slot.model_id, slot.spec, slot.optimizer.step, slot.optimizer.iteration, slot.turn)
            for slot in self.slots.resident()
        )


def serve(cell: Cell, link: GatewayLink | None) -> None:
    """Obey until told to stop. `link` is rank 0's; the other ranks pass None and follow its broadcasts."""
    while True:
        frame = _next_frame(link) if link is not None else cell.ranks.broadcast(None)
        command = decode_command(frame)
        cell.saving.publisher.give_up_overdue()
        with watchdog.deadline(_deadline_s(command)):
            if link is not None:
                # The other ranks wait for this as long as it takes; a rank that does not take it must not stop rank 0.
                cell.ranks.broadcast(frame)
            outcome = _answer(cell, command, link.say if link is not None else _say_nothing)
        if link is not None and outcome is not None:
            link.say(outcome)
        if isinstance(command, Stop):
            cell.saving.publisher.drain()
            return


def _deadline_s(command: Command) -> float:
    return command.deadline_s if isinstance(command, ModelCommand) else COLLECTIVE_TIMEOUT.total_seconds()


def _next_frame(link: GatewayLink) -> bytes:
    frame = link.next_frame()
    if frame is None:
        return _STOP if link.is_stopping else _TICK
    return frame


def _say_nothing(_said: Said) -> None:
    """Only rank 0 has somebody to tell."""


def _answer(cell: Cell, command: Command, say: Callable[[Said], None]) -> Success | Failed | None:
    if isinstance(command, Acknowledge | Tick | Stop):
        return None
    try:
        return execute(cell, command, say)
    except CommandFailed as failure:
        log.warning("%s of %s failed: %r", type(command).__name__, getattr(command, "model_id", "the cell"), failure)
        return Failed(command.command_id, failure.kind, failure.message)


def execute(cell: Cell, command: ModelCommand | ForgetModels, say: Callable[[Said], None]) -> Success | None:
    """Run one command on this rank. All ranks call it together; raises the same `CommandFailed` on each of them.
    None for a save: its outcome is said when it is published, which the ranks do not wait for."""
    match command:
        case CreateModel() | LoadState() | ForwardBackward() | OptimStep() | DiscardGradients():
            outcome = _change(cell, command)
            if not (isinstance(command, ForwardBackward) and command.forward_only):
                cell.slots.get(command.model_id).turn = command.turn
            return outcome
        case FreeModel():
            return ModelFreed(command.command_id, cell.slots.free(command.model_id))
        case SaveState():
            save_slot(cell.saving, cell.slots.get(command.model_id), command, say)
            return None
        case ForgetModels():
            return ModelsForgotten(command.command_id, _forget(cell.slots, frozenset(command.keep)))


def _change(cell: Cell, command: SlotCommand) -> Success:
    """One that changes a slot, or computes over it."""
    match command:
        case ForwardBackward():
            return step.forward_backward(cell.base, cell.slots.get(command.model_id), cell.ranks, command)
        case OptimStep():
            return step.optim_step(cell.slots.get(command.model_id), cell.ranks, command)
        case DiscardGradients():
            cell.slots.get(command.model_id).optimizer.clear_gradients()
            return GradientsDiscarded(command.command_id)
        case CreateModel():
            return _create(cell, command)
        case LoadState():
            loaded = load_slot(cell.loading, cell.slots, command)
            prepare_save(cell.saving, cell.slots.get(command.model_id))
            return loaded


def _create(cell: Cell, command: CreateModel) -> ModelCreated:
    if cell.slots.is_resident(command.model_id):
        raise CommandFailed(ErrorKind.MODEL_EXISTS, f"model {command.model_id} is resident already")
    try:
        slot = cell.ranks.agree(
            lambda: cell.slots.create(command.model_id, command.adapter, command.seed, command.lr_schedule)
        )
    except CommandFailed:
        cell.slots.free(command.model_id)  # on the ranks where it went well
        raise
    prepare_save(cell.saving, slot)
    return ModelCreated(command.command_id, slot.num_parameters)


def _forget(slots: SlotTable, keep: frozenset[str]) -> int:
    foreign = [slot.model_id for slot in slots.resident() if slot.model_id not in keep]
    for model_id in foreign:
        slots.free(model_id)
    return len(foreign)
