"""Saves that are captured and not yet published, and who must wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gateway.scheduling.admission import load_address
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.requests import CreateFromCheckpointRequest, LoadRequest, Request, SaveRequest, UnloadRequest


class Publications:
    """At most one for each model: a model's saves are published in the order they came. One of nobody's goes by its
    command id.

    A save that finds no memory for its capture waits until another is published; only its own model waits with it.
    """

    def __init__(self, queues: Mapping[str, ModelQueue]) -> None:
        self._queues = queues
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_full = False
        self._held: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._tasks

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        return set(self._tasks.values())

    def begin(self, model_id: str, task: asyncio.Task[None]) -> None:
        self._tasks[model_id] = task

    def end(self, model_id: str) -> list[ModelQueue]:
        """The model's save is over; those that were held and may go on now."""
        del self._tasks[model_id]
        self._is_full = False
        return self.release()

    def release(self) -> list[ModelQueue]:
        """Those that were held and may go on now."""
        held, self._held = list(self._held), {}
        return [self._queues[one] for one in held]

    def note_full(self) -> None:
        """The cell has no memory for one more capture."""
        self._is_full = True

    def reason_to_wait(self, queue: ModelQueue, request: Request, is_resident: bool = True) -> str | None:
        """Why the command at the head of a queue cannot have its turn yet; None when it can."""
        reason = self._reason(queue, request)
        if not is_resident and queue.model.model_id in self._tasks:
            reason = "the state of this model is being written"
        if reason is not None:
            self._held[queue.model.model_id] = None
        return reason

    def _reason(self, queue: ModelQueue, request: Request) -> str | None:
        match request:
            case SaveRequest() if queue.model.model_id in self._tasks:
                return "an earlier save of this model is being written"
            case SaveRequest() if queue.num_unwritten:
                # A gateway that does not find them does them again, and must not find in the vault what came after.
                return "what came before is not on record yet"
            case UnloadRequest() if queue.unsettled is not None:
                # Until then it may have to be made once more, of a model that must still be there.
                return "an earlier save of this model is being written"
            case SaveRequest() if self._is_full and self._tasks:
                return "other saves are being written and hold all buffers"
            case LoadRequest() | CreateFromCheckpointRequest():
                source = self._queues.get(load_address(request.path).model_id)
                if source is None or source.model.tenant != queue.model.tenant:
                    return None
                if source.model.model_id in self._tasks or source.must_save_again:
                    return "the model it loads from is writing a checkpoint"
        return None
