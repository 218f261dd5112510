"""What the gateway and a cell find in each other when one of them is new: nothing is run twice, nothing is lost.

Either may have died alone. A cell that lived on tells the outcomes that its gateway may not have heard, which saves it
still publishes, and of each slot how far its model had come; what agrees with the journal is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from gateway.scheduling.cell_link import CellLink, CellLost
from gateway.scheduling.execution import Execution
from gateway.scheduling.futures import Future, FutureBook
from gateway.scheduling.identity import command_id_of, new_command_id, request_id_of
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.publications import Publications
from gateway.scheduling.recovery_snapshots import with_snapshots
from gateway.scheduling.requests import SaveRequest
from gateway.scheduling.residency import Residency
from gateway.scheduling.settlement import settle_forgotten
from gateway.scheduling.turn_taking import TurnTaking
from trainer_cell.protocol.commands import ForgetModels
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Failed, Hello, ModelCreated, Outcome, ResidentModel, StateLoaded, StateSaved
from trainer_cell.vault.errors import VaultError
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.publish import sweep_staging

log = logging.getLogger(__name__)


class CellEpoch:
    """One life of the cell after the other.

    hello: of the cell attached now or last. is_settled: one is attached, and both sides agree on what is resident.
    interrupted: the command that ran when the connection ended.
    """

    def __init__(
        self,
        link: CellLink,
        vault: Vault,
        queues: Mapping[str, ModelQueue],
        futures: FutureBook,
        residency: Residency,
        publications: Publications,
        execution: Execution,
        turns: TurnTaking,
    ) -> None:
        self.hello: Hello | None = None
        self.is_settled = False
        self.interrupted: Future | None = None
        # Of the cell that was last taken on to the end; whether any was looked through for what it holds.
        self._taken_on: str | None = None
        self._has_kept = False
        self._link = link
        self._vault = vault
        self._queues = queues
        self._futures = futures
        self._residency = residency
        self._publications = publications
        self._execution = execution
        self._turns = turns

    def lose(self, hello: Hello) -> None:
        """The connection ended. Whether the cell did too shows when one dials again."""
        self.is_settled = False
        # Who waited for something else meanwhile must not go on with the next cell, which is to be taken on first.
        self._link.is_barred = True
        self._residency.clear()
        log.warning("cell epoch %s was lost", hello.epoch)

    async def settle(self, hello: Hello) -> None:
        """Take on a cell that attached: hear what it did meanwhile, keep the slots that agree with the journal, have it
        free the others, and find out what became of every save that was under way.

        Raises `CellLost`, or `CommandFailed` when the cell cannot even forget.
        """
        is_same_life = self._taken_on == hello.epoch
        self.hello = hello
        log.info("cell epoch %s attached: %s, %d ranks", hello.epoch, hello.base_model.name, hello.layout.world)
        while tasks := self._publications.tasks:
            # Of the cell before: they look at the disk, and end.
            await asyncio.wait(tasks)
        outcomes = [await self._settled(outcome) for outcome in hello.outcomes]
        self._check_attached(hello)
        self._link.is_barred = False
        captured = {*hello.publishing, *(said.command_id for said in hello.outcomes if isinstance(said, StateSaved))}
        for outcome in outcomes:
            self._hear(outcome, hello, captured)
        for command_id in hello.publishing:
            future = self._futures.find(request_id_of(command_id))
            if future is not None and (queue := self._queues.get(future.model_id)) is not None:
                self._take_captured(queue, captured)
        kept = [resident for resident in hello.models if self._agrees(resident, hello)]
        if len(kept) < len(hello.models):
            keep = tuple(resident.model_id for resident in kept)
            await self._link.execute_own(ForgetModels(new_command_id(), keep))
            self._check_attached(hello)
        # An outcome that was heard just now may have told of a model whose slot is not kept.
        self._residency.clear()
        for resident in kept:
            self._keep(self._queues[resident.model_id])
        self._has_kept = True
        for command_id in hello.publishing:
            self._adopt(command_id, hello)
        self._acquit(is_same_life)
        await self._settle_saves(hello)
        for flight in self._link.unadopted():
            future = self._futures.find(request_id_of(flight.command_id))
            self._execution.captures.see_out(flight, future.model_id if future is not None else None)
        if not is_same_life:
            await self._sweep()
        self._check_attached(hello)
        self.is_settled, self._taken_on = True, hello.epoch

    def _check_attached(self, hello: Hello) -> None:
        if self._link.hello is not hello:
            raise CellLost("the trainer cell was lost before it was taken on")

    async def _settled(self, outcome: Outcome) -> Outcome:
        """The outcome; of a save whose name is taken by what its own earlier attempt made, that it was made."""
        if isinstance(outcome, Failed) and outcome.kind is ErrorKind.CHECKPOINT_EXISTS:
            future = self._futures.find(request_id_of(outcome.command_id))
            if future is not None and isinstance(future.request, SaveRequest) and not future.is_done:
                return await self._execution.dispatcher.made_before(future) or outcome
        return outcome

    def _take_captured(self, queue: ModelQueue, captured: set[str]) -> None:
        """The next of the model may be a save that the cell has captured for a gateway that could not put that on
        record: then it has its place before all that the cell did for the model since."""
        head = queue.ready[0] if queue.ready else None
        if head is not None and queue.unsettled is None and command_id_of(head.request_id) in captured:
            queue.take(head)
            self._execution.captures.note_captured(queue, head)

    def _hear(self, outcome: Outcome, hello: Hello, captured: set[str]) -> None:
        """An outcome that nobody acknowledged: of a command that a gateway before sent, or of one of nobody's."""
        future = self._futures.find(request_id_of(outcome.command_id))
        queue = self._queues.get(future.model_id) if future is not None else None
        if queue is not None:
            self._take_captured(queue, captured)
        if future is None or queue is None or not queue.is_expected(future):
            if future is None or future.is_done or future.turn is None:
                # Nobody's, or of a command that comes again behind one whose own outcome is not known: its slot does
                # not agree and is freed, so that the cell must run it and not remember what came of it.
                self._link.acknowledge(outcome.command_id)
            # Else it was heard, and is acknowledged when it is in the journal.
            return
        if isinstance(outcome, Failed) and outcome.kind is ErrorKind.SAVE_BUFFERS_FULL:
            self._link.acknowledge(outcome.command_id)  # that was then
            return
        queue.take(future)
        answer = outcome.as_error() if isinstance(outcome, Failed) else outcome
        if isinstance(answer, ModelCreated | StateLoaded):
            adapter = next((one.adapter for one in hello.models if one.model_id == future.model_id), None)
            if adapter is not None:
                self._execution.dispatcher.note_made(queue, hello, adapter)
        if isinstance(answer, StateLoaded) and future.version is not None:
            future.lease = self._vault.lease(future.version)
        self._turns.conclude(queue, future, answer)
        self._turns.advance(queue)

    def _agrees(self, resident: ResidentModel, hello: Hello) -> bool:
        queue = self._queues.get(resident.model_id)
        if queue is None or queue.model.is_over or queue.model.adapter != resident.adapter:
            return False
        save = queue.unsettled
        is_saved = save is None or command_id_of(save.request_id) in hello.publishing
        return is_saved and resident.turn == queue.history.last_turn

    def _acquit(self, is_same_life: bool) -> None:
        """What ran when the connection alone was lost has ended no cell: neither the command, nor, where its model was
        still being brought back, that."""
        interrupted, self.interrupted = self.interrupted, None
        if not is_same_life or interrupted is None:
            return
        queue = self._queues[interrupted.model_id]
        if queue.losses:
            queue.losses -= 1
        elif interrupted.turn is None and interrupted.attempts:
            interrupted.attempts -= 1

    def _keep(self, queue: ModelQueue) -> None:
        self._residency.touch(queue.model.model_id)
        if not self._has_kept and queue.ready and queue.ready[0].attempts:
            # The gateway was lost while it ran, and not the cell.
            queue.ready[0].attempts -= 1

    def _adopt(self, command_id: str, hello: Hello) -> None:
        """A save that the cell is publishing holds the state at its place, whatever became of the slot since."""
        save = self._futures.find(request_id_of(command_id))
        queue = self._queues.get(save.model_id) if save is not None else None
        if save is None or queue is None or queue.unsettled is not save:
            return
        queue.must_save_again, save.state = False, "writing"
        self._execution.captures.adopt(queue, save, self._link.adopt(command_id), hello.epoch)

    async def _settle_saves(self, hello: Hello) -> None:
        """Those that no cell knows of: told from the disk, or to be made again when their model is brought back."""
        for queue in tuple(self._queues.values()):
            save = queue.unsettled
            if save is None or queue.model.model_id in self._publications:
                continue
            saved = await settle_forgotten(self._vault, save, hello.epoch)
            # One that has dialled again meanwhile may be publishing it, and tells.
            self._check_attached(hello)
            if saved is not None:
                self._turns.conclude(queue, save, saved)
            else:
                queue.must_save_again = True
            self._turns.advance(queue)

    async def _sweep(self) -> None:
        try:
            removed = await asyncio.to_thread(sweep_staging, self._vault)
        except VaultError as error:
            log.warning("staging could not be swept: %s", error)
        else:
            if removed:
                log.info("swept what dead cells had staged: %d entries", len(removed))
        over = [queue.model.model_id for queue in self._queues.values() if queue.model.is_over]
        for model_id in await asyncio.to_thread(with_snapshots, self._vault, over):
            self._execution.captures.forget(model_id)
