"""Makes one call of one rank to the file system fail, or kills the rank there, while a fault file asks for it.

The file holds `{"rank": r, "operation": "fsync", "nth": 1, "how": "EIO"}`; `how` is the name of an errno, or `SIGKILL`.
Calls are counted from when the file is there. Who makes which file is noted in `<fault file>.made`, a line for each.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from trainer_cell.vault.disk import Disk

T = TypeVar("T")


@contextmanager
def fault(file: Path, rank: int, operation: str, how: str, nth: int = 1) -> Iterator[None]:
    text = json.dumps({"rank": rank, "operation": operation, "nth": nth, "how": how})
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)
    try:
        yield
    finally:
        file.unlink()


def made(file: Path) -> list[tuple[int, str]]:
    """Which rank has made which file, in order."""
    book = Path(f"{file}.made")
    lines = book.read_text().splitlines() if book.exists() else []
    return [(int(rank), path) for rank, _, path in (line.partition(" ") for line in lines)]


def install(file: Path, rank: int) -> None:
    """In a rank, before its cell is built."""
    call = Disk.call
    book = os.open(f"{file}.made", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    counted = 0

    def faulty(self: Disk, operation: str, path: Path, act: Callable[[], T]) -> T:
        nonlocal counted
        if operation == "create":
            os.write(book, f"{rank} {path}\n".encode())
        asked = _asked(file)
        if asked is None:
            counted = 0
        elif (asked["rank"], asked["operation"]) == (rank, operation):
            counted += 1
            if counted == asked["nth"]:
                return call(self, operation, path, lambda: _fail(asked["how"]))
        return call(self, operation, path, act)

    Disk.call = faulty  # type: ignore[method-assign]


def _asked(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None


def _fail(how: str) -> Any:
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    number = getattr(errno, how)
    raise OSError(number, os.strerror(number))
