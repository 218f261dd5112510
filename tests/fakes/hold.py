"""Where a test stops a fake cell, and how the cell's threads end when it is killed."""

from __future__ import annotations

import threading

PATIENCE_S = 20.0


class Killed(BaseException):
    """The fake process is no more: nothing may catch this."""


class Hold:
    """A place where the cell stops until it is let go."""

    def __init__(self) -> None:
        self.is_taken = False
        self._reached = threading.Event()
        self._released = threading.Event()

    def wait_reached(self, timeout_s: float = PATIENCE_S) -> None:
        """Blocks; in an event loop call it in a thread."""
        assert self._reached.wait(timeout_s), "the cell did not get there"

    def release(self) -> None:
        self._released.set()

    def stop_here(self) -> None:
        self._reached.set()
        assert self._released.wait(PATIENCE_S), "nobody let the cell go on"
