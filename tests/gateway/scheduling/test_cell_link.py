"""The socket a cell dials: who may attach, and what the end of the connection means."""

from __future__ import annotations

import asyncio
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from gateway.scheduling.cell_link import CellLink, CellLost, SocketDirectoryOpen
from tests.fakes.fake_cell import BASE, FakeCell
from tests.gateway.scheduling.rig import reached, within
from trainer_cell.protocol.commands import (
    PROTOCOL_VERSION,
    AdapterSpec,
    CreateModel,
    FreeModel,
    SaveState,
    decode_command,
)
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.framing import MAX_FRAME_BYTES, read_frame, write_frame
from trainer_cell.protocol.outcomes import Hello, Layout, ModelFreed, Progress, encode_said
from trainer_cell.vault.layout import Vault

ADAPTER = AdapterSpec(4, 32.0, True, True, True)
HELLO = Hello(PROTOCOL_VERSION, "epoch", Layout(1, 1, 1, 1), BASE, "fp32", True, False, False, 8, 64, ())


@contextmanager
def socket_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cell") as directory:
        yield Path(directory) / "run" / "cell.sock"


@pytest.fixture
async def link() -> AsyncIterator[CellLink]:
    with socket_path() as path:
        link = CellLink(path)
        await link.start()
        yield link
        await link.close()


async def test_a_cell_attaches_and_answers(link: CellLink, tmp_path: Path) -> None:
    attached: list[Hello] = []
    link.on_attached = attached.append
    with FakeCell(link.socket_path, tmp_path) as cell:
        await within(link.ready.wait())
        assert link.hello is not None
        assert [hello.epoch for hello in attached] == [cell.epoch]
        freed = await link.execute(FreeModel("one", "model"))
        assert freed == ModelFreed("one", was_resident=False)


async def test_the_directory_of_the_socket_is_closed_to_others(link: CellLink) -> None:
    assert stat.S_IMODE(link.socket_path.parent.stat().st_mode) == 0o700


async def test_a_directory_that_others_can_enter_is_refused() -> None:
    with socket_path() as path:
        path.parent.mkdir(mode=0o755)
        path.parent.chmod(0o755)
        with pytest.raises(SocketDirectoryOpen):
            await CellLink(path).start()
        path.parent.chmod(0o700)
        link = CellLink(path)
        await link.start()
        await link.close()


async def test_a_failure_is_raised_as_the_cell_told_it(link: CellLink, tmp_path: Path) -> None:
    with FakeCell(link.socket_path, tmp_path) as cell:
        await within(link.ready.wait())
        cell.fail_next(FreeModel, CommandFailed(ErrorKind.RANK_FAILED, "rank 1: no"))
        with pytest.raises(CommandFailed) as failure:
            await link.execute(FreeModel("one", "model"))
        assert (failure.value.kind, failure.value.message) == (ErrorKind.RANK_FAILED, "rank 1: no")


async def test_a_second_cell_is_refused_while_one_is_attached(link: CellLink, tmp_path: Path) -> None:
    with FakeCell(link.socket_path, tmp_path) as first:
        await within(link.ready.wait())
        with FakeCell(link.socket_path, tmp_path) as second:
            assert await asyncio.to_thread(second.hello_was_refused.wait, 20)
            assert second.commands == []
            await link.execute(FreeModel("one", "model"))
            assert first.count(FreeModel) == 1
            assert link.hello is not None
            assert link.hello.epoch == first.epoch
            # The control: once the first is gone, the second may.
            gone = asyncio.Event()
            link.on_lost = lambda hello: gone.set()
            await asyncio.to_thread(first.kill)
            await within(gone.wait())
            await within(link.ready.wait())
            assert link.hello.epoch == second.epoch


async def test_another_protocol_is_refused(link: CellLink, tmp_path: Path) -> None:
    with FakeCell(link.socket_path, tmp_path, protocol_version=PROTOCOL_VERSION + 1) as cell:
        assert await asyncio.to_thread(cell.hello_was_refused.wait, 20)
        assert link.hello is None


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"\xff not msgpack",
        msgspec.msgpack.encode({"said": "hello", "protocol_version": 1}),
        msgspec.msgpack.encode({"said": "hello", "protocol_version": "1"}),
        encode_said(ModelFreed("one", False)),
    ],
    ids=["empty", "garbage", "fields missing", "wrong type", "no hello"],
)
async def test_what_is_no_hello_is_refused(link: CellLink, first: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(link.socket_path)
    await write_frame(writer, first)
    assert await within(reader.read()) == b""
    assert link.hello is None
    writer.close()


async def test_a_frame_beyond_the_limit_ends_the_connection(link: CellLink) -> None:
    reader, writer = await asyncio.open_unix_connection(link.socket_path)
    await write_frame(writer, encode_said(HELLO))
    await within(link.ready.wait())
    running = asyncio.create_task(link.execute(FreeModel("one", "model")))
    await within(read_frame(reader))
    writer.write((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(CellLost):
        await within(running)
    assert link.hello is None
    writer.close()


async def test_a_cell_killed_in_the_middle_of_a_command_is_lost_at_once(link: CellLink, tmp_path: Path) -> None:
    lost: list[Hello] = []
    link.on_lost = lost.append
    with FakeCell(link.socket_path, tmp_path) as cell:
        await within(link.ready.wait())
        hold = cell.hold_next(CreateModel)
        running = asyncio.create_task(link.execute(CreateModel("one", "model", ADAPTER, 0)))
        await reached(hold)
        await asyncio.to_thread(cell.kill)
        with pytest.raises(CellLost):
            await within(running)
        assert [hello.epoch for hello in lost] == [cell.epoch]
        assert not link.ready.is_set()
        with pytest.raises(CellLost):
            await link.execute(FreeModel("two", "model"))


async def test_a_command_is_never_sent_to_the_next_cell(link: CellLink, tmp_path: Path) -> None:
    with FakeCell(link.socket_path, tmp_path) as first:
        await within(link.ready.wait())
        hold = first.hold_next(FreeModel)
        running = asyncio.create_task(link.execute(FreeModel("one", "model")))
        await reached(hold)
        with FakeCell(link.socket_path, tmp_path) as second:
            await asyncio.to_thread(first.kill)
            with pytest.raises(CellLost):
                await within(running)
            await within(link.ready.wait())
            with pytest.raises(CellLost):
                await link.execute(FreeModel("meant for the first", "model"))
            link.begin()
            await link.execute(FreeModel("two", "model"))
            assert [command.command_id for command in second.commands if isinstance(command, FreeModel)] == ["two"]


async def test_an_outcome_of_another_command_answers_nobody(link: CellLink) -> None:
    reader, writer = await asyncio.open_unix_connection(link.socket_path)
    await write_frame(writer, encode_said(HELLO))
    await within(link.ready.wait())
    running = asyncio.create_task(link.execute(FreeModel("one", "model")))
    assert decode_command(await within(read_frame(reader))) == FreeModel("one", "model")
    await write_frame(writer, encode_said(ModelFreed("another", True)))
    await write_frame(writer, encode_said(ModelFreed("one", False)))
    assert await within(running) == ModelFreed("one", False)
    writer.close()


async def test_progress_is_told_while_a_save_runs(link: CellLink, tmp_path: Path) -> None:
    vault = Vault(tmp_path / "checkpoints")
    vault.create()
    said: list[Progress] = []
    with FakeCell(link.socket_path, vault.root) as cell:
        await within(link.ready.wait())
        await link.execute(CreateModel("one", "model", ADAPTER, 0))
        command = SaveState("two", "model", "n", "weights", False, True, "digest", "2026-01-01T00:00:00Z", None, {})
        flight = await link.capture(command, said.append)
        await flight.outcome()
        assert [(progress.command_id, progress.phase) for progress in said] == [
            ("two", "capturing"),
            ("two", "writing"),
            ("two", "publishing"),
        ]
        assert cell.count(SaveState) == 1
