"""What belongs to a process and ends with it: open files with their locks, and the thread that writes the journal."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from gateway.store.callbacks import Callback
from gateway.store.errors import JournalUnavailable
from gateway.store.writer import Refusal, Write, Writer
from tests.fakes.hold import Killed
from tests.gateway.scheduling.stateful.clock import Clock
from trainer_cell.vault.disk import Disk

T = TypeVar("T")


class ProcessDisk(Disk):
    """work: called before each call; it may raise to end the process there."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._open: set[int] = set()
        self._is_over = False

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        # Closing frees locks: the kernel does that for the dead too.
        if operation != "close":
            if self._is_over:
                raise Killed
            self._work()
        result = super().call(operation, path, act)
        if operation in ("create", "open") and isinstance(result, int):
            self._open.add(result)
        return result

    def close(self, descriptor: int, path: Path) -> None:
        if not self._is_over:
            self._open.discard(descriptor)
            super().close(descriptor, path)

    def end(self) -> None:
        """The kernel closes what the process had open."""
        self._is_over = True
        for descriptor in self._open:
            with suppress(OSError):
                os.close(descriptor)
        self._open.clear()


class StateDisk:
    """What can be said of the disk that holds the journal. failures: so many transactions to come fail.

    failed_at: the moment of the last that did.
    """

    def __init__(self) -> None:
        self.is_full = False
        self.failures = 0
        self.delay_s = 0.001
        self.failed_at = 0.0

    def fails(self, now: float) -> bool:
        fails = self.is_full or self.failures > 0
        if not self.is_full:
            self.failures = max(0, self.failures - 1)
        if fails:
            self.failed_at = now
        return fails


class SteppedWriter(Writer):
    """Its thread is a part of simulated time. clock, disk: of the world; to be set before one is made."""

    clock: Clock
    disk: StateDisk

    def put(
        self,
        write: Write,
        on_durable: Callback | None = None,
        refusal: Refusal | None = None,
        num_bytes: int = 0,
        is_lazy: bool = False,
    ) -> None:
        if not self.is_over:
            super().put(write, on_durable, refusal, num_bytes, is_lazy)
            self._come_back()

    def end(self) -> None:
        """What is queued is lost with the process."""
        self.is_over = True
        self._disconnect()

    is_over = False
    _coming_at: float | None = None

    def _run(self) -> None:
        """There is no thread."""

    def _come_back(self) -> None:
        moment = self._next_try()
        if moment is None:
            return
        at = max(self.clock.now + self.disk.delay_s, moment)
        if self._coming_at is None or at < self._coming_at:
            # What is lazy waits; what comes after it and is not need not wait with it.
            self._coming_at = at
            self.clock.later(at - self.clock.now, partial(self._come, at))

    def _come(self, at: float) -> None:
        if self.is_over or at != self._coming_at:
            return
        self._coming_at = None
        moment = self._next_try()
        if moment is not None and moment <= self.clock.now:
            self._write()
        self._come_back()

    def _transact(self, batch: object) -> JournalUnavailable | None:
        if self.disk.fails(self.clock.now):
            return JournalUnavailable("the disk of the journal is full")
        return super()._transact(batch)  # type: ignore[arg-type]
