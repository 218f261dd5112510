"""What a lost cell costs, and what the next one brings back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.scheduling.requests import UnloadRequest
from tests.fakes.fake_cell import FakeCell
from tests.gateway.scheduling.rig import (
    Rig,
    create,
    done,
    failed,
    forward_backward,
    load,
    optim_step,
    path_of,
    reached,
    rejected,
    rig,
    rig_with_cell,
    save,
    succeeded,
    within,
)
from trainer_cell.protocol.commands import CreateModel, ForgetModels, ForwardBackward, SaveState
from trainer_cell.vault.layout import CheckpointAddress


async def kill(cell: FakeCell) -> None:
    await asyncio.to_thread(cell.kill)


async def lose(gateway: Rig, cell: FakeCell) -> None:
    """Kill an idle cell, and wait until the gateway has noticed."""
    noticed = asyncio.Event()
    on_lost = gateway.link.on_lost
    gateway.link.on_lost = lambda hello: (on_lost(hello), noticed.set())[0]
    await kill(cell)
    await within(noticed.wait())


async def test_a_cell_killed_in_the_middle_of_a_command_fails_it_and_loses_its_models(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model, idle = await gateway.model(), await gateway.model()
        hold = cell.hold_next(ForwardBackward)
        running, queued = gateway.submit(model, forward_backward(), optim_step())
        await reached(hold)
        await kill(cell)
        assert await failed(running) == "cell_lost"
        assert await failed(queued) == "model_lost"
        assert "load a checkpoint" in (queued.error.message if queued.error else "")
        for lost in (model, idle):
            assert gateway.scheduler.model("alice", lost).state == "lost"
        # While there is no cell, what is lost stays a definite answer.
        assert await failed(gateway.scheduler.submit("alice", idle, 1, save())) == "model_lost"
        assert not gateway.scheduler.is_ready


async def test_a_load_brings_a_lost_model_back(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        for future in gateway.submit(model, forward_backward(), optim_step(), save(), forward_backward(9)):
            await succeeded(future)
        kept = cell.slots.models[model]
        await lose(gateway, cell)
        with gateway.cell() as second:
            wrong, back, trained, stepped = gateway.submit(
                model, forward_backward(), load(path_of(model)), forward_backward(4, 5), optim_step(), first=5
            )
            assert await failed(wrong) == "model_lost"
            loaded = await succeeded(back)
            assert (loaded.step, loaded.iteration, loaded.optimizer_restored) == (1, 1, True)
            await succeeded(trained)
            assert (await succeeded(stepped)).step == 2
            assert second.slots.models[model].momentum == kept.momentum / 2 + 2
            assert gateway.scheduler.model("alice", model).state == "ready"


async def test_a_lost_model_unloads_without_a_cell(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        await lose(gateway, cell)
        await succeeded(gateway.scheduler.submit("alice", model, None, UnloadRequest()))
        assert gateway.scheduler.model("alice", model).state == "unloaded"


async def test_commands_for_models_to_be_wait_for_the_next_cell(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        await lose(gateway, cell)
        made = gateway.scheduler.submit_create("alice", gateway.session(), 0, create())
        trained = gateway.scheduler.submit("alice", made.model_id, 1, forward_backward())
        await asyncio.sleep(0)
        assert (made.state, trained.state) == ("queued", "queued")
        with gateway.cell():
            await succeeded(trained)


async def test_a_create_in_flight_fails_with_its_cell(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        hold = cell.hold_next(CreateModel)
        made = gateway.scheduler.submit_create("alice", gateway.session(), 0, create())
        trained = gateway.scheduler.submit("alice", made.model_id, 1, forward_backward())
        await reached(hold)
        await kill(cell)
        assert await failed(made) == "cell_lost"
        assert await failed(trained) == "cell_lost"
        assert gateway.scheduler.model("alice", made.model_id).state == "failed"


@pytest.mark.parametrize(
    ("operation", "path_part", "is_saved"),
    [
        ("mkdir", ".staging/", False),
        ("write", "rank00000", False),
        ("create", "manifest.json", False),
        ("rename", "/.versions/", False),
        ("symlink", "/weights/n", True),
        ("rename", "/weights/n", True),
    ],
    ids=["staging", "shard", "manifest", "freeze", "point", "swap"],
)
async def test_a_save_in_flight_is_settled_from_disk(
    tmp_path: Path, operation: str, path_part: str, is_saved: bool
) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        swaps = (operation, path_part) == ("rename", "/weights/n")
        if swaps:
            await succeeded(gateway.scheduler.submit("alice", model, None, save()))
        for future in gateway.submit(model, forward_backward(), optim_step()):
            await succeeded(future)
        cell.die_before(operation, path_part)
        saving = gateway.scheduler.submit("alice", model, 3, save(overwrite=swaps))
        await done(saving)
        if is_saved:
            assert saving.error is None
            assert saving.outcome is not None
            entry = await gateway.scheduler.catalog.find("alice", path_of(model))
            assert entry.manifest.step == 1
            assert entry.manifest.command_id == saving.outcome.command_id
        else:
            assert await failed(saving) == "cell_lost"
            assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) is None
        assert gateway.scheduler.model("alice", model).state == "lost"
        with gateway.cell():
            other = await gateway.model()
            # The sweep took what the dead cell had staged, and the name is as free as the answer said.
            assert [path.name for path in gateway.vault.staging_root.iterdir() if path.is_dir()] == []
            again = gateway.scheduler.submit("alice", other, 1, save())
            await succeeded(again)


async def test_a_save_whose_answer_alone_was_lost_is_found_on_disk(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        cell.die_before_answering(SaveState)
        outcome = await succeeded(gateway.scheduler.submit("alice", model, 1, save()))
        assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == outcome.version
        assert gateway.scheduler.model("alice", model).state == "lost"


async def test_a_cell_that_only_lost_its_connection_keeps_its_models(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        idle, busy = await gateway.model(), await gateway.model()
        for future in gateway.submit(idle, forward_backward(), optim_step(), forward_backward(7)):
            await succeeded(future)
        hold = cell.hold_next(ForwardBackward)
        running = gateway.scheduler.submit("alice", busy, 1, forward_backward())
        await reached(hold)
        cell.drop_connection()
        assert await failed(running) == "cell_lost"
        assert gateway.scheduler.model("alice", idle).state == "lost"
        hold.release()
        other = await gateway.model()
        # Whether the gradient of the busy one has grown nobody can say: only a load brings it back.
        assert gateway.scheduler.model("alice", busy).state == "lost"
        assert gateway.scheduler.model("alice", idle).state == "ready"
        assert cell.slots.models.keys() == {idle, other}
        assert [command.keep for command in cell.commands if isinstance(command, ForgetModels)] == [(idle,)]
        assert (await succeeded(gateway.scheduler.submit("alice", idle, 4, optim_step()))).step == 2


async def test_failures_told_in_between_still_guard_the_step_of_an_adopted_model(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model, busy = await gateway.model(), await gateway.model()
        await succeeded(gateway.scheduler.submit("alice", model, 1, forward_backward()))
        hold = cell.hold_next(ForwardBackward)
        running = gateway.scheduler.submit("alice", busy, 1, forward_backward())
        await reached(hold)
        part = gateway.scheduler.submit("alice", model, 2, forward_backward())
        step = gateway.scheduler.submit("alice", model, 4, optim_step())
        cell.drop_connection()
        assert await failed(running) == "cell_lost"
        assert await failed(part) == "model_lost"
        hold.release()
        await gateway.model()
        gateway.scheduler.submit("alice", model, 3, forward_backward())
        assert await failed(step) == "partial_gradients"


async def test_a_new_gateway_frees_what_it_does_not_know_and_finds_the_checkpoints(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        for future in gateway.submit(model, forward_backward(), optim_step(), save()):
            await succeeded(future)
        left = dict(cell.slots.models)
    async with rig(tmp_path) as gateway:
        cell = gateway.cell()
        cell.slots.models.update(left)
        with cell:
            fresh = await gateway.model()
            assert cell.slots.models.keys() == {fresh}
            assert [entry.uri for entry in await gateway.scheduler.catalog.list("alice")] == [path_of(model)]
            assert await gateway.scheduler.catalog.list("bob") == []
            back = gateway.scheduler.submit("alice", fresh, 1, load(path_of(model)))
            assert (await succeeded(back)).step == 1


async def test_a_rejected_request_is_answered_without_a_cell(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        hold = cell.hold_next(SaveState)
        gateway.scheduler.submit("alice", model, 1, save())
        await reached(hold)
        await kill(cell)
        assert await failed(gateway.scheduler.submit("alice", model, 2, rejected())) == "bad_command"
