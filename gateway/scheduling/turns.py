"""Who runs when: takes the heads of all models' queues, one at a time and fairly, to the cell and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from gateway.scheduling.admission import answer_without_cell, estimated_cost, other_base, poison
from gateway.scheduling.backlog import Backlog
from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_epoch import CellEpoch
from gateway.scheduling.cell_link import CellLink, CellLost
from gateway.scheduling.durable import durable
from gateway.scheduling.effects import note_change, note_facts
from gateway.scheduling.execution import Execution
from gateway.scheduling.fairness import FairShare
from gateway.scheduling.futures import Future, FutureBook
from gateway.scheduling.identity import command_id_of
from gateway.scheduling.journal_rows import model_record, packed_outcome
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.publications import Publications
from gateway.scheduling.residency import Residency
from gateway.scheduling.snapshot_rules import SnapshotRules
from gateway.scheduling.steady_clock import steady_time
from gateway.store.journal import Journal
from trainer_cell.protocol.errors import CommandFailed
from trainer_cell.protocol.outcomes import Hello, Success

log = logging.getLogger(__name__)

# A command that a cell was lost under so often is taken to be what ended it.
MOST_ATTEMPTS = 3
# A journal whose disk is full holds up no stop for longer; what it lacks is done again.
_LAST_WRITES_S = 5.0


class Turns:
    """Runs what the queues hold. One task waits for the cell; everything else happens at once, in the caller's call.

    queues: by model id, filled by the scheduler.
    """

    def __init__(
        self,
        link: CellLink,
        catalog: Catalog,
        journal: Journal,
        queues: Mapping[str, ModelQueue],
        futures: FutureBook,
        backlog: Backlog,
        rules: SnapshotRules,
        on_crash: Callable[[], None],
    ) -> None:
        self.is_stopping = False
        self._link = link
        self._journal = journal
        self._queues = queues
        self._futures = futures
        self._backlog = backlog
        self._on_crash = on_crash
        self._fair = FairShare()
        self._residency = Residency()
        self._publications = Publications(queues)
        self._execution = Execution(link, catalog, journal, queues, self._residency, self._publications, rules, self)
        self._epoch = CellEpoch(
            link,
            catalog.vault,
            queues,
            futures,
            self._residency,
            self._publications,
            self._execution,
            self,
        )
        self._to_park: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def hello(self) -> Hello | None:
        return self._epoch.hello

    @property
    def is_ready(self) -> bool:
        return self._epoch.is_settled and not self.is_stopping

    async def start(self) -> None:
        self._link.on_attached = lambda hello: self._wake.set()
        self._link.on_lost = self._on_lost
        await self._link.start()
        self._task = asyncio.create_task(self._run(), name="turns")
        self._task.add_done_callback(self.on_task_done)

    async def stop(self, grace_s: float) -> None:
        """What runs is finished, what is captured published, and the models that have come far since their last
        snapshot are given another, as far as `grace_s` allows."""
        self.is_stopping = True
        self._futures.release_waiters()
        self._wake.set()
        if self._task is not None:
            await self._come_to_an_end(grace_s)
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._link.close()
        for publishing in self._publications.tasks:
            # The next process finds on the disk what became of it.
            publishing.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WRITES_S):
                await durable(self._journal.when_written)

    async def _come_to_an_end(self, grace_s: float) -> None:
        assert self._task is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        await asyncio.wait({self._task}, timeout=grace_s)
        if self._task.done() and self._epoch.is_settled:
            with suppress(CellLost, TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._execution.snapshot_all()
        if publishing := self._publications.tasks:
            await asyncio.wait(publishing, timeout=max(0.0, deadline - loop.time()))

    def park(self, model_id: str) -> None:
        """Have the model's slot freed when nothing of it waits: its client is gone for now."""
        if model_id in self._residency:
            self._to_park[model_id] = None
            self._wake.set()

    def advance(self, queue: ModelQueue) -> None:
        """Answer what needs no cell at the head of the queue; offer the next command for a turn."""
        if queue.must_save_again and queue.unsettled is not None and queue.running is None:
            self._offer(queue, queue.unsettled)
            return
        while queue.running is None and queue.ready:
            head = queue.ready[0]
            answer = answer_without_cell(queue.model, head.request, self._is_away(queue))
            if answer is None and head.attempts >= MOST_ATTEMPTS and self._epoch.is_settled:
                # Before that a cell that lives may tell what came of it.
                answer = poison(head.attempts)
            if answer is None:
                self._offer(queue, head)
                return
            queue.ready.popleft()
            self.conclude(queue, head, answer)
        self._fair.withdraw(queue.model.tenant, queue.model.model_id)

    def _is_away(self, queue: ModelQueue) -> bool:
        """Whether no cell holds anything of the model, and none need: a save of it may still have to be made."""
        model_id, is_saved = queue.model.model_id, queue.unsettled is None
        return is_saved and model_id not in self._residency and model_id not in self._publications

    def _offer(self, queue: ModelQueue, head: Future) -> None:
        model = queue.model
        if self._is_held(queue, head):
            self._fair.withdraw(model.tenant, model.model_id)
            return
        self._fair.offer(model.tenant, model.model_id, estimated_cost(head.request), self._stays(queue))
        self._wake.set()

    def _is_held(self, queue: ModelQueue, head: Future) -> bool:
        """Whether the head of the queue must wait; asked again when its turn comes."""
        reason = self._publications.reason_to_wait(queue, head.request, queue.model.model_id in self._residency)
        head.waiting_for = reason or other_base(queue.model, self._link.hello)
        return head.waiting_for is not None

    def _stays(self, queue: ModelQueue) -> bool:
        """Whether the model had better go on before it loses its slot: its gradient is lost with it."""
        hello = self._link.hello
        is_full = hello is not None and len(self._residency) >= hello.slots
        return is_full and queue.history.has_gradient

    async def _run(self) -> None:
        while not self.is_stopping:
            await self._wake.wait()
            self._wake.clear()
            hello = self._link.hello
            if hello is None or not (self._epoch.is_settled or await self._settle(hello)):
                continue
            while self.is_ready and (model_id := self._fair.pick()) is not None:
                queue = self._queues[model_id]
                head = queue.unsettled if queue.must_save_again else (queue.ready[0] if queue.ready else None)
                if head is not None and not self._is_held(queue, head):
                    await self._take_turn(queue)
            await self._park_the_idle()

    async def _settle(self, hello: Hello) -> bool:
        try:
            await self._epoch.settle(hello)
        except CellLost:
            return False
        except CommandFailed as failure:
            log.error("the cell cannot be taken on: %r", failure)
            self._link.hang_up()
            return False
        for queue in tuple(self._queues.values()):
            queue.revive()
            self.advance(queue)
        return self._epoch.is_settled

    async def _take_turn(self, queue: ModelQueue) -> None:
        if queue.must_save_again:
            try:
                await self._execution.save_again(queue)
            except CellLost:
                self._epoch.interrupted = queue.unsettled
            self.advance(queue)
            return
        future = queue.running = queue.ready.popleft()
        future.state = "running"
        try:
            answer = await self._execution.answer(queue, future)
        except CellLost:
            self._epoch.interrupted = future
            self.put_back(queue, future)
            return
        if queue.running is future:
            queue.running = None
            if answer is not None:
                self.conclude(queue, future, answer)
        self.advance(queue)
        await self._execution.snapshot_if_due(queue)

    async def _park_the_idle(self) -> None:
        while self._to_park and self.is_ready:
            model_id = next(iter(self._to_park))
            del self._to_park[model_id]
            queue = self._queues[model_id]
            if queue.is_idle:
                with suppress(CellLost):
                    await self._execution.park(queue)

    def put_back(self, queue: ModelQueue, future: Future) -> None:
        """To be tried again, before all others of its model."""
        queue.running, future.state = None, "queued"
        queue.ready.appendleft(future)
        self.advance(queue)

    def conclude(self, queue: ModelQueue, future: Future, answer: Success | CommandFailed) -> None:
        """It is over. Whoever asked is told when that is in the journal."""
        model = queue.model
        if future.turn is None:
            future.turn = queue.next_turn()
        is_settled_now = future is queue.unsettled
        if is_settled_now:
            queue.unsettled, queue.must_save_again = None, False
        note_facts(queue, future, answer)
        note_change(queue, future, answer)
        if model.is_over:
            queue.release_early()
            self._end(queue)
        model.pending -= 1
        queue.num_unwritten += 1
        self._backlog.leave(model.tenant, future.payload_bytes)
        self._journal.complete(
            future.request_id,
            future.turn,
            packed_outcome(future, answer),
            steady_time(),
            future.version,
            model_record(queue),
            partial(self._on_durable, queue, future, answer),
        )
        if model.is_over:
            self._journal.drop_model(model.model_id)
        if is_settled_now:
            for one in self._publications.release():
                self.advance(one)

    def _end(self, queue: ModelQueue) -> None:
        """The model is over: nothing of it need be brought back."""
        if queue.history.snapshot is not None:
            self._execution.captures.forget(queue.model.model_id)
        queue.history.end()
        self._residency.leave(queue.model.model_id)

    def _on_durable(self, queue: ModelQueue, future: Future, answer: Success | CommandFailed) -> None:
        queue.num_unwritten -= 1
        self._futures.finish(future, answer)
        self._link.acknowledge(command_id_of(future.request_id))
        if not (queue.num_unwritten or self.is_stopping):
            self.advance(queue)

    def _on_lost(self, hello: Hello) -> None:
        self._epoch.lose(hello)
        if not self.is_stopping:
            for queue in self._queues.values():
                self.advance(queue)

    def on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.critical("the task that runs commands ended by a bug", exc_info=bug)
            self.is_stopping = True
            self._futures.release_waiters()
            self._on_crash()
