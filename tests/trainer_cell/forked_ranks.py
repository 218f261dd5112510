"""Ranks for tests, as torchrun would start them, but forked from a process that has torch and megatron imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from trainer_cell.watchdog import die_with_parent

# Nothing here takes near as long on a machine that does something else besides; who waits longer waits for ever.
PATIENCE_S = 240.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch", "trainer_cell.assembly", __name__])


def run_on_ranks(world: int, act: Callable[..., None], *arguments: Any) -> None:
    """`act(*arguments)` on each rank of its own process; all must end well."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        ranks = start_ranks(world, directory, act, arguments)
        deadline = time.monotonic() + PATIENCE_S
        while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
            wait([rank.sentinel for rank in ranks if rank.exitcode is None], 1.0)
            if any(rank.exitcode for rank in ranks):
                break
        for rank in ranks:
            rank.kill()
            rank.join()
        assert [rank.exitcode for rank in ranks] == [0] * world, logs_of(directory)


def start_ranks(world: int, directory: Path, act: Callable[..., None], arguments: tuple[Any, ...]) -> list[BaseProcess]:
    """Processes that run `act(*arguments)` in the environment torchrun would give them, and log to `directory`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    ranks: list[BaseProcess] = [
        _context.Process(target=_in_rank, args=(rank, world, port, directory, act, arguments), daemon=True)
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def logs_of(directory: Path) -> str:
    return "\n".join(path.read_text()[-20_000:] for path in sorted(directory.glob("rank*.log")))


def _in_rank(
    rank: int, world: int, port: int, directory: Path, act: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    die_with_parent()
    log = os.open(directory / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    if rank != 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    act(*arguments)
