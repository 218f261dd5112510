"""Run a command that the kernel kills when its parent dies, however that happens.

    python -I -S die_with_parent.py PARENT_PID COMMAND [ARGUMENT…]

A program of its own, started by path, because the request must be made inside the child before the command's first
instruction, and Python code between fork and exec of a process with threads may deadlock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _become(parent: int, command: list[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    # The parent may have died before the request took effect.
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
