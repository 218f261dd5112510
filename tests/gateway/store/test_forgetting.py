"""What may be forgotten goes, what is needed or asked for stays, and the file does not grow for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from gateway.store.records import CommandRecord, ModelRecord
from tests.gateway.store.rows import PAYLOAD, Writing, a_command, a_model, writing

# Rows finish at 3000 + turn.
EARLY, LATE = 1000.0, 9000.0


async def ten_finished(journal: Writing, snapshot_turn: int | None) -> None:
    commands = [a_command(number) for number in range(10)]
    await asyncio.gather(*(journal.accept(command, a_model() if command.seq_id == 0 else None) for command in commands))
    await asyncio.gather(*(journal.complete(command, turn) for turn, command in enumerate(commands)))
    if snapshot_turn is not None:
        await journal.snapshot(snapshot_turn)


async def pruned(
    journal: Writing, told_before: float = EARLY, untold_before: float = EARLY, remembered: int = 0
) -> tuple[list[CommandRecord], ModelRecord]:
    journal.journal.prune(told_before, untold_before, remembered)
    # Written behind it.
    await journal.accept(a_command(1000 + len(journal.answers), "model-2"))
    found = journal.journal.load()
    return [command for command in found.commands if command.model_id == "model-1"], found.models[0]


def seq_ids(commands: list[CommandRecord]) -> list[int | None]:
    return [command.seq_id for command in commands]


async def test_what_no_snapshot_holds_stays_whole_however_old(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await ten_finished(journal, snapshot_turn=None)
        commands, model = await pruned(journal, LATE, LATE)
        assert [command.outcome for command in commands] == [b"outcome"] * 10
        assert len(await journal.journal.payloads([command.request_id for command in commands])) == 10
        assert (model.floor, model.floor_turn) == (-1, -1)


async def test_what_a_snapshot_holds_is_forgotten_when_nobody_came_for_long(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await ten_finished(journal, snapshot_turn=5)
        commands, model = await pruned(journal, untold_before=3003.5)
        assert seq_ids(commands) == list(range(4, 10))
        assert (model.floor, model.floor_turn) == (3, 3)
        assert all(command.outcome == b"outcome" for command in commands)


async def test_what_was_told_goes_by_the_time_of_telling(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await ten_finished(journal, snapshot_turn=9)
        for number in range(5):
            journal.journal.note_told(a_command(number).request_id, 100 + number, 4000.0 + number)
        commands, _ = await pruned(journal, told_before=4002.5, untold_before=EARLY)
        assert seq_ids(commands) == list(range(3, 10))
        commands, _ = await pruned(journal, told_before=EARLY, untold_before=LATE)
        assert seq_ids(commands) == [3, 4], "told ones are not judged by when they finished"


async def test_the_last_ones_are_remembered_for_a_while_without_their_outcomes(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await ten_finished(journal, snapshot_turn=9)
        for number in range(10):
            journal.journal.note_told(a_command(number).request_id, 100 + number, 4000.0)
        commands, model = await pruned(journal, told_before=LATE, remembered=4)
        assert seq_ids(commands) == [6, 7, 8, 9]
        assert all(command.outcome is None and command.finished is not None for command in commands)
        assert (model.floor, model.floor_turn) == (5, 5)
        commands, model = await pruned(journal, told_before=LATE, untold_before=3007.5, remembered=4)
        assert seq_ids(commands) == [8, 9]
        assert (model.floor, model.floor_turn) == (7, 7)


async def test_one_without_a_number_is_not_remembered_once_its_outcome_is_gone_but_for_its_key(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await ten_finished(journal, snapshot_turn=None)
        plain, keyed = (
            msgspec.structs.replace(a_command(n), seq_id=None, key=key) for n, key in ((77, None), (78, "k"))
        )
        for turn, command in ((10, plain), (11, keyed)):
            await journal.accept(command)
            await journal.complete(command, turn)
        await journal.snapshot(11)
        for moment, command in enumerate([*map(a_command, range(10)), plain, keyed]):
            journal.journal.note_told(command.request_id, 100 + moment, 4000.0)
        commands, model = await pruned(journal, told_before=LATE, remembered=100)
        assert seq_ids(commands) == [*range(10), None]
        assert commands[-1].key == "k"
        assert (model.floor, model.floor_turn) == (-1, 10)


async def test_of_a_model_that_is_over_everything_goes_but_what_is_still_to_be_told(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await ten_finished(journal, snapshot_turn=None)
        journal.journal.drop_model("model-1")
        commands, _ = await pruned(journal, untold_before=3004.5)
        assert seq_ids(commands) == list(range(5, 10))


async def test_a_pending_command_is_never_forgotten(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await ten_finished(journal, snapshot_turn=None)
        await journal.accept(a_command(10))
        await journal.snapshot(50)
        commands, _ = await pruned(journal, LATE, LATE)
        assert seq_ids(commands) == [10]
        assert commands[0].payload == PAYLOAD


async def test_moments_go_on_above_those_that_were_forgotten(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await ten_finished(journal, snapshot_turn=9)
        journal.journal.note_told(a_command(2).request_id, 5000, 4000.0)
        await pruned(journal, LATE, LATE)
    async with writing(tmp_path) as journal:
        assert journal.journal.load().next_moment == 5001


async def test_the_file_stays_bounded_where_snapshots_and_pruning_keep_up(tmp_path: Path) -> None:
    sizes = []
    async with writing(tmp_path) as journal:
        await journal.accept(a_command(0), a_model())
        await journal.complete(a_command(0), 0)
        for turn in range(1, 500):
            command = a_command(turn, payload=bytes(200_000))
            await journal.accept(command)
            await journal.complete(command, turn)
            if turn % 10 == 0:
                await journal.snapshot(turn)
                journal.journal.prune(LATE, LATE, 5)
            if turn in (249, 499):
                sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))  # noqa: ASYNC240
    # The log takes a while to come to its length; 100 MB have gone through.
    assert sizes[1] < 1.2 * sizes[0], sizes
    assert sizes[1] < 50 << 20


async def test_what_is_forgotten_late_takes_no_number_back_that_was_forgotten_before(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        await ten_finished(journal, snapshot_turn=9)
        for told in (range(3, 10), range(3)):
            for number in told:
                journal.journal.note_told(a_command(number).request_id, 100 + number, 500.0)
            commands, model = await pruned(journal)
            assert (model.floor, model.floor_turn) == (9, 9)
        assert commands == []
