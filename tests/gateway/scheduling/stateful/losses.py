"""What was in hand whenever a gateway or a cell was lost, as the world saw it: what may be given up, and what not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from gateway.scheduling.futures import Future
from gateway.scheduling.model_queue import ModelQueue


class Losses:
    """A command is in hand from its turn until its answer is on record, also while it waits to be tried again.

    A connection that ended counts only once its cell is known to be dead: one that dials again has lost nothing.
    """

    def __init__(self) -> None:
        self._gateways: Counter[str] = Counter()
        self._dead: Counter[str] = Counter()
        # By epoch: what ran or was brought back when its connection ended, while nobody knows whether it lives.
        self._unsure: dict[str, list[str]] = {}

    def of_command(self, request_id: str, living: Container[str]) -> int:
        """Gateways and cells that were lost while it was in hand. living: epochs of cells that are alive."""
        return self._gateways[request_id] + self._cells(request_id, living)

    def of_model(self, model_id: str, living: Container[str]) -> int:
        """Cells that were lost while it was brought back."""
        return self._cells(model_id, living)

    def _cells(self, lost: str, living: Container[str]) -> int:
        return self._dead[lost] + sum(ids.count(lost) for epoch, ids in self._unsure.items() if epoch not in living)

    def note_gateway_lost(self, queues: Iterable[ModelQueue], futures: Iterable[Future]) -> None:
        """futures: all of the gateway that is lost."""
        unwritten = [future for future in futures if future.turn is not None and future.attempts and not future.is_done]
        self._gateways.update(future.request_id for future in unwritten)
        for queue in queues:
            head = queue.running or (queue.ready[0] if queue.ready and queue.ready[0].attempts else None)
            if head is not None:
                self._gateways[head.request_id] += 1

    def note_hung_up(self, queues: Iterable[ModelQueue], epoch: str) -> None:
        for queue in queues:
            if queue.running is not None:
                self._unsure.setdefault(epoch, []).append(queue.running.request_id)
            if queue.losses and (queue.running is not None or queue.must_save_again):
                self._unsure.setdefault(epoch, []).append(queue.model.model_id)

    def note_hello(self, epoch: str) -> None:
        """That one lives, and no other does: a machine has one cell at a time."""
        self._unsure.pop(epoch, None)
        for ids in self._unsure.values():
            self._dead.update(ids)
        self._unsure.clear()
