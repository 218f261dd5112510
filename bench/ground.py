"""Where is written: disk blocks that have been written before, so that every write costs the same.

Blocks that nobody has touched yet are several times slower on virtual disks, and freed blocks may become so again. As
root a file system of our own lies in an image that was written once; else what the directory offers is used, and said.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.ratios import timed

_BLOCK = 8 << 20


@dataclass(frozen=True)
class Ground:
    directory: Path
    state: str


@contextmanager
def ground(directory: Path | None, num_bytes: int) -> Iterator[Ground]:
    """Room for `num_bytes`, in `directory` or where temporary files go; nothing is left of it."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as name:
        place = Path(name)
        with ExitStack() as cleanup:
            mounted = _mounted(place, num_bytes, cleanup) if os.geteuid() == 0 else None
            if mounted is not None:
                yield Ground(mounted, f"ext4 in a prewritten image of {num_bytes >> 20} MiB (loop device, direct-io)")
                return
            _write_zeros(place / "warm", num_bytes)
            (place / "warm").unlink()
            yield Ground(place, "the directory's own file system, as many blocks written once and freed before")


def _mounted(place: Path, num_bytes: int, cleanup: ExitStack) -> Path | None:
    image, target = place / "image", place / "mounted"
    _write_zeros(image, num_bytes)
    target.mkdir()
    options = "nodiscard,lazy_itable_init=0,lazy_journal_init=0"
    try:
        _run("mkfs.ext4", "-q", "-F", "-b", "4096", "-E", options, str(image))
        device = _run("losetup", "--direct-io=on", "-f", "--show", str(image)).strip()
        cleanup.callback(_run, "losetup", "-d", device)
        _run("mount", "-o", "nodiscard", device, str(target))
        cleanup.callback(_run, "umount", str(target))
    except (OSError, subprocess.CalledProcessError):
        image.unlink()
        return None
    return target


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _write_zeros(path: Path, num_bytes: int) -> None:
    zeros = bytes(_BLOCK)
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-num_bytes // _BLOCK)):
            file.write(zeros)
        os.fsync(file.fileno())


def raw_write(directory: Path, image: memoryview) -> float:
    """Seconds of a plain buffered write of these bytes to a new file, its fsync and the directory's."""
    path = directory / "raw"

    def act() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        at = 0
        while at < image.nbytes:
            at += os.pwrite(descriptor, image[at : at + _BLOCK], at)
        os.fsync(descriptor)
        os.close(descriptor)
        descriptor = os.open(directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    seconds = timed(act)
    path.unlink()
    return seconds


def forget(*paths: Path) -> None:
    """Out of the page cache with these files, which are on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def raw_read(paths: list[Path], memory: memoryview) -> float:
    """Seconds of a plain cold read of these files into memory that is there."""
    forget(*paths)

    def act() -> None:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            at = 0
            while count := os.preadv(descriptor, [memory[:_BLOCK]], at):
                at += count
            os.close(descriptor)

    return timed(act)


def empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name == "lost+found":
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
