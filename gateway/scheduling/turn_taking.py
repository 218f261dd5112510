"""What those who run commands need of who gives the turns."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.scheduling.futures import Future
from gateway.scheduling.model_queue import ModelQueue
from trainer_cell.protocol.errors import CommandFailed
from trainer_cell.protocol.outcomes import Success


class TurnTaking(Protocol):
    def conclude(self, queue: ModelQueue, future: Future, answer: Success | CommandFailed) -> None:
        """The future is over; who asked is told once that is in the journal."""

    def advance(self, queue: ModelQueue) -> None:
        """Something has changed for the model: see what it can do next."""

    def put_back(self, queue: ModelQueue, future: Future) -> None:
        """The future is to be tried again, before all others of its model."""

    def on_task_done(self, task: asyncio.Task[None]) -> None:
        """To be called with each task that ends: one that ended by a bug ends the gateway."""
