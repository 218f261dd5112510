"""One command on the cell, with all it takes: the model in a slot, attempts on record, a snapshot when one is due."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from gateway.scheduling.captures import Captures
from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_link import CellLink, CellLost
from gateway.scheduling.dispatch import Dispatcher
from gateway.scheduling.durable import durable
from gateway.scheduling.futures import Future
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.publications import Publications
from gateway.scheduling.requests import (
    CreateFromCheckpointRequest,
    CreateRequest,
    LoadRequest,
    SaveRequest,
    UnloadRequest,
)
from gateway.scheduling.residency import Residency
from gateway.scheduling.slots import Slots
from gateway.scheduling.snapshot_rules import SnapshotRules
from gateway.scheduling.turn_taking import TurnTaking
from gateway.store.journal import Journal
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Hello, Success

log = logging.getLogger(__name__)

MOST_LOSSES = 5


class Execution:
    """turns: who is told what became of it."""

    def __init__(
        self,
        link: CellLink,
        catalog: Catalog,
        journal: Journal,
        queues: Mapping[str, ModelQueue],
        residency: Residency,
        publications: Publications,
        rules: SnapshotRules,
        turns: TurnTaking,
    ) -> None:
        self._link = link
        self._journal = journal
        self._queues = queues
        self._residency = residency
        self._publications = publications
        self._rules = rules
        self._turns = turns
        self.dispatcher = Dispatcher(link, catalog, journal, residency, self._make_room)
        self.captures = Captures(link, catalog, self.dispatcher, publications, journal, turns)
        self._slots = Slots(link, journal, queues, residency, self.snapshot, self.captures.save_again)

    async def answer(self, queue: ModelQueue, future: Future) -> Success | CommandFailed | None:
        """None when it goes on behind the ranks' back, or was put back. Raises `CellLost`."""
        hello = self._link.hello
        if hello is None:
            raise CellLost("the trainer cell was lost before the command was sent")
        is_first = isinstance(future.request, CreateRequest | CreateFromCheckpointRequest | UnloadRequest)
        # A load gives the model another state: it need not have the one that was lost.
        is_rescue = queue.model.state == "lost" and isinstance(future.request, LoadRequest)
        if not (is_first or is_rescue) and queue.model.model_id not in self._residency:
            if (failure := await self._bring_back(queue, hello)) is not None:
                return failure
        await self._note_attempt(future)
        if self._link.hello is not hello:
            future.attempts -= 1
            raise CellLost("the trainer cell was lost before the command was sent")
        try:
            if isinstance(future.request, SaveRequest):
                if future.attempts > 1 and (saved := await self.dispatcher.made_before(future)) is not None:
                    return saved
                return await self.captures.save(queue, future)
            outcome = await self.dispatcher.run(queue, future, hello)
            if is_rescue:
                queue.history.start_anew()
            return outcome
        except CommandFailed as failure:
            return failure

    async def save_again(self, queue: ModelQueue) -> None:
        """Bring the model back, for the save that is made again on the way. Raises `CellLost`."""
        hello = self._link.hello
        if hello is None:
            raise CellLost("the trainer cell was lost before the model was brought back")
        if (failure := await self._bring_back(queue, hello)) is not None and queue.unsettled is not None:
            self._turns.conclude(queue, queue.unsettled, failure)

    async def _bring_back(self, queue: ModelQueue, hello: Hello) -> CommandFailed | None:
        model = queue.model
        queue.losses += 1
        try:
            if queue.losses > MOST_LOSSES:
                raise CommandFailed(
                    ErrorKind.MODEL_LOST,
                    f"the trainer cell was lost {MOST_LOSSES} times while it brought back model {model.model_id}; "
                    "load its last snapshot or one of its checkpoints to go on",
                )
            await self._slots.bring_back(queue, hello)
        except CommandFailed as failure:
            log.error("%s", failure.message)
            model.state, model.trouble = "lost", failure
            return failure
        return None

    async def _note_attempt(self, future: Future) -> None:
        future.attempts += 1
        note = partial(self._journal.note_attempt, future.request_id, future.attempts)
        if future.attempts == 1:
            note(_nobody_waits)
        else:
            # It may be what ends cells, and this process with them: that it is tried once more must be on record.
            await durable(note)

    async def snapshot_if_due(self, queue: ModelQueue) -> None:
        if not self._rules.is_due(queue.history, time.monotonic()) or queue.model.model_id not in self._residency:
            return
        with suppress(CellLost):
            await self.snapshot(queue)

    async def snapshot(self, queue: ModelQueue) -> bool:
        """Begin a snapshot if one is needed; without room for it now the journal alone has to do. False where there may
        be once a save that is being written is. Raises `CellLost`."""
        if not queue.history.is_dirty:
            return True
        try:
            return await self.captures.snapshot(queue)
        except CommandFailed as failure:
            log.info("no snapshot of %s now: %s", queue.model.model_id, failure.message)
            return failure.kind is not ErrorKind.SAVE_BUFFERS_FULL

    async def snapshot_all(self) -> None:
        """Of every resident model that has come further than its last one, those last of which a save is being written.
        Raises `CellLost`."""
        waiting = self._residency.all()
        while waiting:
            waiting = [model_id for model_id in waiting if not await self.snapshot(self._queues[model_id])]
            if not self._publications:
                return
            await asyncio.wait(self._publications.tasks, return_when=asyncio.FIRST_COMPLETED)

    async def park(self, queue: ModelQueue) -> None:
        """Free the model's slot, if it has one. Raises `CellLost`."""
        if queue.model.model_id in self._residency:
            await self._slots.park(queue)

    async def _make_room(self, hello: Hello, model_id: str) -> None:
        await self._slots.make_room(hello, model_id)


def _nobody_waits() -> None:
    """The first attempt: a crash right now would have it tried once more than it should, and no harm done."""
