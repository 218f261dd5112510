"""Advisory locks (flock) on files and directories of the vault; the kernel frees those of a dead process."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer_cell.vault.disk import Disk
from trainer_cell.vault.errors import NotThere, StorageFailed, VaultLocked

_EPOCH = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Both are held for a few calls to the file system; only a disk that hangs keeps them longer.
_EPOCH_PATIENCE_S = 30.0
_MODEL_PATIENCE_S = 60.0
_RETRY_S = 0.01


class Lock:
    """A held lock; freed by `release`, by leaving the `with` block, or with the process."""

    def __init__(self, disk: Disk, descriptor: int, path: Path) -> None:
        self._disk = disk
        self._descriptor: int | None = descriptor
        self._path = path

    def release(self) -> None:
        """Once or more often."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(StorageFailed):
                self._disk.close(descriptor, self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def lock_root(disk: Disk, root: Path) -> Lock:
    """Raises `VaultLocked`."""
    path = root / ".lock"
    lock = _try(disk, disk.open_lock_file(path), path, exclusive=True)
    if lock is None:
        raise VaultLocked(path, f"checkpoint root {root}")
    return lock


def epoch_lock_path(staging_root: Path, epoch: str) -> Path:
    if not _EPOCH.fullmatch(epoch):
        raise ValueError(f"{epoch!r} is not an epoch")
    return staging_root / f"{epoch}.lock"


def lock_epoch(disk: Disk, staging_root: Path, epoch: str, is_in_vain: Callable[[], bool] = lambda: False) -> Lock:
    """For the epoch itself: outwaits a sweep that came between; raises `VaultLocked` when another lives under it, at
    once when to wait for its end is in vain."""
    lock = _patiently(lambda: try_lock_epoch(disk, staging_root, epoch), _EPOCH_PATIENCE_S, is_in_vain)
    if lock is None:
        raise VaultLocked(epoch_lock_path(staging_root, epoch), f"cell epoch {epoch}")
    return lock


def try_lock_epoch(disk: Disk, staging_root: Path, epoch: str) -> Lock | None:
    """None while somebody holds it. A sweep unlinks lock files, so a lock counts only on the file still there."""
    path = epoch_lock_path(staging_root, epoch)
    return _try(disk, disk.open_lock_file(path), path, exclusive=True)


def lock_model(disk: Disk, versions_dir: Path) -> Lock:
    """Raises `NotThere` when the directory is missing, `StorageFailed` (ETIMEDOUT) when its holder keeps it."""
    lock = _patiently(
        lambda: _try(disk, disk.open_directory(versions_dir), versions_dir, exclusive=True), _MODEL_PATIENCE_S
    )
    if lock is None:
        raise StorageFailed("lock", versions_dir, errno.ETIMEDOUT)
    return lock


def _patiently(
    attempt: Callable[[], Lock | None], patience_s: float, is_in_vain: Callable[[], bool] = lambda: False
) -> Lock | None:
    deadline = time.monotonic() + patience_s
    while (lock := attempt()) is None and time.monotonic() < deadline and not is_in_vain():
        time.sleep(_RETRY_S)
    return lock


def lock_version(disk: Disk, version_dir: Path, exclusive: bool) -> Lock | None:
    """Shared for readers, exclusive for who deletes; None when the version is gone or the lock is not free."""
    try:
        descriptor = disk.open_directory(version_dir)
    except NotThere:
        return None
    return _try(disk, descriptor, version_dir, exclusive)


def _try(disk: Disk, descriptor: int, path: Path, exclusive: bool) -> Lock | None:
    lock = Lock(disk, descriptor, path)
    try:
        if disk.try_lock(descriptor, path, exclusive) and disk.is_at(descriptor, path):
            return lock
    except BaseException:
        lock.release()
        raise
    lock.release()
    return None
