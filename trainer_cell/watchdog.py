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
# Its agent tells a rank whose child it is: a rank that starts after the agent's death has another parent already.
AGENT_PID = "CELLGATE_CELL_AGENT_PID"


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End this process if the body takes longer than `seconds`."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, so that no rank outlives its agent.

    parent: whose child this process must be, as far as somebody has told.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call, or before this process was up
        os._exit(1)
