"""Real file systems on images, cut off from their disk while a save is running. Needs root and loop devices."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

from tests.trainer_cell.vault.disks import Crash
from trainer_cell.vault.disk import Disk

T = TypeVar("T")

# `_IOR('X', 125, __u32)`, of ext4 and of xfs: stop at once, and do not even write the journal out.
_SHUTDOWN, _WITHOUT_THE_LOG = 0x8004587D, 2
_LOOKS_ONLY = ("stat", "list", "read", "readlink", "statvfs", "lock", "open")
_MAKE = {
    "ext4": (32 << 20, ["mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4"]),
    "xfs": (320 << 20, ["mkfs.xfs", "-q"]),
}


@cache
def why_not(kind: str) -> str | None:
    """Why no such file system can be mounted here; None when it can."""
    if os.geteuid() != 0:
        return "only root mounts images"
    if shutil.which(_MAKE[kind][1][0]) is None:
        return f"{_MAKE[kind][1][0]} is not installed"
    tried = subprocess.run(["losetup", "-f"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no loop device: {tried.stderr.strip()}"


def skip_without(kind: str) -> None:
    reason = why_not(kind)
    if reason is not None:
        pytest.skip(reason)


def make_image(kind: str, image: Path) -> None:
    size, command = _MAKE[kind]
    with image.open("xb") as file:
        file.truncate(size)
    subprocess.run([*command, str(image)], check=True, capture_output=True)


def copy_image(image: Path, target: Path) -> None:
    """Most of an image is holes."""
    subprocess.run(["cp", "--sparse=always", str(image), str(target)], check=True)


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    """The loop device goes with the mount."""
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(at)], check=True, capture_output=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True, capture_output=True)


class CutOffDisk(Disk):
    """At change `at` another file of the file system is synced; then the file system has no disk any more.

    The process goes on for as long as it takes to close what it has open.
    """

    def __init__(self, mount: Path, at: int) -> None:
        self._mount, self._left = mount, at

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        if operation == "close":
            return super().call(operation, path, act)
        if self._left < 0:
            raise Crash(operation)
        if operation not in _LOOKS_ONLY:
            if self._left == 0:
                self.cut_off()
                raise Crash(operation)
            self._left -= 1
        return super().call(operation, path, act)

    def cut_off(self) -> None:
        self._left = -1
        sync_something_else(self._mount)
        descriptor = os.open(self._mount, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_THE_LOG))
        finally:
            os.close(descriptor)


def sync_something_else(mount: Path) -> None:
    """What another tenant does at any time; it takes everybody's names to the disk, and nobody else's data."""
    descriptor = os.open(mount / "something-else", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"something else")
    os.fsync(descriptor)
    os.close(descriptor)
