"""The one thread that writes: whatever came while it wrote goes into its next transaction, under one fsync.

Two kinds of writes. A *refusable* one is tried once: when its transaction fails, nothing of it stays in the database
and whoever asked is told at once. Everything else is kept until it is durable, in order, and what comes later waits
behind it. After a failure the rest is tried again at once without the refusable writes, which tells a disk that fails
from one that had no room for something big; only then is the writer unavailable, and tries again ever less often, or
when another write comes.

After a failure all connections are made anew, the reader's too: a lock that could not be let go of goes with the last
of them. Only where room is all that is missing the reader's stays, for there may be none for opening it again.

A commit that failed may have been done all the same: SQLite's log may hold the whole transaction although its fsync
failed, and a crash would bring it back. What is kept is written so that doing it twice changes nothing. What was
refused is *withdrawn*: the next transaction begins by deleting it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from gateway.store.callbacks import Callback, LoopCallbacks
from gateway.store.database import is_out_of_room
from gateway.store.errors import JournalUnavailable
from gateway.store.writes import probe

log = logging.getLogger(__name__)

Write = Callable[[Connection], None]

# One transaction is not so long that those who came just after it wait for much more than their own bytes.
_BATCH_BYTES = 32 << 20
_BATCH_WRITES = 1000
# How long a lazy write waits for company.
LAZY_S = 1.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# How long a journal that is being closed goes on trying.
_LAST_TRIES_S = 5.0


@dataclass(frozen=True, eq=False)
class Refusal:
    """Makes a write refusable. withdraw: deletes what it wrote, if it is there."""

    on_failed: Callable[[JournalUnavailable], None]
    withdraw: Write


@dataclass(frozen=True, eq=False)
class Queued:
    """due: when it is to be written at the latest, by the monotonic clock."""

    write: Write
    on_durable: Callback | None
    refusal: Refusal | None
    num_bytes: int
    due: float


class Writer:
    """`put` is for the event loop, everything else here for the thread."""

    def __init__(self, engine: Engine, where: str, disconnect_others: Callable[[], None]) -> None:
        """where: names the database to people. disconnect_others: closes all other connections to it."""
        self._engine = engine
        self._disconnect_others = disconnect_others
        self._where = where
        self._callbacks = LoopCallbacks()
        self._connection: Connection | None = None
        # Guards all that follows but `_withdrawals`, which is the thread's alone.
        self._changed = threading.Condition()
        self._queue: deque[Queued] = deque()
        self._failure: JournalUnavailable | None = None
        self._failed_at = self._retry_at = 0.0
        self._pause_s = _SHORTEST_PAUSE_S
        self._give_up_at: float | None = None
        self._withdrawals: list[Write] = []
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def is_available(self) -> bool:
        return self._failure is None

    def put(
        self,
        write: Write,
        on_durable: Callback | None = None,
        refusal: Refusal | None = None,
        num_bytes: int = 0,
        is_lazy: bool = False,
    ) -> None:
        """Returns at once. While the writer is unavailable a refusable write is refused without being tried."""
        self._callbacks.use_running_loop()
        now = time.monotonic()
        with self._changed:
            assert self._give_up_at is None, "the journal is closed"
            if refusal is not None and self._failure is not None:
                self._callbacks.call([partial(refusal.on_failed, self._failure)])
                return
            self._queue.append(Queued(write, on_durable, refusal, num_bytes, now + LAZY_S if is_lazy else now))
            if not is_lazy:
                self._retry_at = min(self._retry_at, self._failed_at + _SHORTEST_PAUSE_S)
            self._changed.notify()

    def close(self) -> None:
        """Blocking: write what there is and end the thread; raises `JournalUnavailable` if the disk takes no more."""
        with self._changed:
            self._give_up_at = time.monotonic() + _LAST_TRIES_S
            self._changed.notify()
        self._thread.join()
        if self._queue:
            raise self._failure or JournalUnavailable(f"{self._where} was not written to its end")

    def _run(self) -> None:
        try:
            while self._wait():
                self._write()
        finally:
            # Also when a bug ended the thread: nobody may wait for it.
            with self._changed:
                failure = self._failure or JournalUnavailable(f"{self._where} is closed")
                self._callbacks.call(self._refuse_all(failure))
            self._disconnect()

    def _wait(self) -> bool:
        """Until there is something to be tried; False when there is nothing more to do."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._give_up_at is not None and self._is_over(now):
                    return False
                if (moment := self._next_try()) is not None and moment <= now:
                    return True
                self._changed.wait(None if moment is None else moment - now)

    def _is_over(self, now: float) -> bool:
        """Of a writer that is being closed."""
        assert self._give_up_at is not None
        if self._failure is not None and now > self._give_up_at:
            return True
        return not self._queue and not self._withdrawals

    def _next_try(self) -> float | None:
        if self._failure is not None:
            return self._retry_at
        if self._give_up_at is not None or len(self._queue) > _BATCH_WRITES:
            return 0.0
        return min((queued.due for queued in self._queue), default=None)

    def _write(self) -> None:
        with self._changed:
            batch = self._take()
        failure = lasting = self._transact(batch)
        if failure is not None and self._failure is None:
            lasting = self._transact([queued for queued in batch if queued.refusal is None])
        self._settle(batch, failure, lasting)

    def _take(self) -> list[Queued]:
        batch: list[Queued] = []
        num_bytes = 0
        for queued in self._queue:
            num_bytes += queued.num_bytes
            if batch and (num_bytes > _BATCH_BYTES or len(batch) == _BATCH_WRITES):
                break
            batch.append(queued)
        return batch

    def _transact(self, batch: Sequence[Queued]) -> JournalUnavailable | None:
        """What kept it from becoming durable. A batch of nothing tries whether anything can be written."""
        is_committing = False
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
            for withdraw in self._withdrawals:
                withdraw(self._connection)
            if self._withdrawals or not batch:
                # A deletion that finds nothing writes nothing; only what is written covers what the log still holds.
                probe(self._connection)
            for queued in batch:
                queued.write(self._connection)
            is_committing = True
            self._connection.commit()
        except DBAPIError as error:
            if is_committing:
                self._withdrawals += [queued.refusal.withdraw for queued in batch if queued.refusal is not None]
            self._disconnect()
            if not is_out_of_room(error):
                self._disconnect_others()
            return JournalUnavailable(f"{self._where} cannot be written: {error.orig}")
        self._withdrawals.clear()
        return None

    def _settle(
        self, batch: Sequence[Queued], failure: JournalUnavailable | None, lasting: JournalUnavailable | None
    ) -> None:
        """failure: of the whole batch; lasting: of what is kept of it."""
        told: list[Callback] = []
        with self._changed:
            for queued in batch:
                self._queue.popleft()
                if queued.refusal is not None and failure is not None:
                    told.append(partial(queued.refusal.on_failed, failure))
                elif queued.on_durable is not None and lasting is None:
                    told.append(queued.on_durable)
            if lasting is not None:
                self._queue.extendleft(queued for queued in reversed(batch) if queued.refusal is None)
            told += self._note(lasting)
            # Last: who is told looks at once whether the journal is available.
            self._callbacks.call(told)

    def _note(self, failure: JournalUnavailable | None) -> list[Callback]:
        """Whether writing works; what is to be told of it."""
        if failure is None:
            if self._failure is not None:
                log.warning("%s can be written again", self._where)
            self._failure, self._pause_s = None, _SHORTEST_PAUSE_S
            return []
        if self._failure is None:
            log.error("%s; nothing is accepted until it can", failure)
        self._failed_at = time.monotonic()
        self._retry_at = self._failed_at + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return self._refuse_all(failure)

    def _refuse_all(self, failure: JournalUnavailable) -> list[Callback]:
        """Of what is queued all that may be refused; the rest stays in its order."""
        refusals = [queued.refusal for queued in self._queue if queued.refusal is not None]
        self._queue = deque(queued for queued in self._queue if queued.refusal is None)
        self._failure = failure
        return [partial(refusal.on_failed, failure) for refusal in refusals]

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None
