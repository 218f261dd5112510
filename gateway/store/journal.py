"""The journal: what was accepted, what became of it, and what must be done again after a crash.

An answer of 200 stands on `accept`, an outcome that is told stands on `complete`: both call back when the row is
durable. All writes keep the order they were asked for in, across models and kinds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from sqlalchemy import URL, Engine, make_url
from sqlalchemy.exc import DBAPIError

from gateway.store import writes
from gateway.store.callbacks import Callback
from gateway.store.database import check, describe, lock_file, new_engine, release
from gateway.store.errors import JournalUnavailable, JournalUnusable
from gateway.store.forgetting import prune
from gateway.store.migration import migrate
from gateway.store.reader import Reader
from gateway.store.records import CommandRecord, ModelRecord, SessionRecord, Stored
from gateway.store.writer import Refusal, Writer

__all__ = ["Journal", "JournalUnavailable", "JournalUnusable"]

OnFailed = Callable[[JournalUnavailable], None]


class Journal:
    """One database, one writing thread. What writes is for the event loop and returns at once.

    Callbacks run in the event loop, in order. Unless said otherwise a write is never given up: it is tried again until
    it is durable, and all that comes after it waits.
    """

    def __init__(self, engine: Engine, where: str, lock: int | None) -> None:
        """Of a database that has the newest tables; see `open`."""
        self._engine = engine
        self._lock = lock
        self._is_closed = False
        self._reader = Reader(engine, where)
        self._writer = Writer(engine, where, self._reader.disconnect)

    @classmethod
    def open(cls, url: str) -> Journal:
        """Blocking: make or migrate the database and start the writer; raises `JournalUnusable`."""
        address = make_url(url)
        where = describe(address)
        lock = lock_file(address)
        try:
            engine = _opened(address, where)
        except JournalUnusable:
            release(lock)
            raise
        return cls(engine, where, lock)

    @property
    def is_available(self) -> bool:
        """False while nothing can be written; turns True by itself."""
        return self._writer.is_available

    def load(self) -> Stored:
        """Blocking: everything. Stored bytes that have changed on the disk are left out, and told in the log; raises
        `JournalUnusable`."""
        try:
            return self._reader.load()
        except JournalUnavailable as error:
            raise JournalUnusable(str(error)) from error

    async def payloads(self, request_ids: Sequence[str]) -> dict[str, bytes]:
        """Of those commands that have one and whose is undamaged; raises `JournalUnavailable`."""
        return await asyncio.to_thread(self._reader.payloads, tuple(request_ids))

    def accept(
        self, command: CommandRecord, model: ModelRecord | None, on_durable: Callback, on_failed: OnFailed
    ) -> None:
        """Exactly one of the callbacks is called; after `on_failed` nothing of it is in the journal.

        model: the first row of the model that the command makes. Tried once; while the journal is unavailable, not.
        """
        self._writer.put(
            partial(writes.insert_command, command=command, model=model),
            on_durable,
            Refusal(on_failed, partial(writes.delete_command, command=command, model=model)),
            num_bytes=len(command.payload or b"") + len(command.request),
        )

    def withdraw(self, command: CommandRecord, on_durable: Callback) -> None:
        """As if it had not been accepted."""
        self._writer.put(partial(writes.delete_command, command=command, model=None), on_durable)

    def open_session(self, session: SessionRecord, on_durable: Callback, on_failed: OnFailed) -> None:
        """As `accept`."""
        self._writer.put(
            partial(writes.insert_session, session=session),
            on_durable,
            Refusal(on_failed, partial(writes.delete_session, session_id=session.session_id)),
        )

    def finish_session(self, session: SessionRecord, on_durable: Callback) -> None:
        self._writer.put(partial(writes.finish_session, session=session), on_durable)

    def note_attempt(self, request_id: str, attempts: int, on_durable: Callback) -> None:
        self._note(request_id, {"attempts": attempts}, on_durable)

    def note_version(self, request_id: str, version: str, on_durable: Callback) -> None:
        self._note(request_id, {"version": version}, on_durable)

    def note_turn(self, request_id: str, turn: int) -> None:
        self._note(request_id, {"turn": turn})

    def note_told(self, request_id: str, moment: int, told: float) -> None:
        """Durable within about a second, and no later than any later write."""
        self._note(request_id, {"told_moment": moment, "told": told}, is_lazy=True)

    def complete(
        self,
        request_id: str,
        turn: int,
        outcome: bytes,
        finished: float,
        version: str | None,
        model: ModelRecord,
        on_durable: Callback,
    ) -> None:
        """Outcome and model in one transaction. Of `model`: its facts and last request."""
        values = {"turn": turn, "finished": finished, "version": version}
        self._writer.put(
            partial(writes.complete, request_id=request_id, values=values, outcome=outcome, model=model),
            on_durable,
            num_bytes=len(outcome),
        )

    def answer(self, request_id: str, outcome: bytes, finished: float, on_durable: Callback) -> None:
        """As `complete`, of a command that changes no model and has no turn among a model's."""
        values = {"turn": -1, "finished": finished}
        write = partial(writes.answer, request_id=request_id, values=values, outcome=outcome)
        self._writer.put(write, on_durable, num_bytes=len(outcome))

    def note_snapshot(self, model_id: str, version: str, turn: int, on_durable: Callback) -> None:
        """Drops the payloads of the finished commands whose effect it holds."""
        self._writer.put(partial(writes.note_snapshot, model_id=model_id, version=version, turn=turn), on_durable)

    def drop_model(self, model_id: str, on_durable: Callback | None = None) -> None:
        """It was unloaded: it has no snapshot any more, and its commands no payloads."""
        self._writer.put(partial(writes.drop_model, model_id=model_id), on_durable)

    def when_written(self, on_durable: Callback) -> None:
        """Once all that was asked for so far is durable."""
        self._writer.put(writes.nothing, on_durable)

    def prune(self, told_before: float, untold_before: float, remembered: int) -> None:
        """Forget what is neither needed nor asked for any more; see `forgetting.prune`."""
        self._writer.put(partial(prune, told_before=told_before, untold_before=untold_before, remembered=remembered))

    async def close(self) -> None:
        """Everything is written and its callbacks called; raises `JournalUnavailable` if the disk takes it no more.
        Again: nothing more happens."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await asyncio.to_thread(self._writer.close)
        finally:
            self._reader.disconnect()
            self._engine.dispose()
            release(self._lock)

    def _note(
        self,
        request_id: str,
        values: Mapping[str, object],
        on_durable: Callback | None = None,
        is_lazy: bool = False,
    ) -> None:
        write = partial(writes.note_command, request_id=request_id, values=values)
        self._writer.put(write, on_durable, is_lazy=is_lazy)


def _opened(address: URL, where: str) -> Engine:
    """With the newest tables; raises `JournalUnusable`."""
    engine = new_engine(address)
    try:
        with engine.begin() as connection:
            check(connection, where)
            migrate(connection, where)
    except DBAPIError as error:
        engine.dispose()
        raise JournalUnusable(
            f"{where} cannot be opened: {error.orig}. Make room or mend the disk; a damaged file can be restored from "
            "a backup, or moved away to start without what it holds"
        ) from error
    except JournalUnusable:
        engine.dispose()
        raise
    return engine
