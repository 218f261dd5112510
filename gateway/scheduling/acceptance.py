"""From a request at the door to a command in the journal and in its place; or to nothing at all."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from gateway.scheduling.backlog import Backlog
from gateway.scheduling.errors import Unavailable
from gateway.scheduling.futures import Future, FutureBook
from gateway.scheduling.identity import digest_of
from gateway.scheduling.journal_rows import command_record, model_record
from gateway.scheduling.model_queue import KeyBook, ModelQueue
from gateway.scheduling.requests import Request
from gateway.scheduling.sessions import SessionBook
from gateway.scheduling.turns import Turns
from gateway.store.journal import Journal, JournalUnavailable
from gateway.store.records import CommandRecord


class Acceptance:
    """keys: what the plain REST face tells retries by. orphans: commands in the journal whose models are not."""

    def __init__(
        self,
        journal: Journal,
        sessions: SessionBook,
        futures: FutureBook,
        queues: dict[str, ModelQueue],
        backlog: Backlog,
        turns: Turns,
    ) -> None:
        self.keys = KeyBook()
        self.orphans: list[CommandRecord] = []
        self._journal = journal
        self._sessions = sessions
        self._futures = futures
        self._queues = queues
        self._backlog = backlog
        self._turns = turns

    def known(self, queue: ModelQueue, seq_id: int | None, key: str | None, digest: bytes) -> str | None:
        """The request id given to this very command before. Raises `SequenceConflict`, `InvalidRequest`."""
        if seq_id is not None:
            return queue.known(seq_id, digest)
        if key is None:
            return None
        return self.keys.known(queue.model.tenant, key, _key_digest(queue.model.model_id, digest))

    def accept(self, queue: ModelQueue, seq_id: int | None, request: Request, digest: bytes, key: str | None) -> Future:
        """It is known from now on, and has its place once it is in the journal."""
        model = queue.model
        future = self._futures.open(model.tenant, model.model_id, request)
        model.last_request_time = datetime.now(UTC)
        key_digest = None
        if key is not None:
            key_digest = digest if future.operation == "create" else _key_digest(model.model_id, digest)
            self.keys.accept(model.tenant, key, future.request_id, key_digest)
        self._backlog.enter(model.tenant, future.payload_bytes)
        queue.reserve(future, seq_id, digest)
        record = command_record(future, seq_id, digest, key, key_digest)
        self._journal.accept(
            record,
            model_record(queue) if future.operation == "create" else None,
            partial(self._on_accepted, queue, future, seq_id, record),
            partial(self._on_not_accepted, queue, future, seq_id, key),
        )
        return future

    def _on_accepted(self, queue: ModelQueue, future: Future, seq_id: int | None, record: CommandRecord) -> None:
        if self._queues.get(future.model_id) is not queue:
            # Its model's create was in a transaction that failed, and this in the one after.
            why = JournalUnavailable(f"model {future.model_id} could not be put into the journal")
            self._journal.withdraw(record, partial(self._on_not_accepted, queue, future, seq_id, record.key, why))
            return
        future.accept()
        queue.place(future, seq_id)
        self._turns.advance(queue)

    def withdraw_orphans(self) -> None:
        """Before anything is accepted: their numbers may be spent again, and by then they are gone."""
        for record in self.orphans:
            self._journal.withdraw(record, _nobody_waits)
        self.orphans.clear()

    def _on_not_accepted(
        self, queue: ModelQueue, future: Future, seq_id: int | None, key: str | None, why: JournalUnavailable
    ) -> None:
        """As if it had never come."""
        queue.withdraw(seq_id)
        if key is not None:
            self.keys.withdraw(future.tenant, key)
        if future.operation == "create":
            del self._queues[future.model_id]
            self._sessions.forget_model(queue.model.session_id, future.model_id)
        self._backlog.leave(future.tenant, future.payload_bytes)
        self._futures.withdraw(future)
        future.refuse(Unavailable(str(why)))


def _nobody_waits() -> None:
    """They were refused, or nobody was told anything."""


def _key_digest(model_id: str, digest: bytes) -> bytes:
    """Keys are a tenant's, over all its models."""
    return digest_of(model_id.encode() + b"\0" + digest)
