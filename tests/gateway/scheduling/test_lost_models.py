"""A model that cannot be brought back fails alone, takes no slot, and is tried again with the next cell."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

from gateway.scheduling.execution import MOST_LOSSES
from gateway.scheduling.futures import Future
from tests.gateway.scheduling.rig import (
    Rig,
    create_from,
    failed,
    forward_backward,
    optim_step,
    path_of,
    reached,
    rig,
    save,
    succeeded,
    until,
)
from tests.gateway.scheduling.test_cell_epoch import kill, until_lost
from trainer_cell.protocol.commands import CreateModel, ForwardBackward, OptimStep
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.vault.layout import CheckpointAddress

NO_MORE = CommandFailed(ErrorKind.RANK_FAILED, "it cannot be done")


async def trained(gateway: Rig) -> str:
    """The id of a model with one step, whose cell is gone."""
    with gateway.cell() as cell:
        model = await gateway.model()
        for future in gateway.submit(model, forward_backward(), optim_step()):
            await succeeded(future)
        await kill(cell)
    await until_lost(gateway)
    return model


async def lose_cells(gateway: Rig, count: int, waiting: Future) -> None:
    """So many, each while it brings a model back."""
    for _ in range(count):
        cell = gateway.cell()
        hold = cell.hold_next(CreateModel)
        with cell:
            await reached(hold)
            assert not waiting.is_done
        await until_lost(gateway)


async def test_a_model_that_one_cell_cannot_bring_back_fails_alone_and_the_next_cell_may(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        model = await trained(gateway)
        cell = gateway.cell(slots=1)
        cell.fail_next(ForwardBackward, NO_MORE)
        with cell:
            lost, behind = gateway.submit(model, forward_backward(), forward_backward(), first=3)
            assert [await failed(lost), await failed(behind)] == ["model_lost", "model_lost"]
            assert gateway.scheduler.model("alice", model).state == "lost"
            # Nothing half done stays in the slot, and nobody asks for it again.
            assert cell.slots.models == {}
            assert cell.count(CreateModel) == 1
            await gateway.model(tenant="bob")
            await kill(cell)
        await until_lost(gateway)
        with gateway.cell():
            await until(lambda: gateway.scheduler.is_ready)
            await succeeded(gateway.scheduler.submit("alice", model, 5, forward_backward()))
            assert gateway.scheduler.model("alice", model).state == "ready"


async def test_a_model_under_which_cells_are_lost_is_given_up_after_so_many_and_not_for_ever(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        model = await trained(gateway)
        waiting = gateway.scheduler.submit("alice", model, 3, forward_backward())
        await lose_cells(gateway, MOST_LOSSES, waiting)
        with gateway.cell() as cell:
            assert await failed(waiting) == "model_lost"
            assert cell.count(CreateModel) == 0
            await kill(cell)
        await until_lost(gateway)
        with gateway.cell():
            await until(lambda: gateway.scheduler.is_ready)
            await succeeded(gateway.scheduler.submit("alice", model, 4, forward_backward()))


async def test_losses_count_only_in_a_row(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        model = await trained(gateway)
        for seq_id in (3, 4):
            waiting = gateway.scheduler.submit("alice", model, seq_id, forward_backward())
            await lose_cells(gateway, MOST_LOSSES - 1, waiting)
            with gateway.cell() as cell:
                await succeeded(waiting)
                await kill(cell)
            await until_lost(gateway)


async def test_a_step_that_comes_out_otherwise_than_on_record_is_not_gone_on_from(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        model = await trained(gateway)
        changes = gateway.scheduler._queues[model].history.changes
        assert changes[-1].iteration == 1
        changes[-1] = replace(changes[-1], iteration=2)
        with gateway.cell() as cell:
            assert await failed(gateway.scheduler.submit("alice", model, 3, forward_backward())) == "model_lost"
            assert cell.count(OptimStep) == 1
            assert cell.slots.models == {}


async def test_a_model_whose_data_the_journal_has_lost_is_not_brought_back_without_them(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        model = await trained(gateway)
    with sqlite3.connect(tmp_path / "journal.sqlite3") as connection:
        assert connection.execute("delete from payloads").rowcount == 1
    connection.close()
    async with rig(tmp_path) as gateway:
        with gateway.cell():
            lost = gateway.scheduler.submit("alice", model, 3, forward_backward())
            assert await failed(lost) == "model_lost"
            assert lost.error is not None
            assert "has lost the data" in lost.error.message


async def test_a_save_that_was_to_be_made_again_fails_with_its_model(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            cell.hold_next_publish()
            _, _, saving = gateway.submit(model, forward_backward(), optim_step(), save())
            await gateway.captured(saving)
            await kill(cell)
        await until_lost(gateway)
        await until(lambda: gateway.scheduler._queues[model].must_save_again)
        loading = gateway.scheduler.submit_create("alice", gateway.session(), 0, create_from(path_of(model)))
        await until(lambda: loading.waiting_for is not None)
        cell = gateway.cell()
        cell.fail_next(ForwardBackward, NO_MORE)
        with cell:
            assert await failed(saving) == "model_lost"
            # Who waited for it is answered.
            assert await failed(loading) == "checkpoint_not_found"
            assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) is None
            await gateway.model()


async def test_a_model_that_one_cell_could_not_bring_back_is_tried_again_by_the_next_gateway(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        model = await trained(gateway)
        cell = gateway.cell()
        cell.fail_next(ForwardBackward, NO_MORE)
        with cell:
            assert await failed(gateway.scheduler.submit("alice", model, 3, forward_backward())) == "model_lost"
    async with rig(tmp_path) as gateway:
        assert gateway.scheduler.model("alice", model).state == "ready"
        with gateway.cell():
            await succeeded(gateway.scheduler.submit("alice", model, 4, forward_backward()))
