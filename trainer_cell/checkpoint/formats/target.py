"""Where an export goes: written aside, and renamed to its place when every byte is durable. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer_cell.checkpoint.formats.errors import TargetExists
from trainer_cell.vault.disk import LOCAL_DISK
from trainer_cell.vault.errors import NotThere, StorageFailed
from trainer_cell.vault.ulid import new_ulid


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory beside `target`, to be filled durably in the block; at its end it takes the target's name.

    After an error in the block nothing is left. Raises `TargetExists`, `StorageFailed`.
    """
    disk = LOCAL_DISK
    _refuse_existing(target)
    aside = target.with_name(f".{target.name}.{new_ulid()}")
    disk.make_directory(aside)
    try:
        yield aside
        disk.fsync_directory(aside)
        _refuse_existing(target)
        disk.rename(aside, target)
    except BaseException:
        try:
            disk.remove_tree(aside)
        except StorageFailed:
            pass
        raise
    disk.fsync_directory(target.parent)


def _refuse_existing(target: Path) -> None:
    try:
        LOCAL_DISK.stat(target)
    except NotThere:
        return
    raise TargetExists(f"{target.name}: exists already; an export overwrites nothing")


def write_file(path: Path, *content: bytes | bytearray | memoryview) -> None:
    """A new file, durable when this returns. Raises `StorageFailed`."""
    disk, views = LOCAL_DISK, [memoryview(part) for part in content]
    with disk.closing(disk.open_new(path), path) as descriptor:
        disk.allocate(descriptor, path, sum(view.nbytes for view in views))
        disk.write(descriptor, path, views, 0)
        disk.fsync(descriptor, path)
