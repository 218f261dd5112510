"""Saying in the event loop what another thread found out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

Callback = Callable[[], None]


class LoopCallbacks:
    """Callbacks are called in the order they were given in, however many threads give them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[Callback] = deque()

    def use_running_loop(self) -> None:
        """From the event loop whose turn it will be."""
        self._loop = asyncio.get_running_loop()

    def call(self, callbacks: Iterable[Callback]) -> None:
        """From any thread; one turn of the loop for all of them."""
        self._waiting.extend(callbacks)
        if self._waiting:
            assert self._loop is not None, "whoever waits for an answer has come from a loop"
            # A loop that was closed has nobody left who waits.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            # One that failed is told by the loop; the others are not to suffer for it.
            if self._waiting:
                self.call(())
