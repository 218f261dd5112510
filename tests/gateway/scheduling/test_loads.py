"""Saves and loads that go to the cell, and what they bring back."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from tests.fakes.fake_cell import BASE
from tests.gateway.scheduling.rig import (
    create,
    create_from,
    done,
    failed,
    forward_backward,
    load,
    optim_step,
    path_of,
    reached,
    rig_with_cell,
    save,
    succeeded,
)
from tests.gateway.scheduling.saved import one_saved
from trainer_cell.protocol.commands import LoadState
from trainer_cell.vault.layout import CheckpointAddress


async def test_save_and_load_queued_together_work(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        futures = gateway.submit(model, forward_backward(), optim_step(), save(), load(path_of(model), False))
        loaded = await succeeded(futures[-1])
        assert (loaded.step, loaded.iteration, loaded.optimizer_restored, loaded.reason) == (
            0,
            1,
            False,
            "not_requested",
        )
        model_seen = gateway.scheduler.model("alice", model)
        assert (model_seen.step, model_seen.iteration) == (0, 1)


async def test_a_model_made_from_a_checkpoint_has_its_shape_and_state(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        first = gateway.scheduler.submit_create("alice", gateway.session(), 0, create(rank=3, train_mlp=False))
        await succeeded(gateway.submit(first.model_id, forward_backward(), optim_step(), save())[-1])
        made = gateway.scheduler.submit_create("alice", gateway.session(), 0, create_from(path_of(first.model_id)))
        loaded = await succeeded(made)
        assert (made.operation, loaded.step, loaded.optimizer_restored) == ("create", 1, True)
        model = gateway.scheduler.model("alice", made.model_id)
        assert (model.base_model, model.state, model.step, model.seed) == (BASE.name, "ready", 1, None)
        assert model.adapter == gateway.scheduler.model("alice", first.model_id).adapter
        assert cell.slots.models[made.model_id].weight == cell.slots.models[first.model_id].weight
        await succeeded(gateway.submit(made.model_id, forward_backward(), optim_step())[-1])


async def test_a_load_with_the_optimizer_goes_on_and_one_without_starts_fresh(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        saved = await one_saved(gateway)
        uninterrupted = cell.slots.models[saved.model]
        weights = {}
        for with_optimizer in (True, False):
            made = gateway.scheduler.submit_create(
                "alice", gateway.session(), 0, create_from(saved.path, with_optimizer)
            )
            await succeeded(gateway.submit(made.model_id, forward_backward(8), optim_step())[-1])
            weights[with_optimizer] = cell.slots.models[made.model_id].weight
        assert weights[True] == uninterrupted.weight
        assert weights[False] != uninterrupted.weight


async def test_a_lifetime_is_recorded_with_the_checkpoint(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        await succeeded(gateway.scheduler.submit("alice", model, 1, save(ttl_seconds=7200)))
        (entry,) = await gateway.scheduler.catalog.list("alice")
        assert entry.expires is not None
        assert entry.expires - entry.created == timedelta(hours=2)


async def test_a_cell_that_loads_no_optimizers_says_so(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, no_save_optim=True, no_load_optim=True) as (gateway, _):
        saved = await one_saved(gateway)
        for wanted in (True, False):
            loaded = await succeeded(gateway.scheduler.submit("alice", saved.model, None, load(saved.path, wanted)))
            assert (loaded.step, loaded.optimizer_restored, loaded.reason) == (0, False, "no_load_optim")


async def test_what_the_cell_finds_wrong_fails_the_load_and_leaves_the_model(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        saved = await one_saved(gateway)
        shard = saved.version / "rank00000.safetensors"
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1
        shard.write_bytes(raw)
        before = dict(vars(cell.slots.models[saved.model]))
        refused = gateway.scheduler.submit("alice", saved.model, None, load(saved.path))
        made = gateway.scheduler.submit_create("alice", gateway.session(), 0, create_from(saved.path))
        assert [await failed(refused), await failed(made)] == ["checkpoint_corrupt"] * 2
        assert vars(cell.slots.models[saved.model]) == before
        assert cell.slots.models.keys() == {saved.model}


async def test_a_name_that_is_taken_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        saved = await one_saved(gateway)
        address = CheckpointAddress(saved.model, "weights", "n")
        before = gateway.vault.resolve(address)
        assert await failed(gateway.scheduler.submit("alice", saved.model, None, save())) == "checkpoint_exists"
        assert gateway.vault.resolve(address) == before
        again = gateway.scheduler.submit("alice", saved.model, None, save(overwrite=True))
        await done(again)
        assert gateway.vault.resolve(address) != before


async def test_a_checkpoint_deleted_while_it_is_being_loaded_is_read_to_the_end(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        saved = await one_saved(gateway)
        hold = cell.hold_next(LoadState)
        loading = gateway.scheduler.submit("alice", saved.model, None, load(saved.path))
        await reached(hold)
        await gateway.scheduler.catalog.delete("alice", saved.path)
        hold.release()
        assert (await succeeded(loading)).step == 1
        again = gateway.scheduler.submit("alice", saved.model, None, load(saved.path))
        assert await failed(again) == "checkpoint_not_found"
