"""How far the clients are, for whoever waits for it."""

from __future__ import annotations

import threading


class Stopped(Exception):
    """The run is broken off."""


class Progress:
    """Counts commands whose answers the clients have; `end` when nobody will answer any more."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0
        self._is_over = False

    @property
    def count(self) -> int:
        return self._count

    def note(self) -> None:
        """One command more; raises `Stopped` when the run was broken off."""
        with self._condition:
            if self._is_over:
                raise Stopped
            self._count += 1
            self._condition.notify_all()

    def end(self) -> None:
        with self._condition:
            self._is_over = True
            self._condition.notify_all()

    def wait_for_more(self, more: int) -> bool:
        """Until `more` commands have been answered from now on; False when the end came before."""
        with self._condition:
            goal = self._count + more
            self._condition.wait_for(lambda: self._count >= goal or self._is_over)
            return self._count >= goal and not self._is_over
