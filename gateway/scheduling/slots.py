"""Who holds the cell's slots. A slot is a cache of a model: losing it costs time, and nothing else.

Bringing a model back is its last snapshot, or its creation, and then everything it did since, in order. What the
journal says was answered is answered nobody twice; a save whose version never came to be is made at its very place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from gateway.scheduling.admission import deadline_s
from gateway.scheduling.cell_link import CellLink
from gateway.scheduling.history import Change
from gateway.scheduling.identity import new_command_id
from gateway.scheduling.journal_rows import data_of
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.requests import ForwardBackwardRequest, OptimStepRequest
from gateway.scheduling.residency import Residency
from gateway.store.journal import Journal, JournalUnavailable
from trainer_cell.protocol.commands import (
    CreateModel,
    DiscardGradients,
    ForwardBackward,
    FreeModel,
    LoadState,
    ModelCommand,
    OptimStep,
)
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Hello, OptimStepDone

log = logging.getLogger(__name__)

# A journal that cannot be read just now is asked again, so often.
_READ_AGAIN_S = 0.5


class Slots:
    """park_state: begins a snapshot of a model that is about to lose its slot, if one is needed and can be had now.
    save_again: captures the model's unsettled save now.
    """

    def __init__(
        self,
        link: CellLink,
        journal: Journal,
        queues: Mapping[str, ModelQueue],
        residency: Residency,
        park_state: Callable[[ModelQueue], Awaitable[object]],
        save_again: Callable[[ModelQueue], Awaitable[None]],
    ) -> None:
        self._link = link
        self._journal = journal
        self._queues = queues
        self._residency = residency
        self._park_state = park_state
        self._save_again = save_again
        self._parked: set[str] = set()

    async def make_room(self, hello: Hello, model_id: str) -> None:
        """Have a slot free for `model_id`, or held by it. Raises `CellLost`; `CommandFailed` is a bug of the cell."""
        while model_id not in self._residency and len(self._residency) >= hello.slots:
            victim = self._residency.first(lambda other: other != model_id)
            assert victim is not None, "one command runs at a time, so the others can all give way"
            await self.park(self._queues[victim])

    async def park(self, queue: ModelQueue) -> None:
        """Free the model's slot; its state is on disk, or can be had again from there and the journal."""
        model_id = queue.model.model_id
        await self._park_state(queue)
        await self._link.execute_own(FreeModel(new_command_id(), model_id))
        self._residency.leave(model_id)
        self._parked.add(model_id)
        log.debug("model %s is parked", model_id)

    async def bring_back(self, queue: ModelQueue, hello: Hello) -> None:
        """Have the model in a slot, with everything it has done. Raises `CellLost`, or `CommandFailed` (MODEL_LOST)
        when what was done once cannot be done again; the slot is free then."""
        model_id = queue.model.model_id
        await self.make_room(hello, model_id)
        try:
            await self._do_again(queue)
        except CommandFailed as failure:
            await self._link.execute_own(FreeModel(new_command_id(), model_id))
            raise CommandFailed(
                ErrorKind.MODEL_LOST,
                f"the state of model {model_id} could not be brought back into the trainer cell: {failure.message}; "
                "load one of its checkpoints that is whole, or its last snapshot if that is, to go on",
            ) from failure
        self._residency.touch(model_id)
        queue.losses = 0

    async def _do_again(self, queue: ModelQueue) -> None:
        model, history = queue.model, queue.history
        if history.is_broken:
            raise CommandFailed(ErrorKind.STORAGE_FAILED, "the journal of what it did has changed on the disk")
        # Of those that take turns in slots there would be no end.
        level = logging.DEBUG if model.model_id in self._parked else logging.INFO
        log.log(level, "bringing back %s: %d commands after its last snapshot", model.model_id, len(history.changes))
        self._parked.discard(model.model_id)
        if (snapshot := history.snapshot) is not None:
            assert model.adapter is not None
            await self._link.execute_own(
                LoadState(
                    new_command_id(),
                    model.model_id,
                    snapshot.version,
                    model.adapter,
                    load_optimizer=True,
                    obeys_flags=False,
                    turn=snapshot.turn,
                )
            )
        for change in tuple(history.changes):
            await self._save_before(queue, change.turn)
            command = await self._command_of(queue, change)
            done = await self._link.execute_own(command)
            if isinstance(done, OptimStepDone) and change.iteration not in (None, done.iteration):
                raise CommandFailed(
                    ErrorKind.RANK_FAILED,
                    f"iteration {change.iteration} became {done.iteration} when it was done again",
                )
        await self._save_before(queue, queue.turn + 1)

    async def _save_before(self, queue: ModelQueue, turn: int) -> None:
        save = queue.unsettled
        if queue.must_save_again and save is not None and save.turn is not None and save.turn < turn:
            await self._save_again(queue)

    async def _command_of(self, queue: ModelQueue, change: Change) -> ModelCommand:
        model, command_id, turn = queue.model, new_command_id(), change.turn
        model_id = model.model_id
        assert model.adapter is not None
        match change.what:
            case "create":
                assert model.seed is not None
                return CreateModel(command_id, model_id, model.adapter, model.seed, model.lr_schedule, turn=turn)
            case "load":
                return LoadState(
                    command_id,
                    model_id,
                    change.version,
                    model.adapter,
                    change.with_optimizer,
                    obeys_flags=False,
                    turn=turn,
                )
            case "forward_backward":
                return await self._forward_backward(model_id, change)
            case "optim_step":
                assert isinstance(change.request, OptimStepRequest)
                return OptimStep(command_id, model_id, change.request.adam, change.request.scheduled, turn=turn)
            case "discard":
                return DiscardGradients(command_id, model_id, turn=turn)

    async def _payload(self, request_id: str) -> bytes | None:
        while True:
            try:
                return (await self._journal.payloads([request_id])).get(request_id)
            except JournalUnavailable as error:
                log.error("a model waits to be brought back: %s", error)
                await asyncio.sleep(_READ_AGAIN_S)

    async def _forward_backward(self, model_id: str, change: Change) -> ForwardBackward:
        payload = await self._payload(change.request_id)
        request = change.request
        assert isinstance(request, ForwardBackwardRequest)
        if payload is None:
            raise CommandFailed(ErrorKind.STORAGE_FAILED, f"the journal has lost the data of {change.request_id}")
        return ForwardBackward(
            new_command_id(),
            model_id,
            data_of(payload),
            request.loss,
            request.loss_config,
            forward_only=False,
            turn=change.turn,
            deadline_s=deadline_s("forward_backward", change.payload_bytes),
        )
