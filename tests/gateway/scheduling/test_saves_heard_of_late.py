"""Saves that were made, or are being made, and whose gateway did not hear of it in time: found, not made again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.scheduling.durable import durable
from tests.gateway.scheduling.lives import lives
from tests.gateway.scheduling.rig import forward_backward, reached, save, succeeded, until
from trainer_cell.protocol.commands import ForgetModels, ForwardBackward, SaveState
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


async def test_a_save_that_failed_for_what_it_had_made_itself_has_not_failed(tmp_path: Path) -> None:
    """Its first attempt was published and forgotten; of the second a gateway hears from the hello."""
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            other, model = await gateway.made(), await gateway.made(8)
            hold = cell.hold_next(ForwardBackward)
            training = await gateway.scheduler.submit("alice", other, 1, forward_backward()).accepted()
            await reached(hold)
            saving = await gateway.scheduler.submit("alice", model, 1, save()).accepted()
            await durable(gateway.journal.when_written)
            gateway.is_stuck = True
            hold.release()
            await until(lambda: saving.turn is not None and model not in gateway.scheduler._turns._publications)
            await gateway.end()
            await asyncio.to_thread(cell.kill)
        gateway = await machine.start()
        cell = gateway.cell()
        hold = cell.hold_next(ForwardBackward)
        with cell:
            await reached(hold)
            assert cell.count(SaveState) == 0
            await durable(gateway.journal.when_written)
            gateway.is_stuck = True
            hold.release()
            await until(lambda: gateway.again(saving).turn is not None)
            assert cell.count(SaveState) == 1
            gateway = await machine.next(cell)
            saved = await succeeded(gateway.again(saving))
            assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == saved.version
            await succeeded(gateway.again(training))


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
