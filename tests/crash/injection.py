"""Faults at single calls to the system, put there by strace; the process that makes them is a child of a driver."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# What a vault may do to a disk, by any name that a C library or a later vault may give it; names that this machine
# does not know are passed over.
CALLS = (
    *("open", "openat", "creat", "close", "read", "pread64", "preadv", "preadv2"),
    *("write", "pwrite64", "pwritev", "pwritev2", "fallocate", "ftruncate", "truncate", "sync_file_range"),
    *("fsync", "fdatasync", "flock", "fcntl", "stat", "lstat", "newfstatat", "fstat", "statx", "getdents64"),
    *("mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "rename", "renameat", "renameat2", "link", "linkat"),
    *("symlink", "symlinkat", "readlink", "readlinkat", "statfs", "fstatfs"),
)
_FILTER = ",".join(f"?{call}" for call in CALLS)
_PATIENCE_S = 60
_COUNTED = re.compile(r"^(?:(?P<pid>\d+) +)?(?P<call>[a-z0-9_]+)\(")


@cache
def why_not() -> str | None:
    """Why strace cannot be used here; None when it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(
        ["strace", "-qq", "-e", "trace=?close", "-e", "inject=?close:error=EIO:when=9999", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE_S,
    )
    return None if tried.returncode == 0 else f"strace does not work: {tried.stderr.strip()}"


needs_strace = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Driver:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, job: Mapping[str, object], *inject: str) -> dict[str, Any]:
        """What the child said: `done`, `failed` with a type, or `untyped`; and `signal` if it died of one."""
        child = self.start(job)
        with _traced(child, *inject) if inject else nullcontext():
            self.go()
            return self.answer()

    def start(self, job: Mapping[str, object]) -> int:
        """The process that has the job and waits for `go`."""
        self._say(json.dumps(job))
        return int(self._hear())

    def go(self) -> None:
        self._say("")

    def answer(self) -> dict[str, Any]:
        """As `run` tells it, once the process has ended."""
        return json.loads(self._hear())  # type: ignore[no-any-return]

    def trace(self, job: Mapping[str, object], trace: Path, *options: str) -> list[str]:
        """A line for each call that the job makes, as strace writes them. options: more of them, for strace."""
        child = self.start(job)
        with _traced(child, "-o", str(trace), *options):
            self.go()
            answer = self.answer()
        assert "done" in answer, answer
        return trace.read_text().splitlines()

    def count(self, job: Mapping[str, object], trace: Path, *options: str) -> Counter[str]:
        """How often the job makes each call; of several threads, the one that makes most."""
        of_thread = Counter(
            (found["pid"], found["call"]) for found in map(_COUNTED.match, self.trace(job, trace, *options)) if found
        )
        most: Counter[str] = Counter()
        for (_, call), number in of_thread.items():
            most[call] = max(most[call], number)
        return most

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the driver died"
        return line


@contextmanager
def running_driver(warm: Path, module: str = "tests.crash.driver") -> Iterator[Driver]:
    """warm: a new directory, which the driver tries everything out on. module: the driver, as `tests.crash.children` is
    used."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(warm)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield Driver(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _traced(child: int, *options: str) -> Iterator[None]:
    """strace is attached to the process inside; it goes with the process."""
    strace = subprocess.Popen(
        ["strace", "-f", "-p", str(child), "-e", f"trace={_FILTER}", *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert strace.stderr is not None
        attached = strace.stderr.readline()
        assert "attached" in attached, attached
        yield
        strace.communicate(timeout=_PATIENCE_S)
    finally:
        strace.kill()
        strace.communicate()
