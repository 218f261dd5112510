"""One gateway after the other on the same disk, the earlier ones killed and not stopped; a cell may live through it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_link import CellLink
from gateway.scheduling.futures import Future
from gateway.scheduling.identity import tenant_digester
from gateway.scheduling.scheduler import Scheduler
from gateway.store.errors import JournalUnavailable
from gateway.store.journal import Journal
from gateway.store.writer import Queued
from tests.fakes.fake_cell import FakeCell
from tests.fakes.hold import Killed
from tests.gateway.scheduling.rig import SECRET, Rig, create, done, until
from tests.gateway.scheduling.stateful.process import ProcessDisk
from trainer_cell.vault.layout import Vault


class Life(Rig):
    """is_stuck: from when it is set on nothing more becomes durable. transact: how the writer tries a batch."""

    def __init__(self, socket_path: Path, root: Path, **options: Any) -> None:
        self.is_stuck = False
        self._disk = ProcessDisk(lambda: None)
        self.journal = Journal.open(f"sqlite:///{root / 'journal.sqlite3'}")
        writer = self.journal._writer
        self.transact, self._ended = writer._transact, threading.Event()
        writer._transact = self._transact_unless_stuck  # type: ignore[method-assign]
        vault, link = Vault(root / "checkpoints", self._disk), CellLink(socket_path)
        scheduler = Scheduler(link, Catalog(vault, tenant_digester(SECRET)), self.journal, **options)
        super().__init__(socket_path, vault, link, scheduler)
        scheduler.restore(self.journal.load())

    def _transact_unless_stuck(self, batch: Sequence[Queued]) -> JournalUnavailable | None:
        if not self.is_stuck:
            return self.transact(batch)
        self._ended.wait()
        return JournalUnavailable("the process is no more")

    def unstick(self) -> None:
        self.is_stuck = False
        self._ended.set()

    async def end(self) -> None:
        """As SIGKILL: what is not durable is lost, and nobody is told goodbye."""
        self.is_stuck = True
        self._ended.set()
        self._disk.end()
        writer = self.journal._writer
        writer.put = lambda *args, **kwargs: None  # type: ignore[method-assign]
        with writer._changed:
            writer._give_up_at = 0.0
            writer._changed.notify()
        await asyncio.to_thread(writer._thread.join)
        turns, upkeep = self.scheduler._turns, self.scheduler._upkeep
        for task in (turns._task, upkeep._task, *turns._publications.tasks):
            assert task is not None
            task.cancel()
            with suppress(asyncio.CancelledError, Killed):
                await task
        assert self.link._server is not None
        self.link._server.close()
        for connection in tuple(self.link._connections):
            connection.transport.abort()
        self.journal._writer._disconnect()
        self.journal._reader.disconnect()
        self.journal._engine.dispose()
        assert self.journal._lock is not None
        os.close(self.journal._lock)

    async def opened(self, tenant: str = "alice") -> str:
        """The id of a session that lasts."""
        return (await self.scheduler.visits.open(tenant)).session_id

    async def made(self, seed: int = 7, session: str | None = None) -> str:
        """The id of a model that lasts."""
        future = await self.created(seed, session)
        await done(future)
        return future.model_id

    async def created(self, seed: int = 7, session: str | None = None) -> Future:
        """The making of a model, once it is accepted."""
        at = session or await self.opened()
        return await self.scheduler.submit_create("alice", at, 0, create(seed=seed)).accepted()

    def again(self, future: Future) -> Future:
        """What this gateway knows of a future of another's."""
        return self.scheduler.futures.get(future.tenant, future.request_id)


class Lives:
    """gateway: the one that lives."""

    gateway: Life

    def __init__(self, root: Path, socket_path: Path, options: dict[str, Any]) -> None:
        self._root, self._socket_path, self._options = root, socket_path, options

    async def start(self) -> Life:
        self.gateway = Life(self._socket_path, self._root, **self._options)
        await self.gateway.scheduler.start()
        return self.gateway

    async def next(self, cell: FakeCell | None = None) -> Life:
        """The gateway is killed and another started, which has taken on `cell`, if one is given."""
        await self.gateway.end()
        self._socket_path.unlink(missing_ok=True)
        gateway = await self.start()
        if cell is not None:
            await until(lambda: gateway.scheduler.is_ready)
        return gateway


@asynccontextmanager
async def lives(root: Path, **options: Any) -> AsyncIterator[Lives]:
    Vault(root / "checkpoints").create()
    with tempfile.TemporaryDirectory(prefix="cell") as directory:
        all_lives = Lives(root, Path(directory) / "cell.sock", options)
        await all_lives.start()
        try:
            yield all_lives
        finally:
            all_lives.gateway.unstick()
            await all_lives.gateway.scheduler.stop(grace_s=0)
            await all_lives.gateway.journal.close()
