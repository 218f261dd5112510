"""What is written is there after a restart, whole and in order; writing is shared."""

from __future__ import annotations

import asyncio
import gc
import os
import stat
import weakref
from pathlib import Path

import msgspec
import pytest

from gateway.store.records import Stored
from gateway.store.writer import LAZY_S
from tests.gateway.store.rows import (
    PAYLOAD,
    Writing,
    a_command,
    a_model,
    a_session,
    counted_commits,
    next_commit,
    without_payload,
    writing,
)


async def stored(directory: Path) -> Stored:
    async with writing(directory) as again:
        return again.journal.load()


async def test_everything_that_was_noted_is_there_after_a_restart(tmp_path: Path) -> None:
    create, pending = msgspec.structs.replace(a_command(0), key="mine", key_digest=b"digest"), a_command(1)
    async with writing(tmp_path) as first:
        await first.open_session(a_session())
        await first.accept(create, a_model())
        await first.accept(pending)
        await first.attempt(create, 1)
        first.journal.note_turn(create.request_id, 0)
        await first.complete(create, 0, a_model(facts=b"made"), b"created")
        first.journal.note_told(create.request_id, 2, 3001.0)
        ended = msgspec.structs.replace(a_session(), finish_reason="success", finish_detail="bye", last_sign=1234.5)
        first.journal.finish_session(ended, lambda: None)
    found = await stored(tmp_path)
    assert found.sessions == [ended]
    assert found.models == [a_model(facts=b"made")]
    finished = msgspec.structs.replace(
        without_payload(create), attempts=1, turn=0, outcome=b"created", finished=3000.0, told_moment=2, told=3001.0
    )
    assert found.commands == [finished, pending]
    assert found.next_moment == 3


async def test_commands_come_back_in_the_order_of_their_moments(tmp_path: Path) -> None:
    async with writing(tmp_path) as first:
        await asyncio.gather(*(first.accept(a_command(number)) for number in (5, 3, 11, 4)))
    assert [command.moment for command in (await stored(tmp_path)).commands] == [3, 4, 5, 11]


async def test_what_comes_while_a_transaction_is_written_shares_the_next_one(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        with counted_commits() as commits:
            await asyncio.gather(*(journal.accept(a_command(number)) for number in range(200)))
        assert 1 <= len(commits) < 20
        with counted_commits() as commits:
            for number in range(200, 210):
                await journal.accept(a_command(number))
        assert len(commits) == 10, "nobody shares with one who waits for each answer"


async def test_answers_come_in_the_order_of_the_writes(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        commands = [a_command(number) for number in range(50)]
        waiting = []
        for turn, command in enumerate(commands):
            waiting += [journal.accept(command, a_model() if turn == 0 else None), journal.attempt(command, turn)]
            waiting.append(journal.complete(command, turn))
        await asyncio.gather(*waiting)
        expected = [
            name
            for turn, command in enumerate(commands)
            for name in (command.request_id, f"attempt {turn}", command.request_id)
        ]
        assert [name for name, _ in journal.answers] == expected


async def test_a_telling_waits_for_company_but_comes_before_any_later_write(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        command = a_command(0)
        await journal.accept(command, a_model())
        with counted_commits() as commits:
            for moment in range(5):
                journal.journal.note_told(command.request_id, moment, 3000.0)
            await asyncio.sleep(LAZY_S / 4)
            assert commits == []
            await journal.accept(a_command(1))
            assert len(commits) == 1
        assert journal.journal.load().commands[0].told_moment == 4


async def test_a_telling_that_nobody_joins_is_written_all_the_same(tmp_path: Path) -> None:
    with next_commit() as committed:
        async with writing(tmp_path) as journal:
            await journal.accept(a_command(0), a_model())
            committed.clear()
            journal.journal.note_told(a_command(0).request_id, 5, 3000.0)
            await asyncio.wait_for(committed.wait(), 10 * LAZY_S)
    assert (await stored(tmp_path)).commands[0].told == 3000.0


async def test_a_callback_that_fails_keeps_none_of_the_others_from_being_called(tmp_path: Path) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    failure = ValueError("a callback's own")

    def fail() -> None:
        raise failure

    async with writing(tmp_path) as journal:
        journal.journal.accept(a_command(0), a_model(), fail, lambda _: None)
        await journal.accept(a_command(1))
    assert told == [failure]


async def test_callbacks_are_let_go_of(tmp_path: Path) -> None:
    class Waiter:
        def __call__(self) -> None:
            pass

    waiter = Waiter()
    gone = weakref.ref(waiter)
    async with writing(tmp_path) as journal:
        journal.journal.accept(a_command(0), a_model(), waiter, lambda _: None)
        del waiter
        await journal.accept(a_command(1))
        # The thread is done with a batch a moment after its answers are told; another batch is behind it.
        await journal.accept(a_command(2))
        gc.collect()
        assert gone() is None


async def test_payloads_are_read_for_those_that_have_one(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await asyncio.gather(*(journal.accept(a_command(number)) for number in range(3)))
        await journal.accept(a_command(3, payload=None))
        wanted = [a_command(number).request_id for number in (0, 2, 3)]
        found = await journal.journal.payloads([*wanted, "future-unknown"])
        assert found == {wanted[0]: PAYLOAD, wanted[1]: PAYLOAD}
        many = await journal.journal.payloads([f"future-{number}" for number in range(5000)] + wanted[:1])
        assert many == {wanted[0]: PAYLOAD}


async def test_a_snapshot_drops_the_payloads_of_what_it_holds_and_of_nothing_else(tmp_path: Path) -> None:
    commands = [a_command(number) for number in range(4)]
    other = a_command(9, "model-2")
    async with writing(tmp_path) as journal:
        await journal.accept(commands[0], a_model())
        await journal.accept(other, a_model("model-2", 1))
        await asyncio.gather(*map(journal.accept, commands[1:]))
        await asyncio.gather(*(journal.complete(command, turn) for turn, command in enumerate(commands[:3])))
        await journal.complete(other, 0)
        await journal.snapshot(1)
        left = await journal.journal.payloads([command.request_id for command in [*commands, other]])
        assert set(left) == {commands[2].request_id, commands[3].request_id, other.request_id}
        [model, _] = journal.journal.load().models
        assert (model.snapshot, model.snapshot_turn) == ("version-1", 1)
        # What comes with an outcome is not newer than what the journal knows itself.
        await journal.complete(commands[3], 3, a_model(facts=b"later"))
        [model, _] = journal.journal.load().models
        assert (model.snapshot, model.snapshot_turn, model.facts) == ("version-1", 1, b"later")


async def test_a_dropped_model_has_neither_snapshot_nor_payloads(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        await journal.complete(a_command(0), 0)
        await journal.snapshot(0)
        await journal.accept(a_command(1))
        journal.journal.drop_model("model-1")
        await journal.accept(a_command(2, "model-2"))
        [model] = journal.journal.load().models
        assert (model.snapshot, model.is_over) == (None, True)
        assert await journal.journal.payloads([a_command(1).request_id]) == {}


async def test_a_write_for_a_row_that_is_not_there_keeps_nobody_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with writing(tmp_path) as journal:
        await journal.attempt(a_command(7), 1)
        await journal.accept(a_command(1))
    assert "no row" in caplog.text


async def test_the_files_are_for_nobody_else(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(tmp_path)}
    assert set(modes) == {f"journal.sqlite3{end}" for end in ("", "-wal", "-shm", ".lock")}
    assert set(modes.values()) == {0o600}


async def test_twenty_restarts_lose_nothing(tmp_path: Path) -> None:
    for number in range(20):
        async with writing(tmp_path) as journal:
            assert len(journal.journal.load().commands) == number
            await journal.accept(a_command(number), a_model() if number == 0 else None)
            await Writing(journal.journal).complete(a_command(number), number)
