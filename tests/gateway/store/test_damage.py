"""A file that was damaged on the disk is refused, or what is damaged in it is left out; it is never believed."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from pathlib import Path

import msgspec
import pytest

from gateway.store.journal import Journal, JournalUnusable
from gateway.store.records import Stored
from tests.gateway.store.rows import a_command, a_model, a_session, url_of, writing

_PAGE = 8192


async def filled(directory: Path) -> Stored:
    async with writing(directory) as journal:
        await journal.open_session(a_session())
        await journal.accept(a_command(0), a_model())
        for number in range(1, 12):
            await journal.accept(a_command(number, payload=bytes([number]) * 10_000))
        for turn in range(4):
            await journal.complete(a_command(turn), turn, outcome=bytes([100 + turn]) * 5000)
    return await read(directory)


async def read(directory: Path) -> Stored:
    journal = await asyncio.to_thread(Journal.open, url_of(directory))
    try:
        return journal.load()
    finally:
        await journal.close()


def is_of(found: Stored, whole: Stored) -> bool:
    """Whether there is nothing in it that is not in the whole, but blobs that are missing."""
    rows = {command.request_id: command for command in whole.commands}
    for command in found.commands:
        row = rows[command.request_id]
        # A blob that is left out, nothing else.
        filled_up = msgspec.structs.replace(
            command, payload=command.payload or row.payload, outcome=command.outcome or row.outcome
        )
        if filled_up != row:
            return False
    return len(found.commands) == len(rows) and (found.sessions, found.models) == (whole.sessions, whole.models)


async def test_a_page_of_garbage_is_refused_wherever_it_is(tmp_path: Path) -> None:
    whole = await filled(tmp_path)
    file = tmp_path / "journal.sqlite3"
    content = file.read_bytes()
    chance = random.Random(0)
    for at in range(0, len(content), _PAGE):
        file.write_bytes(content[:at] + chance.randbytes(_PAGE) + content[at + _PAGE :])
        with pytest.raises(JournalUnusable, match=r"journal\.sqlite3"):
            await read(tmp_path)
    file.write_bytes(content)
    assert await read(tmp_path) == whole
    assert len(content) > 10 * _PAGE


async def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    await filled(tmp_path)
    file = tmp_path / "journal.sqlite3"
    content = file.read_bytes()
    for length in (1, 100, _PAGE, len(content) // 2, len(content) - _PAGE):
        file.write_bytes(content[:length])
        with pytest.raises(JournalUnusable, match=r"journal\.sqlite3"):
            await read(tmp_path)


@pytest.mark.parametrize("table", ["payloads", "outcomes"])
async def test_a_flipped_bit_in_what_is_stored_is_not_handed_out(
    tmp_path: Path, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = await filled(tmp_path)
    file = tmp_path / "journal.sqlite3"
    blob = bytes([7]) * 3000 if table == "payloads" else bytes([102]) * 3000
    content = bytearray(file.read_bytes())
    content[content.index(blob) + 1000] ^= 4
    file.write_bytes(content)
    found = await read(tmp_path)
    assert found != whole
    assert is_of(found, whole)
    request_id = a_command(7 if table == "payloads" else 2).request_id
    assert f"the stored bytes of {request_id} have changed on the disk" in caplog.text
    async with writing(tmp_path) as journal:
        assert (request_id in await journal.journal.payloads([request_id])) == (table != "payloads")


async def test_the_log_that_was_cut_holds_whole_transactions_up_to_the_cut(tmp_path: Path) -> None:
    copies = []
    async with writing(tmp_path) as journal:
        for number in range(5):
            await journal.accept(a_command(number), a_model() if number == 0 else None)
        for name in ("journal.sqlite3", "journal.sqlite3-wal"):
            copies.append((tmp_path / name).read_bytes())
    database, log = copies
    numbers = set()
    for length in range(len(log), 0, -_PAGE // 2):
        directory = tmp_path / str(length)
        directory.mkdir()
        (directory / "journal.sqlite3").write_bytes(database)
        (directory / "journal.sqlite3-wal").write_bytes(log[:length])
        found = await read(directory)
        assert found.commands == [a_command(number) for number in range(len(found.commands))]
        assert len(found.models) == min(len(found.commands), 1)
        numbers.add(len(found.commands))
    assert numbers == set(range(6))


async def test_a_table_that_is_gone_is_told_as_damage(tmp_path: Path) -> None:
    await filled(tmp_path)
    connection = sqlite3.connect(tmp_path / "journal.sqlite3", isolation_level=None)
    connection.execute("DROP TABLE outcomes")
    connection.close()
    with pytest.raises(JournalUnusable, match="outcomes"):
        await read(tmp_path)
