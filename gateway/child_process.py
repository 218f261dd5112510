"""A child process that dies with this one, whose output lands line by line in this one's log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO

from gateway import die_with_parent

_LAST_WORDS = 40
_LONGEST_LINE = 1 << 16


def log(text: str) -> None:
    """One line to stderr; a log nobody reads any more must not stop the service."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class ChildProcess:
    """Started by its constructor, inside a running event loop, in a session of its own (Ctrl-C is not for it).

    pid: of the command itself. last_line: the last complete line of its stdout.
    """

    def __init__(
        self, name: str, command: list[str], environment: Mapping[str, str], pass_fds: Collection[int] = ()
    ) -> None:
        wrapper = [sys.executable, "-I", "-S", str(Path(die_with_parent.__file__)), str(os.getpid())]
        self._name = name
        # Popen and not asyncio's: the pid must be known at once, or a sweep could take it for a stray.
        self._process = subprocess.Popen(
            [*wrapper, *command],
            env=environment,
            pass_fds=tuple(pass_fds),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.last_line = ""
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        assert self._process.stdout
        assert self._process.stderr
        self._readers = (
            asyncio.create_task(self._pass_on(self._process.stdout, is_stdout=True)),
            asyncio.create_task(self._pass_on(self._process.stderr, is_stdout=False)),
        )
        self._ended = asyncio.create_task(self._await_end())

    @property
    def last_words(self) -> str:
        return "\n".join(self._words)

    async def wait(self) -> int:
        """Its exit status, negative for a signal; its whole output is in the log then. May be cancelled freely."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> int:
        """Ask it to end, and end it when it has not by then."""
        self._signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            log(f"cellgate: {self._name} has not stopped in {grace_s:.0f} s and is killed")
            self.kill()
            return await self.wait()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Popen looks first whether it has been reaped: a pid is never signalled after it may be another's.
        self._process.send_signal(number)

    async def _await_end(self) -> int:
        descriptor = os.pidfd_open(self.pid)
        try:
            await _readable(descriptor)
        finally:
            os.close(descriptor)
        status = self._process.wait()
        # An orphan of the child may hold the pipes open; what the child itself wrote is there to be read at once.
        _, pending = await asyncio.wait(self._readers, timeout=1.0)
        for reader in pending:
            reader.cancel()
        return status

    async def _pass_on(self, pipe: IO[bytes], *, is_stdout: bool) -> None:
        os.set_blocking(pipe.fileno(), False)
        rest = b""
        with pipe:
            while True:
                await _readable(pipe.fileno())
                chunk = os.read(pipe.fileno(), 1 << 16)
                # A progress bar ends its lines with \r and is wanted while it moves.
                *lines, rest = re.split(rb"[\r\n]", rest + chunk)
                if not chunk or len(rest) > _LONGEST_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    if text := line.decode(errors="replace").rstrip():
                        self._note(text, is_stdout=is_stdout)
                if not chunk:
                    return

    def _note(self, text: str, *, is_stdout: bool) -> None:
        self._words.append(text)
        if is_stdout:
            self.last_line = text
        log(f"{self._name} | {text}")


async def _readable(descriptor: int) -> None:
    """Wait until a descriptor can be read (a pidfd: until its process has ended)."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
