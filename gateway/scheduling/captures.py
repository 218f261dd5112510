"""Saves from their capture on: the ranks are free of them, and they are published behind the ranks' back.

Those that clients ask for, and recovery snapshots, which nobody sees: of one model at most one of either is under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_link import CellLink, CellLost, Flight
from gateway.scheduling.dispatch import Dispatcher, Publishing
from gateway.scheduling.durable import durable
from gateway.scheduling.futures import Future
from gateway.scheduling.history import Snapshot
from gateway.scheduling.identity import command_id_of, new_command_id, timestamp
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.publications import Publications
from gateway.scheduling.recovery_snapshots import BORN, COMMAND, SNAPSHOT_NAME, TURN, forget_snapshots
from gateway.scheduling.requests import SaveRequest
from gateway.scheduling.turn_taking import TurnTaking
from gateway.store.journal import Journal
from trainer_cell.protocol.commands import SaveState
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Progress, StateSaved, Success

log = logging.getLogger(__name__)


class Captures:
    """turns: who is told what became of each save."""

    def __init__(
        self,
        link: CellLink,
        catalog: Catalog,
        dispatcher: Dispatcher,
        publications: Publications,
        journal: Journal,
        turns: TurnTaking,
    ) -> None:
        self._link = link
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._publications = publications
        self._journal = journal
        self._turns = turns
        self._tried_alone: set[str] = set()
        self._forgetting: set[asyncio.Task[None]] = set()

    async def save(self, queue: ModelQueue, future: Future) -> Success | CommandFailed | None:
        """None when the save goes on behind the ranks' back, or is to be tried again. Raises `CellLost`."""
        assert isinstance(future.request, SaveRequest)
        try:
            publishing = await self._dispatcher.capture(future, future.request)
        except CommandFailed as failure:
            if not self._may_try_again(future, failure):
                self._tried_alone.discard(future.request_id)
                return await self._dispatcher.settled(future, failure)
            self._publications.note_full()
            # No cell was lost under it.
            future.attempts -= 1
            self._turns.put_back(queue, future)
            return None
        self.note_captured(queue, future)
        self._tried_alone.discard(future.request_id)
        self._begin(queue, self._publish(queue, future, publishing))
        return None

    def note_captured(self, queue: ModelQueue, future: Future) -> None:
        """From now on commands may run that it must not see: its place is on record before theirs are."""
        future.turn = queue.next_turn()
        self._journal.note_turn(future.request_id, future.turn)
        queue.unsettled = future

    async def save_again(self, queue: ModelQueue) -> None:
        """The model's unsettled save, while its slot holds what the save is to hold. Raises `CellLost`."""
        future = queue.unsettled
        assert future is not None
        assert isinstance(future.request, SaveRequest)
        while True:
            try:
                publishing = await self._dispatcher.capture(future, future.request)
                break
            except CommandFailed as failure:
                if not self._may_try_again(future, failure):
                    self._turns.conclude(queue, future, await self._dispatcher.settled(future, failure))
                    return
                if self._publications:
                    await asyncio.wait(self._publications.tasks, return_when=asyncio.FIRST_COMPLETED)
        queue.must_save_again = False
        self._begin(queue, self._publish(queue, future, publishing))

    def _may_try_again(self, future: Future, failure: CommandFailed) -> bool:
        """When it found no memory. With nothing being written any more there is all there ever is: one more try."""
        if failure.kind is not ErrorKind.SAVE_BUFFERS_FULL:
            return False
        # Else the cell would remember this answer, and give it again.
        self._link.acknowledge(command_id_of(future.request_id))
        is_last = not self._publications
        if is_last and future.request_id in self._tried_alone:
            return False
        if is_last:
            self._tried_alone.add(future.request_id)
        return True

    def adopt(self, queue: ModelQueue, future: Future, flight: Flight, epoch: str) -> None:
        """A save that a cell publishes for a gateway that is no more."""
        self._begin(queue, self._publish(queue, future, self._dispatcher.adopted(future, flight, epoch)))

    def see_out(self, flight: Flight, model_id: str | None) -> None:
        """A save that the cell publishes for nobody any more: until it is over it takes the room of another, and no
        later one of its model, if that is known, may be published before it."""
        key = flight.command_id if model_id is None or model_id in self._publications else model_id
        task = asyncio.create_task(self._until_landed(flight, key), name=f"seeing out {flight.command_id}")
        self._publications.begin(key, task)
        task.add_done_callback(self._turns.on_task_done)

    async def _until_landed(self, flight: Flight, key: str) -> None:
        with suppress(CommandFailed, CellLost):
            await flight.outcome()
        self._link.acknowledge(flight.command_id)
        for one in self._publications.end(key):
            self._turns.advance(one)

    async def snapshot(self, queue: ModelQueue) -> bool:
        """Begin a recovery snapshot of a resident model, if the journal can be written; False when one of its saves is
        under way. Raises `CellLost`, or `CommandFailed` when there is no room for it now."""
        model, last = queue.model, queue.history.last_of_weights
        if model.model_id in self._publications or queue.unsettled is not None:
            return False
        if last is None or not self._journal.is_available:
            return True
        # What a snapshot holds must be in the journal first: a gateway that finds it must not do any of it again.
        await durable(self._journal.when_written)
        command = SaveState(
            command_id=new_command_id(),
            model_id=model.model_id,
            name=SNAPSHOT_NAME,
            kind="recovery",
            overwrite=True,
            include_optimizer=True,
            tenant_digest=self._catalog.tenant_digest(model.tenant),
            created=timestamp(datetime.now(UTC)),
            expires=None,
            user_metadata={
                TURN: str(last.turn),
                COMMAND: last.request_id,
                BORN: model.created.isoformat(),
            },
        )
        flight = await self._link.capture(command, _ignore)
        if flight.answer.done():
            await self._captured(queue, flight)
        self._begin(queue, self._publish_snapshot(queue, flight, last.turn))
        return True

    async def _captured(self, queue: ModelQueue, flight: Flight) -> None:
        """Raises `CommandFailed` for a snapshot that failed before it was."""
        try:
            await flight.outcome()
        except CommandFailed:
            queue.history.note_no_snapshot()
            self._link.acknowledge(flight.command_id)
            raise

    def forget(self, model_id: str) -> None:
        """Have the snapshots of a model that is over removed, behind everybody's back."""
        task = asyncio.create_task(self._forget(model_id), name=f"forgetting {model_id}")
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)
        task.add_done_callback(self._turns.on_task_done)

    async def _forget(self, model_id: str) -> None:
        # Until it is on record that the model is over, the next gateway would have to bring it back.
        await durable(self._journal.when_written)
        await forget_snapshots(self._catalog.vault, model_id)

    def _begin(self, queue: ModelQueue, publish: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(publish, name=f"save of {queue.model.model_id}")
        self._publications.begin(queue.model.model_id, task)
        task.add_done_callback(self._turns.on_task_done)

    async def _publish(self, queue: ModelQueue, future: Future, publishing: Publishing) -> None:
        answer: Success | CommandFailed | None = None
        try:
            answer = await publishing.outcome()
        except CommandFailed as failure:
            answer = await self._dispatcher.settled(future, failure)
        except CellLost:
            log.warning("the cell was lost while it published %s: the save is made again", future.request_id)
        held = self._publications.end(queue.model.model_id)
        if answer is None:
            future.state, queue.must_save_again = "queued", True
            self._turns.advance(queue)
        else:
            self._turns.conclude(queue, future, answer)
        for one in held:
            self._turns.advance(one)

    async def _publish_snapshot(self, queue: ModelQueue, flight: Flight, turn: int) -> None:
        try:
            saved = await flight.outcome()
            assert isinstance(saved, StateSaved)
            await self._note_snapshot(queue, saved, turn)
        except CommandFailed as failure:
            log.warning("no snapshot of %s: %s", queue.model.model_id, failure.message)
            queue.history.note_no_snapshot()
        except CellLost:
            log.warning("the cell was lost while it published a snapshot of %s", queue.model.model_id)
        finally:
            self._link.acknowledge(flight.command_id)
            for one in self._publications.end(queue.model.model_id):
                self._turns.advance(one)

    async def _note_snapshot(self, queue: ModelQueue, saved: StateSaved, turn: int) -> None:
        model_id = queue.model.model_id
        lease = await asyncio.to_thread(self._catalog.vault.lease, saved.version)
        if queue.model.is_over:
            if lease is not None:
                lease.release()
            self.forget(model_id)
            return
        if lease is None:
            log.error("the snapshot %s is gone as soon as it was made", saved.version)
            return
        queue.history.cover(Snapshot(saved.version, turn, lease))
        self._journal.note_snapshot(model_id, saved.version, turn, _nobody_waits)
        self._catalog.saves.on_replaced()


def _nobody_waits() -> None:
    """The journal before it is as good until it is."""


def _ignore(_said: Progress) -> None:
    """Nobody polls a snapshot."""
