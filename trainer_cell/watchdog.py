"""A command that outlives its deadline ends the process, with every thread's stack on stderr.

`faulthandler` fires from a thread of its own in C, so also while a kernel or a collective holds the interpreter.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End this process if the body takes longer than `seconds`."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that no rank outlives its agent."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
