"""Descendants whose parent died come to this process, which ends them.

The ranks of a cell are children of torchrun's agent. When the agent is killed they would go to init and could outlive
the service, holding its files and its GPUs. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Collection
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 5.0


def adopt_orphans() -> None:
    """From now on orphaned descendants become children of this process; raises `OSError`."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def kill_orphans(spare: Collection[int]) -> int:
    """Kill and reap every child of this process but `spare`, then the children those leave; returns how many.

    One that cannot die yet, stuck in the kernel, is left to die in its own time.
    """
    killed: set[int] = set()
    while orphans := [pid for pid in children_of(os.getpid()) if pid not in killed and pid not in spare]:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            _reap(pid)
        killed.update(orphans)
    return len(killed)


def _reap(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        has_ended, _, _ = select.select([descriptor], [], [], _PATIENCE_S)
        if has_ended:
            os.waitpid(pid, 0)
    finally:
        os.close(descriptor)


def children_of(parent: int) -> list[int]:
    """Pids of the living and unreaped children of a process."""
    children = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # "pid (command) state ppid …": the command may hold spaces and brackets of its own.
        if int(status.rpartition(b")")[2].split()[1]) == parent:
            children.append(int(entry.name))
    return children
