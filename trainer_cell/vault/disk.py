"""The one seam to the file system: a method for every call the vault makes.

Every method goes through `Disk.call`, so that a subclass can record, fail or stop any of them. `OSError` becomes
`StorageFailed` here and nowhere else. Modes are left to the umask.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from trainer_cell.vault.errors import NotThere, StorageFailed, storage_failed

T = TypeVar("T")

# The kernel takes no more buffers than this in one vectored call.
_MAX_VECTORS = 1024


class Disk:
    """The local file system. Descriptors are plain ints; `path` beside one serves messages and recordings only."""

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        """Run one call. Raises `StorageFailed` (`NotThere`, `AlreadyThere`) for an `OSError`."""
        try:
            return act()
        except OSError as error:
            raise storage_failed(operation, path, error) from error

    # Descriptors

    def open_new(self, path: Path) -> int:
        """For writing; the file must not exist."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return self.call("create", path, lambda: os.open(path, flags, 0o666))

    def open_read(self, path: Path) -> int:
        """A symlink is refused, and something that is not a file does not block."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return self.call("open", path, lambda: os.open(path, flags))

    def open_directory(self, path: Path) -> int:
        return self.call("open", path, lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def open_lock_file(self, path: Path) -> int:
        """Made when missing."""
        return self.call("open", path, lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))

    def close(self, descriptor: int, path: Path) -> None:
        """Checked: some file systems report a failed write only here."""
        self.call("close", path, lambda: os.close(descriptor))

    @contextmanager
    def closing(self, descriptor: int, path: Path) -> Iterator[int]:
        """Closes at the end; an error of the close shows unless the body has failed already."""
        try:
            yield descriptor
        except BaseException:
            with suppress(StorageFailed):
                self.close(descriptor, path)
            raise
        self.close(descriptor, path)

    def allocate(self, descriptor: int, path: Path, size: int) -> None:
        """Reserve `size` bytes, so that a full disk shows now."""
        if size:
            self.call("allocate", path, lambda: os.posix_fallocate(descriptor, 0, size))

    def set_direct(self, descriptor: int, path: Path, on: bool) -> bool:
        """Whether writes now go past the page cache: memory, offsets and lengths of pages only. Not all file systems
        know it."""

        def act() -> bool:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            flags = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return False
            return on

        return self.call("fcntl", path, act)

    def truncate(self, descriptor: int, path: Path, size: int) -> None:
        self.call("truncate", path, lambda: os.ftruncate(descriptor, size))

    def write(self, descriptor: int, path: Path, views: Sequence[memoryview], offset: int) -> None:
        """Write all bytes of `views`, one after the other, from `offset` on."""
        left = [view for view in views if view.nbytes]
        while left:
            written = self._write_some(descriptor, path, left[:_MAX_VECTORS], offset)
            offset += written
            left = _advanced(left, written)

    def _write_some(self, descriptor: int, path: Path, views: Sequence[memoryview], offset: int) -> int:
        return self.call("write", path, lambda: os.pwritev(descriptor, views, offset))

    def read(self, descriptor: int, path: Path, views: Sequence[memoryview], offset: int) -> int:
        """Fill `views`, one after the other, from `offset` on; the count of bytes, short only at the file's end."""
        left = [view for view in views if view.nbytes]
        total = 0
        while left:
            count = self._read_some(descriptor, path, left[:_MAX_VECTORS], offset + total)
            if count == 0:
                break
            total += count
            left = _advanced(left, count)
        return total

    def _read_some(self, descriptor: int, path: Path, views: Sequence[memoryview], offset: int) -> int:
        return self.call("read", path, lambda: os.preadv(descriptor, views, offset))

    def fsync(self, descriptor: int, path: Path) -> None:
        self.call("fsync", path, lambda: os.fsync(descriptor))

    def try_lock(self, descriptor: int, path: Path, exclusive: bool) -> bool:
        """Whether the lock was free; it goes with the descriptor."""
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            self.call("lock", path, lambda: fcntl.flock(descriptor, kind | fcntl.LOCK_NB))
        except StorageFailed as failure:
            if isinstance(failure.__cause__, BlockingIOError):
                return False
            raise
        return True

    def is_at(self, descriptor: int, path: Path) -> bool:
        """Whether `path` still names what the descriptor has open."""
        opened = self.call("stat", path, lambda: os.fstat(descriptor))
        try:
            return os.path.samestat(opened, self.stat(path))
        except NotThere:
            return False

    # Names

    def stat(self, path: Path) -> os.stat_result:
        """Symlinks are not followed."""
        return self.call("stat", path, lambda: os.lstat(path))

    def names(self, directory: Path) -> list[str]:
        """Of the entries, sorted."""
        return sorted(self.call("list", directory, lambda: os.listdir(directory)))

    def make_directory(self, path: Path) -> None:
        self.call("mkdir", path, lambda: os.mkdir(path))

    def remove_directory(self, path: Path) -> None:
        self.call("rmdir", path, lambda: os.rmdir(path))

    def unlink(self, path: Path) -> None:
        self.call("unlink", path, lambda: os.unlink(path))

    def rename(self, source: Path, target: Path) -> None:
        self.call("rename", target, lambda: os.rename(source, target))

    def symlink(self, target: str, path: Path) -> None:
        self.call("symlink", path, lambda: os.symlink(target, path))

    def read_link(self, path: Path) -> str:
        return self.call("readlink", path, lambda: os.readlink(path))

    def free_bytes(self, path: Path) -> int:
        """What an ordinary user may still write."""

        def act() -> int:
            found = os.statvfs(path)
            return found.f_bavail * found.f_frsize

        return self.call("statvfs", path, act)

    # Of several calls

    def fsync_directory(self, path: Path) -> None:
        """Make the directory's entries durable."""
        with self.closing(self.open_directory(path), path) as descriptor:
            self.fsync(descriptor, path)

    def remove_tree(self, path: Path) -> None:
        """Remove what is at `path`, however deep, following no symlink; nothing there is fine."""
        try:
            if not stat.S_ISDIR(self.stat(path).st_mode):
                self.unlink(path)
                return
            for name in self.names(path):
                self.remove_tree(path / name)
            self.remove_directory(path)
        except NotThere:
            return


def _advanced(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` after their first `count` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []


LOCAL_DISK = Disk()
