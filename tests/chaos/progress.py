"""How far the clients are, for whoever waits for it."""

from __future__ import annotations

import threading


class Stopped(Exception):
    """The run is broken off."""


class Progress:
    """Counts commands whose answers the clients have.

    Clients that reach a place where they want quiet wait there for each other and for the end of all kills.
    """

    def __init__(self, num_clients: int) -> None:
        self._condition = threading.Condition()
        self._num_clients = num_clients
        self._num_waiting = 0
        self._count = 0
        self._is_quiet = False
        self._is_stopped = False

    @property
    def count(self) -> int:
        return self._count

    def note(self) -> None:
        """One command more; raises `Stopped` when the run was broken off."""
        with self._condition:
            self._check()
            self._count += 1
            self._condition.notify_all()

    def wait_for_more(self, more: int) -> bool:
        """Until `more` commands have been answered from now on; False when no more will be before it is quiet."""
        with self._condition:
            goal = self._count + more
            self._condition.wait_for(lambda: self._count >= goal or self._is_over)
            return self._count >= goal and not self._is_over

    @property
    def _is_over(self) -> bool:
        return self._is_stopped or self._num_waiting == self._num_clients

    def quiet(self) -> None:
        """Nothing will be killed from now on."""
        with self._condition:
            self._is_quiet = True
            self._condition.notify_all()

    def wait_for_quiet(self) -> None:
        """Raises `Stopped` when the run was broken off."""
        with self._condition:
            self._num_waiting += 1
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._is_quiet or self._is_stopped)
            self._check()

    def stop(self) -> None:
        """Nobody goes on."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()

    def _check(self) -> None:
        if self._is_stopped:
            raise Stopped
