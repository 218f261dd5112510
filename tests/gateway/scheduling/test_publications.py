"""A save holds up nobody once it is captured, and is in the order of its model all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.scheduling.requests import UnloadRequest
from tests.gateway.scheduling.rig import (
    create_from,
    done,
    failed,
    forward_backward,
    load,
    optim_step,
    path_of,
    reached,
    rig,
    rig_with_cell,
    save,
    succeeded,
    until,
    within,
)
from trainer_cell.protocol.commands import ForwardBackward, SaveState
from trainer_cell.vault.manifest import read_manifest


async def test_other_commands_run_while_a_save_is_written_and_are_not_in_it(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=64) as (gateway, cell):
        model, other = await gateway.model(), await gateway.model(tenant="bob")
        hold = cell.hold_next_publish()
        first_step = gateway.submit(model, forward_backward(), optim_step(), save("early"))
        await reached(hold)
        for future in gateway.submit(model, forward_backward(), optim_step(), first=4):
            await succeeded(future)
        for future in gateway.submit(other, forward_backward(), optim_step(), save(), tenant="bob"):
            await succeeded(future)
        saving = first_step[2]
        assert (saving.is_done, saving.state) == (False, "writing")
        hold.release()
        manifest = read_manifest(gateway.version_dir(await succeeded(saving)))
        assert manifest.step == 1
        assert gateway.scheduler.model("alice", model).step == 2
        assert not gateway.scheduler.catalog.saves._open


async def test_a_models_saves_are_published_one_after_the_other(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=64) as (gateway, cell):
        model = await gateway.model()
        hold = cell.hold_next_publish()
        first, second = gateway.submit(model, save("n"), save("n", overwrite=True))
        await gateway.captured(first)
        assert (second.state, second.waiting_for) == ("queued", "an earlier save of this model is being written")
        assert cell.count(SaveState) == 1
        hold.release()
        assert (await succeeded(first)).version < (await succeeded(second)).version
        assert second.waiting_for is None


async def test_a_save_beyond_the_buffers_waits_with_its_own_model_alone(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=64, save_buffers=1) as (gateway, cell):
        model, beyond, other = [await gateway.model() for _ in range(3)]
        hold = cell.hold_next_publish()
        (first,) = gateway.submit(model, save())
        await gateway.captured(first)
        waiting, behind = gateway.submit(beyond, save(), forward_backward())
        for future in gateway.submit(other, forward_backward(), optim_step()):
            await succeeded(future)
        assert waiting.waiting_for == "other saves are being written and hold all buffers"
        assert behind.state == "queued"
        # Nobody asks the cell again before it can have another answer.
        assert cell.count(SaveState) == 2
        hold.release()
        for future in (first, waiting, behind):
            await succeeded(future)
        assert cell.count(SaveState) == 3


async def test_a_load_waits_for_the_save_it_may_be_about(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=64) as (gateway, cell):
        model = await gateway.model()
        hold = cell.hold_next_publish()
        _, _, saving, stepped, _, loading = gateway.submit(
            model, forward_backward(), optim_step(), save(), forward_backward(), optim_step(), load(path_of(model))
        )
        await gateway.captured(saving)
        making = gateway.scheduler.submit_create("alice", gateway.session(), 0, create_from(path_of(model)))
        foreign = gateway.scheduler.submit_create("bob", gateway.session("bob"), 0, create_from(path_of(model)))
        await succeeded(stepped)
        assert await failed(foreign) == "checkpoint_not_found"
        assert {making.waiting_for, loading.waiting_for} == {"the model it loads from is writing a checkpoint"}
        hold.release()
        await succeeded(saving)
        assert (await succeeded(loading)).step == (await succeeded(making)).step == 1


async def test_saves_in_the_air_are_settled_when_the_cell_goes(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            await within(gateway.link.ready.wait())
            one, two = await gateway.model(), await gateway.model()
            cell.hold_next_publish()
            (lost,) = gateway.submit(one, save())
            await gateway.captured(lost)
            cell.die_before_answering(SaveState)
            (complete,) = gateway.submit(two, save())
            assert read_manifest(gateway.version_dir(await succeeded(complete))).model_id == two
            assert not lost.is_done
        with gateway.cell():
            assert read_manifest(gateway.version_dir(await succeeded(lost))).model_id == one


async def test_an_orderly_stop_waits_for_the_saves_that_are_written(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=64) as (gateway, cell):
        model = await gateway.model()
        hold = cell.hold_next_publish()
        (saving,) = gateway.submit(model, save())
        await gateway.captured(saving)
        stopping = asyncio.create_task(gateway.scheduler.stop(grace_s=20))
        done_early, _ = await asyncio.wait({stopping}, timeout=0.05)
        assert not done_early
        hold.release()
        await within(stopping)
        assert (await done(saving)).state == "succeeded"


async def test_an_unload_waits_for_the_save_before_it_which_is_made_again_if_need_be(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model, other = await gateway.model(), await gateway.model()
        cell.hold_next_publish()
        _, _, saving, unload = gateway.submit(model, forward_backward(), optim_step(), save(), UnloadRequest())
        await gateway.captured(saving)
        await succeeded(gateway.scheduler.submit("alice", other, 1, forward_backward()))
        assert (unload.state, unload.waiting_for) == ("queued", "an earlier save of this model is being written")
        await asyncio.to_thread(cell.kill)
        await until(lambda: not gateway.link.ready.is_set())
        with gateway.cell() as second:
            assert read_manifest(gateway.version_dir(await succeeded(saving))).step == 1
            await succeeded(unload)
            assert model not in second.slots.models


async def test_a_load_waits_for_a_save_that_has_its_turn_just_before(tmp_path: Path) -> None:
    """Both were the first of their models when neither had begun."""
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model, other = await gateway.model(), await gateway.model()
        held, publish = cell.hold_next(ForwardBackward), cell.hold_next_publish()
        running = gateway.scheduler.submit("alice", other, 1, forward_backward())
        await reached(held)
        saving = await gateway.scheduler.submit("alice", model, 1, save()).accepted()
        session = gateway.session()
        making = await gateway.scheduler.submit_create("alice", session, 0, create_from(path_of(model))).accepted()
        assert making.waiting_for is None
        held.release()
        await succeeded(running)
        await reached(publish)
        await until(lambda: making.waiting_for is not None or making.is_done)
        publish.release()
        await succeeded(saving)
        await succeeded(making)


async def test_a_save_that_is_made_again_holds_up_nobody_either(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        cell.hold_next_publish()
        _, _, saving = gateway.submit(model, forward_backward(), optim_step(), save())
        await gateway.captured(saving)
        await asyncio.to_thread(cell.kill)
        await until(lambda: not gateway.link.ready.is_set())
        second = gateway.cell()
        publish = second.hold_next_publish()
        with second:
            await reached(publish)
            await succeeded(gateway.scheduler.submit("alice", model, 4, forward_backward()))
            publish.release()
            await succeeded(saving)
