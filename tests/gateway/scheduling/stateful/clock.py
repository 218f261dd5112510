"""Time that passes only when nothing else can happen, and what is to happen at which time of it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from greenlet import getcurrent, greenlet

_READ_BY = (
    "gateway.scheduling.history",
    "gateway.scheduling.execution",
    "gateway.scheduling.upkeep",
    "gateway.scheduling.restored",
    "gateway.scheduling.steady_clock",
    "gateway.store.writer",
    "trainer_cell.vault.locks",
    "trainer_cell.vault.ulid",
)


class Clock:
    """now: seconds. Has what modules take from `time`, so that it can stand in for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Longer than asked: who polls a lock need not do so often. Outside of a thread nothing happens meanwhile."""
        seconds *= 100
        thread = getcurrent()
        if thread.parent is None:
            self.now += seconds
            return
        self.later(seconds, lambda: _go_on(thread))
        thread.parent.switch()

    def thread(self, act: Callable[[], None]) -> None:
        """Begin what others do not wait for while it sleeps."""
        _go_on(greenlet(act))

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), event))

    def advance(self, limit: float | None) -> bool:
        """To the next event, which happens, or to `limit` if that is earlier; False when nothing is to come at all."""
        if self._events and (limit is None or self._events[0][0] <= limit):
            due, _, event = heapq.heappop(self._events)
            self.now = max(self.now, due)
            event()
            return True
        if limit is not None:
            self.now = max(self.now, limit)
        return limit is not None

    def advance_due(self) -> None:
        """What is to happen now does."""
        while self._events and self._events[0][0] <= self.now:
            self.advance(self.now)

    @contextmanager
    def told_to_all(self) -> Iterator[None]:
        """Within the block it is the time of the gateway and of the vault."""
        with pytest.MonkeyPatch.context() as patch:
            for module in _READ_BY:
                patch.setattr(f"{module}.time", self)
            yield


def _go_on(thread: greenlet) -> None:
    """Until it sleeps or ends; what it raises is raised here."""
    thread.parent = getcurrent()
    thread.switch()
