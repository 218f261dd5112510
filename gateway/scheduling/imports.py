"""Imports that clients ask for: from directories the operator allows, one at a time, in the order they came.

They change no model: a checkpoint comes to be, of a model id of its own, and is loaded as any other is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gateway.scheduling.admission import fingerprinted
from gateway.scheduling.durable import durable
from gateway.scheduling.errors import ImportNotAllowed, QueueFull, Stopping, Unavailable
from gateway.scheduling.futures import Future, FutureBook
from gateway.scheduling.identity import digest_of, new_session_id
from gateway.scheduling.journal_rows import command_record, import_record, packed_outcome
from gateway.scheduling.model_queue import KeyBook
from gateway.scheduling.requests import ImportRequest
from gateway.scheduling.steady_clock import steady_time
from gateway.store.journal import Journal, JournalUnavailable
from gateway.store.records import Stored
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import StateSaved

Run = Callable[[str, str, ImportRequest, str], Coroutine[Any, Any, StateSaved | CommandFailed]]

_MOST_WAITING = 16
# Whatever the files are, they hold up other imports for no longer.
_DEADLINE_S = 3600


class Imports:
    """directories: those that may be imported from, with everything below; run: does one import, for a tenant and a
    model id, under a command id, and says how it went."""

    def __init__(self, futures: FutureBook, journal: Journal, directories: Sequence[Path], run: Run) -> None:
        self._futures = futures
        self._journal = journal
        self._directories = [directory.resolve() for directory in directories]
        self._run = run
        self._keys = KeyBook()
        self._waiting: deque[Future] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._is_stopping = False

    def allowed(self, path: str) -> tuple[Path, Path]:
        """The path with its links followed, and the directory that allows it.

        Raises `ImportNotAllowed`, which tells nothing of what is where; a look at the disk, so not for the event loop.
        """
        asked = Path(path)
        if asked.is_absolute() and "\0" not in path:
            # A loop of links, or a name that is too long: nobody is told which.
            with suppress(OSError, RuntimeError):
                resolved = asked.resolve()
                for directory in self._directories:
                    if resolved.is_relative_to(directory):
                        return resolved, directory
        raise ImportNotAllowed("path: this service imports only from directories its operator allows (--import-dir)")

    def submit(
        self, tenant: str, model_id: str | None, request: ImportRequest, idempotency_key: str | None = None
    ) -> Future:
        """Accept one; without a model id the checkpoint gets one of its own.

        The same key again answers with the same future. Raises `SequenceConflict`, `QueueFull`, `Stopping`.
        """
        if self._is_stopping:
            raise Stopping("the gateway is going down")
        _, digest = fingerprinted(request)
        digest = digest_of((model_id or "").encode() + b"\0" + digest)
        if idempotency_key is not None:
            known = self._keys.known(tenant, idempotency_key, digest)
            if known is not None:
                return self._futures.find(known) or self._futures.forgotten(known, tenant, model_id or "", request)
        if len(self._waiting) >= _MOST_WAITING:
            raise QueueFull(f"{_MOST_WAITING} imports are waiting already")
        future = self._futures.open(tenant, model_id or f"{new_session_id()}:import:0", request)
        key_digest = None
        if idempotency_key is not None:
            key_digest = digest
            self._keys.accept(tenant, idempotency_key, future.request_id, digest)
        self._journal.accept(
            command_record(future, None, digest, idempotency_key, key_digest),
            import_record(future) if model_id is None else None,
            partial(self._on_accepted, future),
            partial(self._on_not_accepted, future, idempotency_key),
        )
        return future

    def restore(self, stored: Stored) -> None:
        """Know of what a process before had accepted; before `start`."""
        for command in stored.commands:
            if command.operation != "import":
                continue
            if command.key is not None and command.key_digest is not None:
                self._keys.accept(command.tenant, command.key, command.request_id, command.key_digest)
            future = self._futures.find(command.request_id)
            if future is not None and command.finished is None:
                self._waiting.append(future)

    def start(self) -> None:
        """Begin with what a process before left."""
        if self._waiting and self._worker is None and not self._is_stopping:
            self._worker = asyncio.create_task(self._work())

    def _on_accepted(self, future: Future) -> None:
        future.accept()
        self._waiting.append(future)
        self.start()

    def _on_not_accepted(self, future: Future, key: str | None, why: JournalUnavailable) -> None:
        if key is not None:
            self._keys.withdraw(future.tenant, key)
        self._futures.withdraw(future)
        future.refuse(Unavailable(str(why)))

    async def stop(self) -> None:
        """The one that runs is broken off, which leaves nothing of it; it and those that wait are for the next."""
        self._is_stopping = True
        worker = self._worker
        if worker is not None:
            worker.cancel()
            await asyncio.wait([worker])

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._do(self._waiting.popleft())
        finally:
            self._worker = None

    async def _do(self, future: Future) -> None:
        assert isinstance(future.request, ImportRequest)
        future.state = "running"
        outcome: StateSaved | CommandFailed
        command_id = "import-" + future.request_id.removeprefix("future-")
        try:
            async with asyncio.timeout(_DEADLINE_S):
                outcome = await self._run(future.tenant, future.model_id, future.request, command_id)
        except TimeoutError:
            outcome = CommandFailed(ErrorKind.DEADLINE_EXCEEDED, f"the import took over {_DEADLINE_S} s")
        await durable(partial(self._journal.answer, future.request_id, packed_outcome(future, outcome), steady_time()))
        self._futures.finish(future, outcome)
