"""What a cell did for a gateway that was not there to hear of it, or for a connection that broke."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.scheduling.durable import durable
from tests.fakes.fake_cell import BASE
from tests.gateway.scheduling.lives import lives
from tests.gateway.scheduling.rig import (
    create_from,
    forward_backward,
    optim_step,
    path_of,
    reached,
    rig_with_cell,
    save,
    succeeded,
    until,
)
from tests.gateway.scheduling.test_leases import is_held
from trainer_cell.protocol.commands import CreateModel, ForgetModels, ForwardBackward, LoadState, SaveState
from trainer_cell.vault import locks
from trainer_cell.vault.layout import CheckpointAddress, Vault


async def test_a_model_whose_making_was_not_heard_of_is_as_if_it_had_been(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            hold = cell.hold_next(CreateModel)
            made = await gateway.created()
            await reached(hold)
            await gateway.end()
            hold.release()
            gateway = await machine.start()
            await succeeded(gateway.again(made))
            model = gateway.scheduler.model("alice", made.model_id)
            assert (model.base_model, model.base_digest) == (BASE.name, BASE.digest)
            await succeeded(gateway.scheduler.submit("alice", made.model_id, 1, forward_backward()))
            assert (cell.count(CreateModel), cell.count(ForgetModels)) == (1, 0)


async def test_a_model_made_from_a_checkpoint_for_a_gateway_before_has_its_shape_and_holds_what_it_read(
    tmp_path: Path,
) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            source = await gateway.made()
            for future in gateway.submit(source, forward_backward(), optim_step()):
                await succeeded(future)
            saved = await succeeded(gateway.scheduler.submit("alice", source, 3, save()))
            hold = cell.hold_next(LoadState)
            session = await gateway.opened()
            made = await gateway.scheduler.submit_create("alice", session, 0, create_from(path_of(source))).accepted()
            await reached(hold)
            await gateway.end()
            publish = cell.hold_next_publish()
            hold.release()
            gateway = await machine.start()
            assert (await succeeded(gateway.again(made))).step == 1
            model = gateway.scheduler.model("alice", made.model_id)
            assert model.adapter == gateway.scheduler.model("alice", source).adapter
            # No snapshot of it is whole yet.
            assert is_held(gateway, saved.version)
            publish.release()
            for future in gateway.submit(made.model_id, forward_backward(), optim_step()):
                await succeeded(future)
            assert (cell.count(LoadState), cell.count(ForgetModels)) == (1, 0)


async def test_a_gateway_that_was_killed_before_it_sent_a_command_is_not_held_against_that(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model, other = await gateway.made(1), await gateway.made(2)
            hold = cell.hold_next(ForwardBackward)
            running = await gateway.scheduler.submit("alice", other, 1, forward_backward()).accepted()
            await reached(hold)
            waiting = await gateway.scheduler.submit("alice", model, 1, forward_backward()).accepted()
            await durable(partial(gateway.journal.note_attempt, waiting.request_id, 2))
            await gateway.end()
            hold.release()
            gateway = await machine.start()
            for future in (running, waiting):
                await succeeded(gateway.again(future))
            assert gateway.again(waiting).attempts == 2


async def test_that_a_command_was_sent_is_known_to_the_next_gateway(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next(ForwardBackward)
            running = await gateway.scheduler.submit("alice", model, 1, forward_backward()).accepted()
            await reached(hold)
            await durable(gateway.journal.when_written)
            gateway = await machine.next()
            assert gateway.again(running).attempts == 1


async def test_a_save_that_was_published_before_anybody_heard_of_its_capture_is_found(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next(SaveState)
            saving = await gateway.scheduler.submit("alice", model, 1, save()).accepted()
            await reached(hold)
            await durable(gateway.journal.when_written)
            await gateway.end()
            hold.release()
            disk = Vault(gateway.vault.root)
            await until(lambda: disk.resolve(CheckpointAddress(model, "weights", "n")) is not None)
        gateway = await machine.start()
        with gateway.cell() as second:
            saved = await succeeded(gateway.again(saving))
            assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == saved.version
            assert second.count_saves(model) == 0


async def test_a_command_that_broken_connections_kept_from_the_cell_has_ended_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        write, drops = gateway.link._write, 4

        async def write_or_break(writer: Any, command: Any) -> None:
            nonlocal drops
            if isinstance(command, ForwardBackward) and drops > 0:
                drops -= 1
                writer.transport.abort()
            else:
                await write(writer, command)

        monkeypatch.setattr(gateway.link, "_write", write_or_break)
        trained = gateway.scheduler.submit("alice", model, 1, forward_backward())
        await succeeded(trained)
        assert (drops, trained.attempts) == (0, 1)
        assert (cell.count(ForwardBackward), cell.count(CreateModel)) == (1, 1)


async def test_a_save_is_made_once_though_the_connection_breaks_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_EPOCH_PATIENCE_S", 0.3)
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        publish = cell.hold_next_publish()
        (saving,) = gateway.submit(model, save())
        await gateway.captured(saving)
        hello, before = gateway.link.hello, gateway.scheduler._turns._publications.tasks
        cell.drop_connection()
        await until(lambda: gateway.link.hello not in (None, hello) and gateway.scheduler.is_ready)
        # As long as the task of the connection before looks for it on the disk, it is not adopted.
        await asyncio.wait(before)
        publish.release()
        await succeeded(saving)
        for future in gateway.submit(model, forward_backward(), save("another"), first=2):
            await succeeded(future)
        assert cell.count(SaveState) == 2


async def test_of_a_snapshot_for_a_gateway_before_the_cell_remembers_nothing(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            for future in gateway.submit(model, forward_backward(), optim_step()):
                await succeeded(future)
            publish = cell.hold_next_publish()
            await gateway.scheduler._turns._execution.snapshot(gateway.scheduler._queues[model])
            await reached(publish)
            gateway = await machine.next(cell)
            publish.release()
            await succeeded(gateway.scheduler.submit("alice", model, 3, forward_backward()))
            await until(lambda: not cell._link._book._outcomes)
