"""Threads that publish what was captured, while the ranks go on with other commands."""

from __future__ import annotations

import os
import sys
import threading
from queue import SimpleQueue
from typing import Protocol

# Between two looks at the deadlines, where nobody else looks.
_LOOK_S = 1.0


class Work(Protocol):
    """What is to be published."""

    def run(self) -> None:
        """To the end."""

    def give_up_if_overdue(self) -> None:
        """Called now and then by another thread while it runs."""


class Publisher:
    """As many threads as there were publications at once; how many that can be, the buffers bound.

    They wait for the disk, the store and long calls that leave the interpreter alone, so the trainer hardly notices.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Work] = SimpleQueue()
        self._changed = threading.Condition()
        self._under_way: set[Work] = set()
        self._num_threads = 0

    def start(self, work: Work) -> None:
        with self._changed:
            self._under_way.add(work)
            is_short = len(self._under_way) > self._num_threads
            self._num_threads += is_short
        if is_short:
            threading.Thread(target=self._work, name="publish", daemon=True).start()
        self._waiting.put(work)

    def give_up_overdue(self) -> None:
        with self._changed:
            under_way = tuple(self._under_way)
        for work in under_way:
            work.give_up_if_overdue()

    def drain(self) -> None:
        """Wait until all have come to their end, however they end."""
        with self._changed:
            while not self._changed.wait_for(lambda: not self._under_way, timeout=_LOOK_S):
                self.give_up_overdue()

    def _work(self) -> None:
        while True:
            work = self._waiting.get()
            work.run()
            with self._changed:
                self._under_way.remove(work)
                self._changed.notify_all()


def end_process_on_bugs() -> None:
    """From now on an exception that leaves a thread ends this process, as one that leaves the main thread does."""

    def end(bug: threading.ExceptHookArgs) -> None:
        if bug.exc_value is not None:
            sys.__excepthook__(bug.exc_type, bug.exc_value, bug.exc_traceback)
        sys.stderr.flush()
        os._exit(1)

    threading.excepthook = end
