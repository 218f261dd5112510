"""Save a slot: capture → begin → write → vote → manifest, freeze, point → answer. A failure anywhere changes nothing.

Only the capture needs the ranks to stand still, and is the only step that is a collective. All that follows goes on
behind the ranks' back, each rank in a thread of its own: a rank that fails to write says so in its vote, and the others
never wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer_cell.checkpoint.capture import SaveBuffer
from trainer_cell.checkpoint.manifest_of import Captured
from trainer_cell.checkpoint.plan import PlanCache, SavePlan
from trainer_cell.checkpoint.publication import Publication, PublishContext
from trainer_cell.checkpoint.publisher import Publisher
from trainer_cell.protocol.commands import SaveState
from trainer_cell.protocol.errors import CommandFailed
from trainer_cell.protocol.outcomes import Progress, Said
from trainer_cell.training.slots import Slot
from trainer_cell.vault.layout import RECOVERY


@dataclass(frozen=True)
class SaveContext:
    """What saving needs of its cell, the same for every save."""

    publishing: PublishContext
    plans: PlanCache
    publisher: Publisher
    no_save_optim: bool


def save_slot(context: SaveContext, slot: Slot, command: SaveState, say: Callable[[Said], None]) -> None:
    """Capture the slot, all ranks together, and have it published in the background; rank 0 says the outcome then.

    Once the capture is over rank 0 says that it is writing: from then on the ranks are free. Raises `CommandFailed`
    before that; the slot is not touched either way.
    """
    is_recovery = command.kind == RECOVERY
    include_optimizer = command.include_optimizer and (is_recovery or not context.no_save_optim)
    plan = context.plans.plan(slot.adapter, include_optimizer)
    if command.quota is not None and not is_recovery:
        command.quota.check(plan.num_bytes)  # the same on all ranks
    captured = Captured.of(slot, include_optimizer)
    buffer = _capture(context.publishing, plan, slot)
    say(Progress(command.command_id, "writing", 0, plan.num_bytes))
    context.publisher.start(Publication(context.publishing, command, plan, captured, buffer, say))


def _capture(context: PublishContext, plan: SavePlan, slot: Slot) -> SaveBuffer:
    """Raises `CommandFailed`, on all ranks alike, with no buffer taken."""
    rank, taken = context.ranks.rank, []

    def capture() -> SaveBuffer:
        buffer = context.buffers.take(plan.image_bytes(rank))
        taken.append(buffer)
        buffer.capture(plan, rank, slot)
        return buffer

    try:
        return context.ranks.agree(capture)
    except CommandFailed:
        for buffer in taken:
            context.buffers.give_back(buffer)
        raise


def prepare_save(context: SaveContext, slot: Slot) -> None:
    """Have the memory of the slot's first save at hand, which may be a recovery snapshot: of everything. All ranks
    together."""
    plan = context.plans.plan(slot.adapter, include_optimizer=True)
    context.publishing.buffers.prepare(plan.image_bytes(context.publishing.ranks.rank))
