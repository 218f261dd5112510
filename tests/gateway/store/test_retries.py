"""What a transaction that fails leaves behind: nothing of what was refused, all of the rest, in order."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.store import writer
from gateway.store.journal import Journal, JournalUnavailable
from tests.gateway.store.rows import Writing, a_command, a_model, a_session, url_of, writing

_PATIENCE_S = 10.0


def fail_commits(journal: Writing, monkeypatch: pytest.MonkeyPatch, *are_done: bool) -> None:
    """The next so many fail; are_done: though the database has them, as when an fsync alone failed."""
    dialect = journal.journal._engine.dialect
    commit: Callable[[Any], None] = dialect.do_commit
    left = list(are_done)

    def fail(connection: Any) -> None:
        if not left:
            commit(connection)
            return
        if left.pop(0):
            commit(connection)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
        raise error

    monkeypatch.setattr(dialect, "do_commit", fail)


async def is_refused(accepting: asyncio.Future[None]) -> None:
    with pytest.raises(JournalUnavailable):
        await asyncio.wait_for(accepting, _PATIENCE_S)


@pytest.mark.parametrize("are_done", [(True,), (False,), (True, False)], ids=["done", "undone", "done, and then not"])
async def test_of_what_was_refused_at_the_commit_nothing_is_there_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_done: tuple[bool, ...]
) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        fail_commits(journal, monkeypatch, *are_done)
        await is_refused(journal.accept(a_command(1, "model-2"), a_model("model-2", 1)))
    async with writing(tmp_path) as journal:
        found = journal.journal.load()
        assert [model.model_id for model in found.models] == ["model-1"]
        assert [command.request_id for command in found.commands] == [a_command(0).request_id]
        # And its numbers are free.
        await journal.accept(a_command(1, "model-2"), a_model("model-2", 1))
        await journal.open_session(a_session())


async def test_what_is_withdrawn_is_withdrawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        fail_commits(journal, monkeypatch, True)
        await is_refused(journal.accept(a_command(1)))
        # The same again is another that is accepted, and stays.
        await journal.accept(a_command(1))
        await journal.accept(a_command(2))
        assert len(journal.journal.load().commands) == 3


# The first transaction has one or all of them: the order must be that of the writes after one failure and after two.
@pytest.mark.parametrize("failures", [2, 3])
async def test_what_is_tried_again_keeps_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        journal.answers.clear()
        fail_commits(journal, monkeypatch, *[False] * failures)
        waiting = [journal.attempt(a_command(0), attempts) for attempts in range(1, 6)]
        await asyncio.wait_for(asyncio.gather(*waiting), _PATIENCE_S)
        assert [name for name, _ in journal.answers] == [f"attempt {attempts}" for attempts in range(1, 6)]
        assert journal.journal.load().commands[0].attempts == 5


async def test_who_waits_to_be_accepted_is_refused_when_the_transaction_before_fails_for_good(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        one, begun, go_on = journal.journal._writer, asyncio.Event(), threading.Event()
        loop, transact = asyncio.get_running_loop(), one._transact

        def stuck(_batch: Sequence[writer.Queued]) -> JournalUnavailable:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait()
            return JournalUnavailable("the disk is gone")

        one._transact = stuck  # type: ignore[method-assign]
        outcome = journal.attempt(a_command(0), 1)
        await begun.wait()
        waiting = journal.accept(a_command(1))
        go_on.set()
        await is_refused(waiting)
        assert not outcome.done()
        one._transact = transact  # type: ignore[method-assign]
        await asyncio.wait_for(outcome, _PATIENCE_S)
        assert len(journal.journal.load().commands) == 1


async def test_a_failure_of_the_disk_has_every_connection_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        reader, one = journal.journal._reader, journal.journal._writer
        before = reader._connection, one._connection
        fail_commits(journal, monkeypatch, False)
        await is_refused(journal.accept(a_command(1)))
        await journal.accept(a_command(2))
        assert reader._connection is None
        assert one._connection not in before
        assert len(journal.journal.load().commands) == 2


async def test_a_session_that_is_kept_is_written_once_room_is_there_and_may_be_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        fail_commits(journal, monkeypatch, True, True)
        journal.journal.keep_session(a_session())
        await asyncio.wait_for(journal.attempt(a_command(0), 1), _PATIENCE_S)
        assert [session.session_id for session in journal.journal.load().sessions] == [a_session().session_id]


async def test_what_is_lazy_is_written_at_once_when_the_journal_is_closed(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        journal.journal.note_told(a_command(0).request_id, 7, 1.0)
    async with writing(tmp_path) as journal:
        assert journal.journal.load().commands[0].told_moment == 7


async def test_what_was_read_does_not_keep_the_log_from_being_started_anew(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        journal.journal.load()
        assert not journal.journal._reader._connection.in_transaction()  # type: ignore[union-attr]


async def test_after_a_read_that_failed_the_next_connects_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        reader = journal.journal._reader

        def fail(_connection: Any) -> None:
            monkeypatch.undo()
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = "SQLITE_IOERR_READ"
            raise error

        monkeypatch.setattr(journal.journal._engine.dialect, "do_rollback", fail)
        with pytest.raises(JournalUnavailable):
            await journal.journal.payloads([a_command(0).request_id])
        assert reader._connection is None
        assert len(await journal.journal.payloads([a_command(0).request_id])) == 1


@pytest.mark.parametrize("limit", ["_BATCH_BYTES", "_BATCH_WRITES"])
async def test_a_transaction_is_bounded_however_much_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    # Two commands of a kibibyte.
    monkeypatch.setattr(writer, limit, {"_BATCH_BYTES": 2500, "_BATCH_WRITES": 2}[limit])
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        one, sizes, go_on = journal.journal._writer, list[int](), threading.Event()
        transact = one._transact

        def counted(batch: Sequence[writer.Queued]) -> JournalUnavailable | None:
            go_on.wait()
            sizes.append(len(batch))
            return transact(batch)

        one._transact = counted  # type: ignore[method-assign]
        waiting = [journal.accept(a_command(number)) for number in range(1, 10)]
        go_on.set()
        await asyncio.gather(*waiting)
        assert max(sizes) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_nobody_waits_for_a_writer_that_ended_by_a_bug(tmp_path: Path) -> None:
    def bug(_connection: object) -> None:
        raise ValueError("a bug")

    journal = Writing(await asyncio.to_thread(Journal.open, url_of(tmp_path)))
    await journal.accept(a_command(0), a_model())
    journal.journal._writer.put(bug)
    await is_refused(journal.accept(a_command(1)))
    with pytest.raises(JournalUnavailable):
        await journal.journal.close()


async def test_the_data_of_what_has_run_are_not_read_at_the_start(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        await journal.complete(a_command(0), 0)
        await journal.accept(a_command(1))
        assert [command.payload is None for command in journal.journal.load().commands] == [True, False]
