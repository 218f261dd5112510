"""Saves that were made, or are being made, and whose gateway did not hear of it in time: found, not made again."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.scheduling import cell_epoch
from gateway.scheduling.cell_link import CellLink
from gateway.scheduling.durable import durable
from gateway.scheduling.futures import Future
from tests.fakes.fake_cell import FakeCell
from tests.fakes.hold import Hold
from tests.gateway.scheduling.lives import Life, Lives, lives
from tests.gateway.scheduling.rig import forward_backward, reached, save, succeeded, until, within
from trainer_cell.protocol.commands import ForgetModels, ForwardBackward, ModelCommand, SaveState
from trainer_cell.protocol.outcomes import StateSaved, Success
from trainer_cell.vault import locks
from trainer_cell.vault.layout import CheckpointAddress


async def test_a_save_of_a_model_that_has_lost_its_slot_is_adopted(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell(slots=1) as cell:
            model, other = await gateway.made(), await gateway.made(8)
            # Each has its snapshot when it has had to give way.
            await succeeded(gateway.scheduler.submit("alice", model, 1, forward_backward(only=True)))
            publish = cell.hold_next_publish()
            saving = await gateway.scheduler.submit("alice", model, 2, save(overwrite=True)).accepted()
            await until(lambda: saving.state == "writing")
            await reached(publish)
            await succeeded(gateway.scheduler.submit("alice", other, 1, forward_backward()))
            gateway = await machine.next(cell)
            assert gateway.again(saving).state == "writing"
            publish.release()
            saved = await succeeded(gateway.again(saving))
            assert cell.count_saves(model) == 1
            assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == saved.version
            # In its turn the model is brought back.
            await succeeded(gateway.scheduler.submit("alice", model, 3, forward_backward()))


async def test_a_cell_that_hangs_up_while_it_is_taken_on_is_taken_on_when_it_dials_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget, hung_up = CellLink.execute_own, list[bool]()

    async def forget_and_hang_up(self: CellLink, command: ForgetModels) -> Success:
        said = await forget(self, command)
        if not hung_up:
            hung_up.append(True)
            self.hang_up()
            await until(lambda: self.hello is None)
        return said

    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            publish = cell.hold_next_publish()
            saving = await gateway.scheduler.submit("alice", model, 1, save()).accepted()
            await until(lambda: saving.state == "writing")
            await reached(publish)
            cell.slots.models["nobody's"] = copy.copy(cell.slots.models[model])
            monkeypatch.setattr(CellLink, "execute_own", forget_and_hang_up)
            gateway = await machine.next(cell)
            assert hung_up
            publish.release()
            await succeeded(gateway.again(saving))
            assert cell.count(SaveState) == 1


async def test_a_cell_that_dials_again_is_taken_on_although_it_is_still_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_EPOCH_PATIENCE_S", 300.0)
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            publish = cell.hold_next_publish()
            saving = await gateway.scheduler.submit("alice", model, 1, save()).accepted()
            await until(lambda: saving.state == "writing")
            await reached(publish)
            hello = gateway.link.hello
            cell.drop_connection()
            await until(lambda: gateway.link.hello not in (None, hello) and gateway.scheduler.is_ready)
            await succeeded(gateway.scheduler.submit("alice", model, 2, forward_backward()))
            publish.release()
            saved = await succeeded(saving)
            assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == saved.version
            assert (cell.count(SaveState), cell.count(ForgetModels)) == (1, 0)


@asynccontextmanager
async def published_and_forgotten(tmp_path: Path, overwrite: bool) -> AsyncIterator[tuple[Lives, Future]]:
    """A save whose first attempt is on the disk, while no cell nor the journal knows of it; no cell has come yet."""
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            other, model = await gateway.made(), await gateway.made(8)
            hold = cell.hold_next(ForwardBackward)
            await gateway.scheduler.submit("alice", other, 1, forward_backward()).accepted()
            await reached(hold)
            saving = await gateway.scheduler.submit("alice", model, 1, save(overwrite=overwrite)).accepted()
            await durable(gateway.journal.when_written)
            gateway.is_stuck = True
            hold.release()
            await until(lambda: saving.turn is not None and model not in gateway.scheduler._turns._publications)
            await gateway.end()
            await asyncio.to_thread(cell.kill)
        gateway = await machine.start()
        yield machine, gateway.again(saving)


async def test_a_save_that_failed_for_what_it_had_made_itself_has_not_failed(tmp_path: Path) -> None:
    """Of that failure a gateway hears from the hello."""
    async with published_and_forgotten(tmp_path, overwrite=False) as (machine, saving):
        gateway = machine.gateway
        cell = gateway.cell()
        hold = cell.hold_next(ForwardBackward)
        with cell:
            await reached(hold)
            assert cell.count(SaveState) == 0
            await durable(gateway.journal.when_written)
            gateway.is_stuck = True
            hold.release()
            await until(lambda: saving.turn is not None)
            assert cell.count(SaveState) == 1
            gateway = await machine.next(cell)
            saved = await succeeded(gateway.again(saving))
            assert gateway.vault.resolve(CheckpointAddress(saving.model_id, "weights", "n")) == saved.version


async def test_a_save_that_is_told_to_be_captured_and_failed_in_one_breath_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what it had made itself."""
    write = CellLink._write

    async def write_and_be_busy(self: CellLink, writer: asyncio.StreamWriter, command: ModelCommand) -> None:
        await write(self, writer, command)
        while isinstance(command, SaveState) and command.command_id not in cell._link._book._outcomes:
            time.sleep(0.001)  # noqa: ASYNC251 - that is the point

    async with published_and_forgotten(tmp_path, overwrite=False) as (machine, saving):
        gateway = machine.gateway
        monkeypatch.setattr(CellLink, "_write", write_and_be_busy)
        with gateway.cell() as cell:
            saved = await succeeded(saving)
            assert gateway.vault.resolve(CheckpointAddress(saving.model_id, "weights", "n")) == saved.version


@asynccontextmanager
async def published_once_and_being_published_again(
    tmp_path: Path,
) -> AsyncIterator[tuple[Life, FakeCell, Future, Hold]]:
    async with published_and_forgotten(tmp_path, overwrite=True) as (machine, saving):
        gateway = machine.gateway
        cell = gateway.cell()
        publish = cell.hold_next_publish()
        with cell:
            await until(lambda: saving.state == "writing")
            await reached(publish)
            yield gateway, cell, saving, publish
            publish.release()


async def test_a_save_is_answered_with_what_is_being_published_and_not_with_what_an_earlier_attempt_made(
    tmp_path: Path,
) -> None:
    async with published_once_and_being_published_again(tmp_path) as (gateway, cell, saving, publish):
        hello = gateway.link.hello
        cell.drop_connection()
        await until(lambda: gateway.link.hello not in (None, hello) and gateway.scheduler.is_ready)
        publish.release()
        saved = await succeeded(saving)
        await until(lambda: not gateway.scheduler._turns._publications)
        assert gateway.vault.resolve(CheckpointAddress(saving.model_id, "weights", "n")) == saved.version


async def test_what_a_cell_still_publishes_does_not_come_after_a_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell was away for so long that the disk was asked, which knew of the earlier attempt."""
    async with published_once_and_being_published_again(tmp_path) as (gateway, cell, saving, publish):
        monkeypatch.setattr(locks, "_EPOCH_PATIENCE_S", 0.0)
        path, cell._link._path = cell._link._path, tmp_path / "nowhere"
        cell.drop_connection()
        await succeeded(saving)
        cell._link._path = path
        await until(lambda: gateway.scheduler.is_ready)
        model = saving.model_id
        later = gateway.scheduler.submit("alice", model, 2, save(overwrite=True))
        await until(lambda: later.waiting_for == "an earlier save of this model is being written")
        publish.release()
        saved = await succeeded(later)
        assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == saved.version


async def test_a_cell_that_dials_twice_while_the_disk_is_asked_is_taken_on_as_it_was_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model has a save of which no cell knows, and whose turn does not come; one a save that is being published."""
    bugs = list[bool]()
    async with lives(tmp_path, on_crash=lambda: bugs.append(True)) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            waiting, model = await gateway.made(), await gateway.made(8)
            cell.hold_next_publish()
            lost = await gateway.scheduler.submit("alice", waiting, 1, save()).accepted()
            await until(lambda: lost.state == "writing")
            await asyncio.to_thread(cell.kill)
        turns, cell = gateway.scheduler._turns, gateway.cell()
        pick, look = turns._fair.pick, cell_epoch.settle_forgotten
        monkeypatch.setattr(turns._fair, "pick", lambda: one if (one := pick()) != waiting else pick())
        publish = cell.hold_next_publish()
        with cell:
            await until(lambda: gateway.scheduler.is_ready)
            saving = await gateway.scheduler.submit("alice", model, 1, save()).accepted()
            await until(lambda: saving.state == "writing")
            await reached(publish)
            looking, go_on = asyncio.Event(), asyncio.Event()

            async def look_for_long(*facts: Any) -> StateSaved | None:
                looking.set()
                await go_on.wait()
                return await look(*facts)

            monkeypatch.setattr(cell_epoch, "settle_forgotten", look_for_long)
            cell.drop_connection()
            await within(looking.wait())
            hello = gateway.link.hello
            cell.drop_connection()
            # It says the same as before.
            await until(lambda: gateway.link.hello is not None and gateway.link.hello is not hello)
            await until(lambda: model not in turns._publications)
            go_on.set()
            await until(lambda: gateway.scheduler.is_ready or bool(bugs))
            publish.release()
            saved = await succeeded(saving)
            assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == saved.version
            assert not bugs
