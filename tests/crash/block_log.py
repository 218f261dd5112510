"""A disk whose every write and flush is logged, in the order in which they came: a file in FUSE, for a loop device.

    python -m tests.crash.block_log MOUNTPOINT IMAGE LOG

The mount point then holds one file, `disk`, with the bytes of IMAGE, to which they are written too. Needs the package
mfusepy, and libfuse.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RECORD = struct.Struct("<QQ")
_FLUSH = (1 << 64) - 1


@dataclass(frozen=True)
class Write:
    offset: int
    data: bytes


def read_log(log: Path) -> tuple[list[list[Write]], list[int]]:
    """What was written between the flushes, and at how many bytes of log each of those began."""
    epochs: list[list[Write]] = [[]]
    starts = [0]
    raw = log.read_bytes()
    position = 0
    while position < len(raw):
        offset, length = _RECORD.unpack_from(raw, position)
        position += _RECORD.size
        if offset == _FLUSH:
            epochs.append([])
            starts.append(position)
            continue
        epochs[-1].append(Write(offset, raw[position : position + length]))
        position += length
    return epochs, starts


def replay(epochs: list[list[Write]], until: int, image: Path, chance: random.Random) -> None:
    """What was flushed before epoch `until` is on the disk, and of that epoch's writes any."""
    with image.open("r+b") as file:
        for number, epoch in enumerate(epochs[: until + 1]):
            for write in epoch:
                if number < until or chance.random() < 0.5:
                    file.seek(write.offset)
                    file.write(write.data)


@contextmanager
def logging_disk(image: Path, log: Path, mountpoint: Path) -> Iterator[Path]:
    """The path of a file that has the bytes of `image`, to which it writes."""
    mountpoint.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.block_log", str(mountpoint), str(image), str(log)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield mountpoint / "disk"
    finally:
        subprocess.run(["umount", str(mountpoint)], check=False, capture_output=True)
        try:
            process.wait(20)
        finally:
            process.kill()
            process.communicate()


class _Disk:
    use_ns = True

    def __init__(self, image: Path, log: Path) -> None:
        self._image = os.open(image, os.O_RDWR)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def init(self, path: str) -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path == "/disk":
            return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": os.fstat(self._image).st_size}
        raise OSError(errno.ENOENT, path)

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", "disk"]

    def open(self, path: str, flags: int) -> int:
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(self._image, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        os.write(self._log, _RECORD.pack(offset, len(data)) + data)
        return os.pwrite(self._image, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.write(self._log, _RECORD.pack(_FLUSH, 0))
        return 0


def main(mountpoint: Path, image: Path, log: Path) -> None:
    import mfusepy

    operations: Any = type("Operations", (_Disk, mfusepy.Operations), {})(image, log)
    mfusepy.FUSE(operations, str(mountpoint), foreground=True, nothreads=True, max_write=131072)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
