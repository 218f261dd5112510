"""What a lost cell costs, and what the next one brings back."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import pytest

from gateway.scheduling.execution import MOST_LOSSES
from gateway.scheduling.requests import UnloadRequest
from tests.fakes.fake_cell import FakeCell
from tests.gateway.scheduling.rig import (
    Rig,
    create,
    failed,
    forward_backward,
    optim_step,
    path_of,
    reached,
    rejected,
    rig,
    rig_with_cell,
    save,
    succeeded,
    until,
    within,
)
from trainer_cell.protocol.commands import CreateModel, ForgetModels, ForwardBackward, LoadState, SaveState
from trainer_cell.vault.layout import CheckpointAddress
from trainer_cell.vault.manifest import read_manifest


async def kill(cell: FakeCell) -> None:
    await asyncio.to_thread(cell.kill)


async def until_lost(gateway: Rig) -> None:
    """Until the gateway has noticed."""
    await until(lambda: not gateway.link.ready.is_set())


async def lose(gateway: Rig, cell: FakeCell) -> None:
    """Kill an idle cell, and wait until the gateway has noticed."""
    noticed = asyncio.Event()
    on_lost = gateway.link.on_lost
    gateway.link.on_lost = lambda hello: (on_lost(hello), noticed.set())[0]
    await kill(cell)
    await within(noticed.wait())


async def test_a_cell_killed_in_the_middle_of_a_command_costs_time_alone(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model, idle = await gateway.model(), await gateway.model()
        for future in gateway.submit(idle, forward_backward(), optim_step(), forward_backward(7)):
            await succeeded(future)
        hold = cell.hold_next(ForwardBackward)
        running, queued = gateway.submit(model, forward_backward(), optim_step())
        await reached(hold)
        before = copy.copy(cell.slots.models[idle])
        await kill(cell)
        await until_lost(gateway)
        # It hears of it a moment later.
        await until(lambda: running.state == "queued")
        assert not gateway.scheduler.is_ready
        with gateway.cell() as second:
            await succeeded(running)
            assert (await succeeded(queued)).step == 1
            assert idle not in second.slots.models
            await succeeded(gateway.scheduler.submit("alice", idle, 4, save()))
            assert second.slots.models[idle] == before
            assert gateway.scheduler.model("alice", idle).state == "ready"


async def test_a_command_that_ends_three_cells_fails_alone_and_its_model_goes_on_from_before_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            for future in gateway.submit(model, forward_backward(), optim_step()):
                await succeeded(future)
            before = copy.copy(cell.slots.models[model])
            await lose(gateway, cell)
        deadly, after = gateway.submit(model, forward_backward(5), forward_backward(6), first=3)
        for _ in range(3):
            with gateway.cell() as cell:
                hold = cell.hold_next(ForwardBackward, after=1)
                await reached(hold)
                assert deadly.error is None
                await kill(cell)
                await until_lost(gateway)
        with gateway.cell() as cell:
            assert await failed(deadly) == "cell_lost"
            await succeeded(after)
            assert cell.slots.models[model].weight == before.weight
            # One token, of the command that came after: the deadly one left nothing.
            assert cell.slots.models[model].pending == 1


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


async def test_a_create_in_flight_is_done_by_the_next_cell(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        hold = cell.hold_next(CreateModel)
        made = gateway.scheduler.submit_create("alice", gateway.session(), 0, create())
        trained = gateway.scheduler.submit("alice", made.model_id, 1, forward_backward())
        await reached(hold)
        await kill(cell)
        await until_lost(gateway)
        with gateway.cell():
            await succeeded(made)
            await succeeded(trained)


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
        saving, _, stepped = gateway.submit(model, save(overwrite=swaps), forward_backward(), optim_step(), first=3)
        await until_lost(gateway)
        with gateway.cell() as second:
            outcome = await succeeded(saving)
            assert (await succeeded(stepped)).step == 2
            entry = await gateway.scheduler.catalog.find("alice", path_of(model))
            assert (entry.manifest.step, entry.manifest.command_id) == (1, outcome.command_id)
            assert entry.version == outcome.version
            # What was complete was found, and not made a second time.
            assert second.count_saves(model) == (0 if is_saved else 1)
            # The sweep took what the dead cell had staged.
            assert [path.name for path in gateway.vault.staging_root.iterdir() if path.is_dir()] == []


async def test_a_save_whose_answer_alone_was_lost_is_found_on_disk(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        cell.die_before_answering(SaveState)
        outcome = await succeeded(gateway.scheduler.submit("alice", model, 1, save()))
        assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == outcome.version


async def test_a_save_lost_with_its_cell_is_made_again_of_the_state_it_was_asked_for(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        cell.hold_next_publish()
        _, _, saving, _, stepped = gateway.submit(
            model, forward_backward(), optim_step(), save(), forward_backward(9), optim_step()
        )
        await succeeded(stepped)
        trained = copy.copy(cell.slots.models[model])
        await kill(cell)
        await until_lost(gateway)
        with gateway.cell() as second:
            saved = await succeeded(saving)
            assert read_manifest(gateway.version_dir(saved)).step == 1
            await succeeded(gateway.scheduler.submit("alice", model, 6, forward_backward(only=True)))
            assert second.slots.models[model] == trained


async def test_a_command_whose_answer_was_lost_with_the_connection_is_not_run_again(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        idle, busy = await gateway.model(), await gateway.model()
        for future in gateway.submit(idle, forward_backward(), optim_step(), forward_backward(7)):
            await succeeded(future)
        hold = cell.hold_next(ForwardBackward)
        running = gateway.scheduler.submit("alice", busy, 1, forward_backward())
        await reached(hold)
        cell.drop_connection()
        await until_lost(gateway)
        hold.release()
        await succeeded(running)
        assert cell.slots.models.keys() == {idle, busy}
        assert cell.slots.models[busy].pending == 3
        assert cell.count(ForwardBackward) == 3
        assert cell.count(ForgetModels) == 0
        assert running.attempts == 1
        assert (await succeeded(gateway.scheduler.submit("alice", idle, 4, optim_step()))).step == 2


async def test_a_model_is_not_given_up_where_connections_alone_end_while_it_is_brought_back(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell(slots=1) as cell:
            model = await gateway.model()
            for future in gateway.submit(model, forward_backward(), optim_step(), forward_backward(7)):
                await succeeded(future)
            await gateway.model()
            hold = cell.hold_next(LoadState)
            step = gateway.scheduler.submit("alice", model, 4, optim_step())
            for _ in range(MOST_LOSSES + 1):
                await reached(hold)
                next_hold = cell.hold_next(LoadState)
                cell.drop_connection()
                await until_lost(gateway)
                hold.release()
                hold = next_hold
            hold.release()
            assert (await succeeded(step)).step == 2
            assert step.attempts == 1


async def test_a_step_on_a_gradient_that_failed_in_part_is_refused_also_after_the_cell_was_lost(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        _, bad = gateway.submit(model, forward_backward(), forward_backward(loss="no such"))
        step = gateway.scheduler.submit("alice", model, 4, optim_step())
        await failed(bad)
        await lose(gateway, cell)
        with gateway.cell() as second:
            gateway.scheduler.submit("alice", model, 3, forward_backward())
            assert await failed(step) == "partial_gradients"
            assert second.slots.models[model].pending == 0


async def test_a_rejected_request_is_answered_without_a_cell(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        await lose(gateway, cell)
        assert await failed(gateway.scheduler.submit("alice", model, 1, rejected())) == "bad_command"
