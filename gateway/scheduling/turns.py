"""Who runs when: takes the heads of all models' queues, one at a time and fairly, to the cell and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from gateway.scheduling.admission import answer_without_cell, estimated_cost
from gateway.scheduling.backlog import Backlog
from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_epoch import CellEpoch
from gateway.scheduling.cell_link import CellLink, CellLost
from gateway.scheduling.dispatch import Dispatcher, Publishing
from gateway.scheduling.fairness import FairShare
from gateway.scheduling.futures import Future, FutureBook
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.publications import Publications
from gateway.scheduling.requests import SaveRequest, adds_gradient
from gateway.scheduling.residency import Residency
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Hello, Success

log = logging.getLogger(__name__)


async def _answer_of(outcome: Awaitable[Success]) -> Success | CommandFailed:
    try:
        return await outcome
    except CommandFailed as failure:
        return failure
    except CellLost:
        return _lost()


def _lost() -> CommandFailed:
    return CommandFailed(ErrorKind.CELL_LOST, "the trainer cell was lost while it ran this")


class Turns:
    """Runs what the queues hold. One task waits for the cell; everything else happens at once, in the caller's call.

    queues: by model id, filled by the scheduler. is_over: whether a session's models may lose their slots.
    """

    def __init__(
        self,
        link: CellLink,
        catalog: Catalog,
        queues: Mapping[str, ModelQueue],
        futures: FutureBook,
        backlog: Backlog,
        is_over: Callable[[str], bool],
        on_crash: Callable[[], None],
    ) -> None:
        self.is_stopping = False
        self._link = link
        self._queues = queues
        self._futures = futures
        self._backlog = backlog
        self._is_over = is_over
        self._on_crash = on_crash
        self._fair = FairShare()
        self._residency = Residency()
        self._epoch = CellEpoch(link, catalog.vault, queues, self._residency)
        self._publications = Publications(queues)
        self._dispatcher = Dispatcher(link, catalog, self._residency, self._may_give_way, self._on_evicted)
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
        self._task.add_done_callback(self._on_task_done)

    async def stop(self, grace_s: float) -> None:
        self.is_stopping = True
        self._futures.release_waiters()
        self._wake.set()
        if self._task is not None:
            await self._come_to_an_end(grace_s)
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._link.close()

    async def _come_to_an_end(self, grace_s: float) -> None:
        """The running command, and the saves that are being written."""
        assert self._task is not None
        deadline = asyncio.get_running_loop().time() + grace_s
        await asyncio.wait({self._task}, timeout=grace_s)
        if publishing := self._publications.tasks:
            await asyncio.wait(publishing, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))

    def advance(self, queue: ModelQueue) -> None:
        """Answer what needs no cell at the head of the queue; offer the next command for a turn."""
        while queue.running is None and queue.ready:
            head = queue.ready[0]
            answer = answer_without_cell(queue.model, head.request)
            if answer is None:
                self._offer(queue, head)
                return
            queue.ready.popleft()
            self._conclude(queue, head, answer)
        self._fair.withdraw(queue.model.tenant, queue.model.model_id)

    def _offer(self, queue: ModelQueue, head: Future) -> None:
        model = queue.model
        if self._is_held(queue):
            self._fair.withdraw(model.tenant, model.model_id)
            return
        self._fair.offer(model.tenant, model.model_id, estimated_cost(head.request))
        self._wake.set()

    def _is_held(self, queue: ModelQueue) -> bool:
        """Whether the head of the queue must wait for a save that is being written; asked again when its turn comes."""
        head = queue.ready[0]
        head.waiting_for = self._publications.reason_to_wait(queue, head.request)
        return head.waiting_for is not None

    async def _run(self) -> None:
        while not self.is_stopping:
            await self._wake.wait()
            self._wake.clear()
            hello = self._link.hello
            if hello is None or not (self._epoch.is_settled or await self._settle(hello)):
                continue
            while self.is_ready and (model_id := self._fair.pick()) is not None:
                queue = self._queues[model_id]
                if not self._is_held(queue):
                    await self._take_turn(queue)

    async def _settle(self, hello: Hello) -> bool:
        try:
            adopted = await self._epoch.settle(hello)
        except CellLost:
            return False
        except CommandFailed as failure:
            log.error("the cell cannot be taken on: %r", failure)
            self._link.hang_up()
            return False
        for queue in adopted:
            self.advance(queue)
        return self._epoch.is_settled

    async def _take_turn(self, queue: ModelQueue) -> None:
        future = queue.running = queue.ready.popleft()
        future.state = "running"
        answer: Success | CommandFailed | None
        if isinstance(future.request, SaveRequest):
            answer = await self._capture(queue, future, future.request)
        else:
            answer = await _answer_of(self._dispatcher.run(queue, future))
        queue.running = None
        if answer is not None:
            self._conclude(queue, future, answer)
        self.advance(queue)

    async def _capture(self, queue: ModelQueue, future: Future, request: SaveRequest) -> CommandFailed | None:
        """None when the save goes on behind the ranks' back, or is to be tried again."""
        try:
            publishing = await self._dispatcher.capture(future, request)
        except CommandFailed as failure:
            if failure.kind is not ErrorKind.SAVE_BUFFERS_FULL or not self._publications:
                return failure
            self._publications.note_full()
            future.state = "queued"
            queue.ready.appendleft(future)
            return None
        except CellLost:
            return _lost()
        task = asyncio.create_task(self._publish(queue, future, publishing), name=f"save of {queue.model.model_id}")
        self._publications.begin(queue.model.model_id, task)
        task.add_done_callback(self._on_task_done)
        return None

    async def _publish(self, queue: ModelQueue, future: Future, publishing: Publishing) -> None:
        answer = await _answer_of(publishing.outcome())
        held = self._publications.end(queue.model.model_id)
        self._conclude(queue, future, answer)
        for one in held:
            self.advance(one)

    def _conclude(self, queue: ModelQueue, future: Future, answer: Success | CommandFailed) -> None:
        model = queue.model
        if isinstance(answer, CommandFailed):
            if future.operation == "create":
                model.state, model.trouble = "failed", answer
            if adds_gradient(future.request):
                queue.window.note_failure(future)
        elif future.operation == "unload":
            model.state, model.trouble = "unloaded", None
        if model.is_over:
            queue.release_early()
        model.pending -= 1
        self._backlog.leave(model.tenant, future.payload_bytes)
        self._futures.finish(future, answer)

    def _on_lost(self, hello: Hello) -> None:
        self._epoch.lose(hello)
        if self.is_stopping:
            return  # what still waits has no answer from this gateway
        for queue in self._queues.values():
            self.advance(queue)

    def _may_give_way(self, model_id: str) -> bool:
        model = self._queues[model_id].model
        return model.pending == 0 and self._is_over(model.session_id)

    def _on_evicted(self, model_id: str) -> None:
        queue = self._queues[model_id]
        queue.model.state = "lost"
        queue.model.trouble = CommandFailed(
            ErrorKind.MODEL_LOST,
            f"the session of model {model_id} was over and another model needed its slot; load a checkpoint to go on",
        )
        self.advance(queue)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("the task that runs commands ended by a bug", exc_info=task.exception())
            self.is_stopping = True
            self._futures.release_waiters()
            self._on_crash()
