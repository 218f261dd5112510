"""What time brings about: numbers that never come are sealed, silent clients' models are parked, old answers go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from gateway.scheduling.futures import TOLD_GRACE_S, UNTOLD_GRACE_S
from gateway.scheduling.model_queue import REMEMBERED, ModelQueue
from gateway.scheduling.sessions import SessionBook
from gateway.scheduling.steady_clock import steady_time
from gateway.scheduling.turns import Turns
from gateway.store.journal import Journal

log = logging.getLogger(__name__)

_ROUND_S = 1.0
_PRUNE_S = 60.0


@dataclass(frozen=True)
class Patience:
    """silence_s: with sessions, until their models are parked. gap_s: with a number that is missing, in time during
    which the service was ready for it. idle_s: with a model that nobody uses, until it is unloaded."""

    silence_s: float
    gap_s: float
    idle_s: float


class Upkeep:
    """seal: fails a number of a model that never came. retire: unloads a model."""

    def __init__(
        self,
        queues: Mapping[str, ModelQueue],
        turns: Turns,
        sessions: SessionBook,
        journal: Journal,
        seal: Callable[[str, int], object],
        retire: Callable[[str], None],
        patience: Patience,
    ) -> None:
        self._queues = queues
        self._turns = turns
        self._sessions = sessions
        self._journal = journal
        self._seal = seal
        self._retire = retire
        self._patience = patience
        # By model: the number that is missing, and for how long it has been.
        self._gaps: dict[str, tuple[int, float]] = {}
        self._pruned_s = time.monotonic()
        # Since the last sign of life in the journal: nobody could use a model of a service that was not there, or of
        # one whose clock was wrong.
        self.away_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="upkeep")
        self._task.add_done_callback(self._turns.on_task_done)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(min(_ROUND_S, self._patience.gap_s / 4))
            now_s = time.monotonic()
            if self._turns.is_ready:
                # A process that was stopped was ready for nothing meanwhile.
                self._seal_gaps(min(now_s - before_s, 2 * _ROUND_S))
            before_s = now_s
            for session in self._sessions.silent(self._patience.silence_s):
                for model_id in session.model_ids:
                    self._turns.park(model_id)
            if now_s - self._pruned_s >= _PRUNE_S:
                self._pruned_s = now_s
                self._prune()
                self._retire_idle()

    def _seal_gaps(self, passed_s: float) -> None:
        gaps = {}
        for model_id, queue in self._queues.items():
            if missing := queue.missing:
                first, waited_s = self._gaps.get(model_id, (missing.start, 0.0))
                waited_s = waited_s + passed_s if first == missing.start else 0.0
                gaps[model_id] = (missing.start, waited_s)
        self._gaps = gaps
        for model_id, (_, waited_s) in gaps.items():
            if waited_s >= self._patience.gap_s:
                for seq_id in self._queues[model_id].missing:
                    if not self._queues[model_id].is_spent(seq_id):
                        self._seal(model_id, seq_id)

    def _retire_idle(self) -> None:
        oldest = steady_time() - self._patience.idle_s - self.away_s
        for model_id, queue in self._queues.items():
            if queue.is_idle and not queue.model.is_over and _last_use(queue) < oldest:
                self._retire(model_id)

    def _prune(self) -> None:
        now = steady_time()
        self._journal.prune(now - TOLD_GRACE_S, now - UNTOLD_GRACE_S, REMEMBERED)
        for queue in self._queues.values():
            if queue.is_idle and _last_use(queue) < now - UNTOLD_GRACE_S:
                queue.forget_numbers()


def _last_use(queue: ModelQueue) -> float:
    return queue.model.last_request_time.timestamp()
