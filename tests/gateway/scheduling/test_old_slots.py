"""A cell that comes back with a slot of before is believed only as far as the journal agrees."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.scheduling.snapshot_rules import SnapshotRules
from tests.fakes.fake_cell import FakeCell
from tests.gateway.scheduling.lives import lives
from tests.gateway.scheduling.rig import (
    Rig,
    create,
    forward_backward,
    optim_step,
    rig,
    rig_with_cell,
    save,
    succeeded,
    until,
)
from tests.gateway.scheduling.test_cell_epoch import until_lost
from trainer_cell.protocol.commands import ForgetModels, LoadState
from trainer_cell.vault import locks
from trainer_cell.vault.manifest import read_manifest


@asynccontextmanager
async def away(gateway: Rig, cell: FakeCell) -> AsyncIterator[None]:
    """It loses its connection, and dials again when the block ends."""
    path = cell._link._path
    cell._link._path = path.parent / "nowhere"
    cell.drop_connection()
    await until_lost(gateway)
    yield
    await until_lost(gateway)
    cell._link._path = path
    await until(lambda: gateway.scheduler.is_ready)


async def test_a_slot_that_another_cell_went_beyond_is_given_up(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, old):
        model = await gateway.model()
        for future in gateway.submit(model, forward_backward(), optim_step()):
            await succeeded(future)
        async with away(gateway, old):
            with gateway.cell() as cell:
                for future in gateway.submit(model, forward_backward(5), optim_step(), first=3):
                    await succeeded(future)
                trained = copy.copy(cell.slots.models[model])
        await succeeded(gateway.scheduler.submit("alice", model, 5, forward_backward(only=True)))
        assert old.slots.models[model] == trained


async def test_a_slot_whose_save_another_cell_lost_is_given_up_and_the_save_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_EPOCH_PATIENCE_S", 0.1)
    async with rig_with_cell(tmp_path) as (gateway, old):
        model = await gateway.model()
        for future in gateway.submit(model, forward_backward(), optim_step()):
            await succeeded(future)
        async with away(gateway, old):
            with gateway.cell() as cell:
                cell.hold_next_publish()
                saving = gateway.scheduler.submit("alice", model, 3, save())
                await gateway.captured(saving)
        assert read_manifest(gateway.version_dir(await succeeded(saving))).step == 1


async def test_a_slot_of_another_shape_under_the_same_id_is_given_up(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, old):
        made = gateway.scheduler.submit_start_up("alice", "startup", create(rank=4))
        await succeeded(made)
        old._link._path = tmp_path / "nowhere"
    for file in list(tmp_path.glob("journal*")):  # noqa: ASYNC240 - in memory
        file.unlink()
    async with rig(tmp_path) as gateway:
        with gateway.cell():
            again = gateway.scheduler.submit_start_up("alice", "startup", create(rank=8))
            assert again.model_id == made.model_id
            await succeeded(again)
        await until_lost(gateway)
        with gateway.cell() as stale:
            await until(lambda: gateway.scheduler.is_ready)
            stale.slots.models.clear()
            stale.slots.models[made.model_id] = copy.copy(old.slots.models[made.model_id])
            stale.drop_connection()
            await until_lost(gateway)
            await succeeded(gateway.scheduler.submit("alice", made.model_id, 1, forward_backward()))
            assert stale.count(ForgetModels) == 1
            assert stale.slots.models[made.model_id].adapter.rank == 8


async def test_a_model_that_was_brought_back_from_its_snapshot_alone_is_adopted_as_it_is(tmp_path: Path) -> None:
    async with lives(tmp_path, rules=SnapshotRules(steps=1)) as machine:
        gateway = machine.gateway
        with gateway.cell():
            model = await gateway.made()
            for future in gateway.submit(model, forward_backward(), optim_step()):
                await succeeded(future)
            history = gateway.scheduler._queues[model].history
            await until(lambda: history.snapshot is not None and not history.changes)
        await until_lost(gateway)
        with gateway.cell() as cell:
            await succeeded(gateway.scheduler.submit("alice", model, 3, forward_backward(only=True)))
            gateway = await machine.next(cell)
            await succeeded(gateway.scheduler.submit("alice", model, 4, forward_backward(only=True)))
            assert (cell.count(LoadState), cell.count(ForgetModels)) == (1, 0)
