"""File systems that record what is asked of them, or fail at a chosen call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainer_cell.vault.disk import Disk

T = TypeVar("T")


class Crash(Exception):
    """Stands for the death of the process: nothing in the vault may catch it."""


class RecordingDisk(Disk):
    """calls: (operation, path as given), in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Path]] = []

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        self.calls.append((operation, path))
        return super().call(operation, path, act)


class UnsyncedDisk(Disk):
    """Counts syncs and skips them: sweeps over every call ask what is visible, not what a power cut leaves."""

    def fsync(self, descriptor: int, path: Path) -> None:
        self.call("fsync", path, lambda: None)


class FailingDisk(UnsyncedDisk):
    """Fails with `number` at call `at` (counted from 0): before it acts or, with `late`, when it has acted; only then
    or, with `lasting`, at each call from there on. succeeded: the other calls, in order."""

    def __init__(self, at: int, number: int = errno.EIO, late: bool = False, lasting: bool = False) -> None:
        self._at, self._number, self._late, self._lasting = at, number, late, lasting
        self._count = -1
        self.failed: str | None = None
        self.succeeded: list[tuple[str, Path]] = []

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        self._count += 1
        if self._count < self._at or (self._count > self._at and not self._lasting):
            result = super().call(operation, path, act)
            self.succeeded.append((operation, path))
            return result
        self.failed = operation
        if self._late or operation == "close":
            super().call(operation, path, act)

        def fail() -> T:
            raise OSError(self._number, os.strerror(self._number))

        return super().call(operation, path, fail)


class CrashingDisk(UnsyncedDisk):
    """Dies before call `at`; then it does nothing any more but close descriptors, as the kernel would."""

    def __init__(self, at: int) -> None:
        self._left = at

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        self._left -= 1
        if self._left < 0:
            if operation == "close":
                super().call(operation, path, act)
            raise Crash(operation)
        return super().call(operation, path, act)
