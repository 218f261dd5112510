"""Records of the journal, and what waits for it in tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
from sqlalchemy import Engine, event

from gateway.store.journal import Journal, JournalUnavailable
from gateway.store.records import CommandRecord, ModelRecord, SessionRecord

PAYLOAD = bytes(range(256)) * 4


def url_of(directory: Path) -> str:
    return f"sqlite:///{directory / 'journal.sqlite3'}"


def a_session(session_id: str = "session-1") -> SessionRecord:
    return SessionRecord(
        session_id=session_id,
        tenant="alice",
        tags=("one", "two"),
        user_metadata={"run": {"number": 7}},
        created="2026-01-02T03:04:05+00:00",
        last_sign=1000.25,
    )


def a_model(model_id: str = "model-1", number: int = 0, facts: bytes = b"facts") -> ModelRecord:
    return ModelRecord(
        model_id=model_id,
        session_id="session-1",
        tenant="alice",
        number=number,
        created="2026-01-02T03:04:05+00:00",
        last_request="2026-01-02T03:04:06+00:00",
        facts=facts,
    )


def a_command(number: int, model_id: str = "model-1", payload: bytes | None = PAYLOAD) -> CommandRecord:
    return CommandRecord(
        request_id=f"future-{model_id}-{number}",
        model_id=model_id,
        tenant="alice",
        moment=number,
        seq_id=number,
        fingerprint=b"fingerprint",
        operation="forward_backward",
        request=b"request",
        payload=payload,
        payload_bytes=len(payload or b""),
        accepted=2000.5,
    )


class Writing:
    """A journal with answers that can be waited for; `answers` tells all of them, in order."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.answers: list[tuple[str, str]] = []

    def accept(self, command: CommandRecord, model: ModelRecord | None = None) -> asyncio.Future[None]:
        """Fails as the journal does."""
        done, on_durable, on_failed = self._answer(command.request_id)
        self.journal.accept(command, model, on_durable, on_failed)
        return done

    def open_session(self, session: SessionRecord) -> asyncio.Future[None]:
        done, on_durable, on_failed = self._answer(session.session_id)
        self.journal.open_session(session, on_durable, on_failed)
        return done

    def complete(
        self, command: CommandRecord, turn: int, model: ModelRecord | None = None, outcome: bytes = b"outcome"
    ) -> asyncio.Future[None]:
        done, on_durable, _ = self._answer(command.request_id)
        self.journal.complete(
            command.request_id, turn, outcome, 3000.0 + turn, None, model or a_model(command.model_id), on_durable
        )
        return done

    def snapshot(self, turn: int, model_id: str = "model-1") -> asyncio.Future[None]:
        done, on_durable, _ = self._answer(f"snapshot {turn}")
        self.journal.note_snapshot(model_id, f"version-{turn}", turn, on_durable)
        return done

    def attempt(self, command: CommandRecord, attempts: int) -> asyncio.Future[None]:
        done, on_durable, _ = self._answer(f"attempt {attempts}")
        self.journal.note_attempt(command.request_id, attempts, on_durable)
        return done

    def _answer(
        self, name: str
    ) -> tuple[asyncio.Future[None], Callable[[], None], Callable[[JournalUnavailable], None]]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_durable() -> None:
            self.answers.append((name, "durable"))
            done.set_result(None)

        def on_failed(failure: JournalUnavailable) -> None:
            self.answers.append((name, "failed"))
            done.set_exception(failure)

        return done, on_durable, on_failed


@asynccontextmanager
async def writing(directory: Path) -> AsyncIterator[Writing]:
    journal = await asyncio.to_thread(Journal.open, url_of(directory))
    try:
        yield Writing(journal)
    finally:
        await journal.close()


@contextmanager
def counted_commits() -> Iterator[list[None]]:
    """One entry for each commit of any engine."""
    commits: list[None] = []

    def count(_: object) -> None:
        commits.append(None)

    event.listen(Engine, "commit", count)
    try:
        yield commits
    finally:
        event.remove(Engine, "commit", count)


@contextmanager
def next_commit() -> Iterator[asyncio.Event]:
    """Set in the running loop at a commit of any engine, in whatever thread; it is about to be done then."""
    committed, loop = asyncio.Event(), asyncio.get_running_loop()

    def tell(_: object) -> None:
        loop.call_soon_threadsafe(committed.set)

    event.listen(Engine, "commit", tell)
    try:
        yield committed
    finally:
        event.remove(Engine, "commit", tell)


def without_payload(command: CommandRecord) -> CommandRecord:
    return msgspec.structs.replace(command, payload=None)
