"""Threads that publish what was captured, while the ranks go on with other commands."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable


class Publisher:
    """One thread for each attempt; how many there are at once, the buffers bound.

    They wait for the disk, the store and long calls that leave the interpreter alone, so the trainer hardly notices.
    """

    def __init__(self) -> None:
        self._running: set[threading.Thread] = set()

    def start(self, publish: Callable[[], None], name: str) -> None:
        """Called by the thread that runs commands, and only by it."""
        self._running = {thread for thread in self._running if thread.is_alive()}
        thread = threading.Thread(target=publish, name=name, daemon=True)
        self._running.add(thread)
        thread.start()

    def drain(self) -> None:
        """Wait until all have come to their end; each has a deadline."""
        for thread in self._running:
            thread.join()


def end_process_on_bugs() -> None:
    """From now on an exception that leaves a thread ends this process, as one that leaves the main thread does."""

    def end(bug: threading.ExceptHookArgs) -> None:
        if bug.exc_value is not None:
            sys.__excepthook__(bug.exc_type, bug.exc_value, bug.exc_traceback)
        sys.stderr.flush()
        os._exit(1)

    threading.excepthook = end
