"""One machine: its disks, a gateway and a cell, each of which can be ended at any moment and started again."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import pytest
from sqlalchemy import Engine, make_url

from gateway.scheduling.catalog import Catalog
from gateway.scheduling.futures import FutureBook
from gateway.scheduling.identity import request_id_of, tenant_digester
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.sessions import SessionBook
from gateway.scheduling.snapshot_rules import SnapshotRules
from gateway.store.database import lock_file, new_engine
from gateway.store.journal import Journal
from tests.gateway.scheduling.rig import SECRET
from tests.gateway.scheduling.stateful.cell import SimulatedCell
from tests.gateway.scheduling.stateful.clock import Clock
from tests.gateway.scheduling.stateful.ids import Ids
from tests.gateway.scheduling.stateful.loop import Crash, SimulatedLoop
from tests.gateway.scheduling.stateful.losses import Losses
from tests.gateway.scheduling.stateful.process import ProcessDisk, StateDisk, SteppedWriter
from tests.gateway.scheduling.stateful.tellings import Tellings
from tests.gateway.scheduling.stateful.wire import Connection, SimulatedLink
from trainer_cell.vault.layout import Vault

GAP_PATIENCE_S = 20.0
SILENCE_S = 60.0


@lru_cache(maxsize=1)
def engine_of(journal_path: Path) -> Engine:
    """The same for one gateway after the other: nearly all that it takes to make a statement is kept with it. What it
    has open is not."""
    return new_engine(make_url(f"sqlite:///{journal_path}"))


class Gateway:
    """One life of the gateway's process. Within `Clock.told_to_all`."""

    def __init__(self, world: World) -> None:
        self.loop = SimulatedLoop(world.clock, world.short_s)
        self.loop.on_crash = self._end
        self.link = SimulatedLink()
        self._connections: list[Connection] = []
        self._disk = ProcessDisk(self.loop.work)
        vault = Vault(world.root, self._disk)
        engine = engine_of(world.journal_path)
        self._engine = engine
        self._lock = lock_file(engine.url)
        self._world = world
        self.journal = Journal(engine, "the journal", None)
        now = world.clock.monotonic
        self.scheduler = Scheduler(
            self.link,
            Catalog(vault, tenant_digester(SECRET)),
            self.journal,
            SessionBook(now=now),
            FutureBook(now=now),
            rules=SnapshotRules(steps=2),
            session_silence_s=SILENCE_S,
            gap_patience_s=GAP_PATIENCE_S,
            on_crash=world.note_bug,
        )
        queues = self.scheduler._queues
        self.link.on_hello = world.losses.note_hello
        self.link.on_hung_up = lambda epoch: world.losses.note_hung_up(queues.values(), epoch)
        self.start: asyncio.Task[None] = self.loop.create_task(self._start())

    async def _start(self) -> None:
        stored = self.journal.load()
        self._world.tellings.note_reading(self._world.lives, stored)
        self.scheduler.restore(stored)
        await self.scheduler.start()

    def connect(self, connection: Connection) -> None:
        self._connections.append(connection)
        self.link.take(connection, self.loop)

    def _end(self) -> None:
        """SIGKILL: what is open is closed by the kernel, and nothing else happens."""
        world = self._world
        world.losses.note_gateway_lost(self.scheduler._queues.values(), self.scheduler.futures._futures.values())
        world.tellings.note_end(world.lives, world.clock.now, world.state_disk)
        self.journal._writer.end()  # type: ignore[attr-defined]
        self._disk.end()
        for connection in self._connections:
            connection.end_of_gateway()

    def bury(self) -> None:
        """After its end: nothing of it is to run when its memory is freed."""
        self.loop.crash_at = 0
        self.link.on_hung_up = lambda epoch: None
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            # Its last words reach nobody.
            with suppress(BaseException):
                task.get_coro().close()
        self.journal._reader.disconnect()
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
        self.loop._closed = True  # type: ignore[attr-defined]


class World:
    """gateway / cell: None while there is none.

    chance: decides how long everything takes. lives: of gateways, the one that there is or was last being the last.
    """

    def __init__(self, directory: Path, seed: int, slots: int) -> None:
        self.clock = Clock()
        self.chance = random.Random(seed)
        self.state_disk = StateDisk()
        self.root, self.journal_path = directory / "checkpoints", directory / "journal.sqlite3"
        self.gateway: Gateway | None = None
        self.cell: SimulatedCell | None = None
        self.cells: list[SimulatedCell] = []
        self.lives = 0
        self.losses, self.tellings = Losses(), Tellings()
        self._ids = Ids(seed)
        self.bugs: list[str] = []
        self.publish_s = 0.5
        self.slots = slots

    # How long things take

    def short_s(self) -> float:
        return self.chance.choice((0.0, 0.0001, 0.002))

    def command_s(self) -> float:
        return self.chance.choice((0.001, 0.01, 0.2))

    def long_s(self) -> float:
        return self.chance.random() * self.publish_s

    # Its processes

    def start_gateway(self) -> None:
        if self.gateway is None:
            SteppedWriter.clock, SteppedWriter.disk = self.clock, self.state_disk
            self.lives += 1
            self.gateway = Gateway(self)

    def start_cell(self) -> None:
        if self.cell is None or not self.cell.is_alive:
            self.cell = SimulatedCell(self.root, self.clock, self, self.slots, self.command_s, self.long_s)
            self.cells.append(self.cell)

    def kill_gateway(self) -> None:
        gateway, self.gateway = self.gateway, None
        if gateway is not None:
            gateway._end()
            gateway.bury()

    def kill_cell(self) -> None:
        if self.cell is not None and self.cell.is_alive:
            self.cell.kill(self.chance.random() < 0.5)

    def dial(self, cell: SimulatedCell) -> Connection | None:
        gateway = self.gateway
        if gateway is None or not gateway.link.is_listening:
            return None
        connection = Connection(self.clock, self.short_s, cell, gateway.loop)
        gateway.connect(connection)
        return connection

    def has_asked(self, command_id: str) -> bool:
        futures = self.gateway.scheduler.futures if self.gateway is not None else None
        return futures is not None and futures.find(request_id_of(command_id)) is not None

    def has_failed(self, command_id: str) -> bool:
        """By no fault of its own, in any cell."""
        return any(command_id in cell.faulty for cell in self.cells)

    @property
    def living(self) -> list[str]:
        """Epochs of cells that are alive."""
        return [cell.epoch for cell in self.cells if cell.is_alive]

    def note_bug(self) -> None:
        self.bugs.append("the gateway ended by a bug")

    def heal(self) -> None:
        """Nothing goes wrong from now on."""
        self.state_disk.is_full, self.state_disk.failures, self.state_disk.delay_s = False, 0, 0.001
        self.publish_s = min(self.publish_s, 1.0)
        if self.gateway is not None:
            self.gateway.loop.crash_at = None
        if self.cell is not None:
            self.cell.die_at, self.cell.faults = None, 0

    def end(self) -> None:
        self.kill_gateway()
        self.kill_cell()

    @contextmanager
    def told_to_all(self) -> Iterator[None]:
        """Within the block gateways live in this world."""
        with self.clock.told_to_all(), self._ids.given_to_all(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("gateway.store.journal.Writer", SteppedWriter)
            yield

    # Its time

    def run(self, until: Callable[[], bool] = lambda: False, steps: int | None = None, for_s: float = 5.0) -> None:
        """Until something is so, for so many steps, or for a time, whichever is first."""
        end = self.clock.now + for_s
        self.clock.later(for_s, lambda: None)
        if self.gateway is None:
            while self.clock.now < end and self.clock.advance(end):
                pass
            return
        try:
            self.gateway.loop.run(lambda: until() or self.clock.now >= end, steps)
        except Crash:
            dead, self.gateway = self.gateway, None
            dead.bury()
        if self.gateway is not None:
            self._check_bugs(self.gateway)

    def _check_bugs(self, gateway: Gateway) -> None:
        assert not self.bugs, self.bugs
        for context in gateway.loop.errors:
            raise AssertionError(context.get("message")) from context.get("exception")
        if gateway.start.done():
            gateway.start.result()


def template(directory: Path) -> None:
    """An empty checkpoint root and journal, to be copied: making them takes longer than most programs."""
    directory.mkdir()
    Vault(directory / "checkpoints").create()
    journal = Journal.open(f"sqlite:///{directory / 'journal.sqlite3'}")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(journal.close())
    loop.close()


def copy_of(template: Path, directory: Path) -> None:
    """In place of what is there."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(template, directory)
