"""A volume that takes no more: what was asked for is refused or kept, never half done, and it recovers by itself.

Files may for a while not grow beyond a length, which every write of the journal runs into.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.store.journal import Journal, JournalUnavailable
from tests.gateway.store.rows import Writing, a_command, a_model, a_session, url_of, writing

_BIG = bytes(1 << 20)
_PATIENCE_S = 10.0


@contextmanager
def no_room(directory: Path, spare: int = 0) -> Iterator[None]:
    """Until the block ends the log may grow by `spare` bytes only. Python ignores SIGXFSZ, so more is EFBIG."""
    size = (directory / "journal.sqlite3-wal").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def refused(accepting: asyncio.Future[None]) -> str:
    with pytest.raises(JournalUnavailable) as failure:
        await asyncio.wait_for(accepting, _PATIENCE_S)
    return str(failure.value)


def ids(journal: Writing) -> list[str]:
    return [command.request_id for command in journal.journal.load().commands]


async def made_unavailable(journal: Writing) -> None:
    assert "journal.sqlite3 cannot be written" in await refused(journal.accept(a_command(90)))
    assert not journal.journal.is_available


async def test_what_cannot_be_written_is_refused_and_nothing_of_it_is_there(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        assert journal.journal.is_available
        with no_room(tmp_path):
            await made_unavailable(journal)
            await refused(journal.accept(a_command(1, "model-2"), a_model("model-2", 1)))
            await refused(journal.open_session(a_session()))
            found = journal.journal.load()
            assert ([model.model_id for model in found.models], found.sessions) == (["model-1"], [])
            assert len(found.commands) == 1
    async with writing(tmp_path) as journal:
        assert ids(journal) == [a_command(0).request_id]


async def test_outcomes_wait_for_room_and_are_written_in_their_order(tmp_path: Path) -> None:
    commands = [a_command(number) for number in range(5)]
    async with writing(tmp_path) as journal:
        await journal.accept(commands[0], a_model())
        await asyncio.gather(*map(journal.accept, commands[1:]))
        journal.answers.clear()
        with no_room(tmp_path):
            await made_unavailable(journal)
            waiting = []
            for turn, command in enumerate(commands):
                waiting += [journal.attempt(command, turn), journal.complete(command, turn)]
                journal.journal.note_told(command.request_id, 100 + turn, 3.0)
                await refused(journal.accept(a_command(50 + turn)))
            assert not any(answer.done() for answer in waiting)
            assert all(command.outcome is None for command in journal.journal.load().commands)
        await asyncio.wait_for(asyncio.gather(*waiting), _PATIENCE_S)
        assert journal.journal.is_available
        durable = [name for name, answer in journal.answers if answer == "durable"]
        assert durable == [name for turn in range(5) for name in (f"attempt {turn}", commands[turn].request_id)]
        await journal.accept(a_command(60))
    async with writing(tmp_path) as journal:
        assert [command.outcome for command in journal.journal.load().commands] == [b"outcome"] * 5 + [None]
        assert [command.told_moment for command in journal.journal.load().commands[:5]] == list(range(100, 105))


async def test_room_is_noticed_also_when_nobody_asks(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        with no_room(tmp_path):
            await made_unavailable(journal)
        async with asyncio.timeout(_PATIENCE_S):
            await until_available(journal)


async def until_available(journal: Writing) -> None:
    # Nobody is told of it: who wants to write asks, and is refused.
    while not journal.journal.is_available:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_one_that_is_too_big_is_refused_alone(tmp_path: Path) -> None:
    """Those who came with it are refused too, but outcomes are not, and the journal serves on."""
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        with no_room(tmp_path, spare=500_000):
            big, outcome = journal.accept(a_command(1, payload=_BIG)), journal.complete(a_command(0), 0)
            await refused(big)
            await asyncio.wait_for(outcome, _PATIENCE_S)
            assert journal.journal.is_available
            await journal.accept(a_command(2))
            assert ids(journal) == [a_command(0).request_id, a_command(2).request_id]


async def test_each_is_answered_once_in_order_whatever_the_disk_does(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        journal.answers.clear()
        accepting = []
        for number in range(1, 60):
            room = no_room(tmp_path, spare=40_000) if number % 3 else no_room(tmp_path, spare=1 << 30)
            with room:
                accepting.append(journal.accept(a_command(number)))
                await asyncio.sleep(0.002)
        results = await asyncio.gather(*accepting, return_exceptions=True)
        assert {type(result) for result in results} == {type(None), JournalUnavailable}
        told = [name for name, _ in journal.answers]
        assert told == [a_command(number).request_id for number in range(1, 60)]
        durable = [name for name, answer in journal.answers if answer == "durable"]
    async with writing(tmp_path) as journal:
        assert ids(journal) == [a_command(0).request_id, *durable]


async def test_closing_on_a_disk_that_takes_nothing_ends_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.writer._LAST_TRIES_S", 0.2)
    command = a_command(0)
    journal = Writing(await asyncio.to_thread(Journal.open, url_of(tmp_path)))
    await journal.accept(command, a_model())
    with no_room(tmp_path):
        await made_unavailable(journal)
        lost = journal.complete(command, 0)
        with pytest.raises(JournalUnavailable):
            await journal.journal.close()
        assert not lost.done()
    async with writing(tmp_path) as journal:
        [found] = journal.journal.load().commands
        assert (found.outcome, found.finished) == (None, None)
