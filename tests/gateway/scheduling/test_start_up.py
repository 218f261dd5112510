"""The model a service starts with is there before the service is ready, or the service is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.scheduling.start_up import StartUpFailed, first_model_made, submit_first_model
from tests.fakes.fake_cell import BASE
from tests.gateway.scheduling.rig import (
    Rig,
    forward_backward,
    optim_step,
    path_of,
    reached,
    rig,
    rig_with_cell,
    save,
    succeeded,
    within,
)
from tests.gateway.scheduling.test_cell_epoch import lose
from trainer_cell.protocol.commands import LoadState
from trainer_cell.protocol.outcomes import StateSaved

MODEL = "startup:train:0"


async def saved(root: Path, **cell: bool) -> str:
    """A checkpoint of alice's after two steps."""
    async with rig_with_cell(root, **cell) as (gateway, _):
        model = await gateway.model()
        for first in (1, 3):
            gateway.submit(model, forward_backward(), optim_step(), first=first)
        outcome = await succeeded(gateway.scheduler.submit("alice", model, None, save()))
        assert isinstance(outcome, StateSaved)
        return path_of(model)


async def start(gateway: Rig, path: str) -> asyncio.Task[None]:
    future = await submit_first_model(gateway.scheduler, "alice", path)
    return asyncio.create_task(first_model_made(gateway.scheduler, future))


async def test_the_service_is_ready_once_the_model_is_made_and_not_before(tmp_path: Path) -> None:
    path = await saved(tmp_path)
    async with rig(tmp_path) as gateway:
        made = await start(gateway, path)
        assert gateway.scheduler.is_starting_up
        cell = gateway.cell()
        hold = cell.hold_next(LoadState)
        with cell:
            await reached(hold)
            assert not gateway.scheduler.is_ready
            hold.release()
            await within(made)
            assert gateway.scheduler.is_ready
            assert isinstance(cell.commands[0], LoadState)
            model = gateway.scheduler.model("alice", MODEL)
            assert (model.state, model.step, model.iteration) == ("ready", 2, 2)
            assert gateway.scheduler.warnings == {}
            gateway.submit(MODEL, forward_backward(), optim_step())
            await succeeded(gateway.scheduler.submit("alice", MODEL, None, save("later")))
            assert (model.step, model.iteration) == (3, 3)


@pytest.mark.parametrize(("saved_without", "served_without"), [(True, False), (False, True), (True, True)])
async def test_a_fresh_optimizer_is_told_to_the_owner_and_to_nobody_else(
    tmp_path: Path, saved_without: bool, served_without: bool
) -> None:
    path = await saved(tmp_path, no_save_optim=saved_without)
    async with rig(tmp_path) as gateway:
        made = await start(gateway, path)
        with gateway.cell(no_load_optim=served_without):
            await within(made)
            model = gateway.scheduler.model("alice", MODEL)
            assert (model.step, model.iteration) == (0, 2)
            [(tenant, warning)] = gateway.scheduler.warnings.items()
            assert tenant == "alice"
            assert ("--no-load-optim" in warning) is served_without
            assert "fresh optimizer" in warning


async def test_a_checkpoint_over_other_weights_starts_nothing(tmp_path: Path) -> None:
    path = await saved(tmp_path)
    async with rig(tmp_path) as gateway:
        made = await start(gateway, path)
        with gateway.cell(base_model=msgspec.structs.replace(BASE, digest="f" * 32)):
            with pytest.raises(StartUpFailed, match="base_digest"):
                await within(made)
            assert not gateway.scheduler.is_ready


async def test_a_checkpoint_that_is_not_there_or_anothers_starts_nothing(tmp_path: Path) -> None:
    path = await saved(tmp_path)
    async with rig(tmp_path) as gateway:
        for tenant, asked in (("alice", f"{path}x"), ("bob", path), ("alice", "tinker://nothing")):
            with pytest.raises(StartUpFailed):
                await submit_first_model(gateway.scheduler, tenant, asked)


async def test_a_cell_that_is_lost_costs_the_model_nothing(tmp_path: Path) -> None:
    path = await saved(tmp_path)
    async with rig(tmp_path) as gateway:
        made = await start(gateway, path)
        with gateway.cell() as cell:
            await within(made)
            await lose(gateway, cell)
        with gateway.cell():
            await succeeded(gateway.scheduler.submit("alice", MODEL, 1, forward_backward()))
            assert gateway.scheduler.is_ready


async def test_the_wait_ends_when_the_gateway_goes_down(tmp_path: Path) -> None:
    path = await saved(tmp_path)
    async with rig(tmp_path) as gateway:
        made = await start(gateway, path)
        await gateway.scheduler.stop(grace_s=0)
        await within(made)


async def test_each_start_makes_a_model_of_its_own_and_one_that_never_came_about_is_made_by_the_next(
    tmp_path: Path,
) -> None:
    path = await saved(tmp_path)
    async with rig(tmp_path) as gateway:
        await start(gateway, path)  # and no cell comes
    for made_so_far in (1, 2):
        async with rig(tmp_path) as gateway:
            made = await start(gateway, path)
            with gateway.cell():
                await within(made)
                models = [one for one in gateway.scheduler.models("alice") if one.session_id == "startup"]
                assert [one.model_id for one in models] == [f"startup:train:{n}" for n in reversed(range(made_so_far))]
                assert [one.iteration for one in models] == [2, 3][:made_so_far]
                gateway.submit(models[0].model_id, forward_backward(), optim_step())
                await succeeded(gateway.scheduler.submit("alice", models[0].model_id, None, save("later")))
