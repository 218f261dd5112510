"""Who has a slot in the cell, and who gives way."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.scheduling import slots as scheduling_slots
from gateway.scheduling.durable import durable
from gateway.scheduling.errors import (
    UnknownModel,
)
from gateway.scheduling.requests import UnloadRequest
from tests.fakes.fake_model import FakeModel
from tests.gateway.scheduling.rig import (
    create,
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
)
from trainer_cell.protocol.commands import (
    ForwardBackward,
    FreeModel,
)


async def test_an_unloaded_model_gives_its_slot_and_takes_no_commands(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=1) as (gateway, cell):
        for _ in range(4):
            model = await gateway.model()
            gone = gateway.scheduler.submit("alice", model, None, UnloadRequest())
            queued_behind = gateway.scheduler.submit("alice", model, 1, forward_backward())
            await succeeded(gone)
            assert await failed(queued_behind) == "unknown_model"
            with pytest.raises(UnknownModel):
                gateway.scheduler.submit("alice", model, 2, forward_backward())
            assert gateway.scheduler.submit("alice", model, 1, forward_backward()) is queued_behind
            assert gateway.scheduler.model("alice", model).state == "unloaded"
        assert cell.slots.models == {}


async def test_of_an_unloaded_model_the_journal_keeps_no_data(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        trained = gateway.scheduler.submit("alice", model, 1, forward_backward())
        await succeeded(trained)
        journal = gateway.scheduler.journal
        assert await journal.payloads([trained.request_id])
        await succeeded(gateway.scheduler.submit("alice", model, 2, UnloadRequest()))
        await durable(journal.when_written)
        assert await journal.payloads([trained.request_id]) == {}
        assert [one.is_over for one in journal.load().models if one.model_id == model] == [True]


async def test_more_models_than_slots_are_as_good_as_a_slot_for_each(tmp_path: Path) -> None:
    alone: dict[int, FakeModel] = {}
    for slots in (64, 2):
        async with rig_with_cell(tmp_path / str(slots), slots=slots) as (gateway, cell):
            models = [await gateway.model(seed=seed) for seed in range(6)]
            # Each loses its slot with a gradient that is not consumed yet.
            for step in range(3):
                for model in models:
                    for future in gateway.submit(model, forward_backward(step, 1), first=3 * step + 1):
                        await succeeded(future)
                for seed, model in enumerate(models):
                    parts = gateway.submit(model, forward_backward(seed), optim_step(), first=3 * step + 2)
                    for future in parts:
                        await succeeded(future)
            for seed, model in enumerate(models):
                await succeeded(gateway.scheduler.submit("alice", model, 10, save()))
                assert len(cell.slots.models) <= slots
                state = replace(cell.slots.models[model], turn=0)
                assert alone.setdefault(seed, state) == state
            assert (cell.count(FreeModel) > 10) == (slots == 2)


@pytest.mark.parametrize("slots", [1, 2])
async def test_that_slots_are_short_is_told_and_not_at_every_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    monkeypatch.setattr(scheduling_slots, "_TELL_AGAIN_S", 3600.0)
    caplog.set_level(logging.INFO, "gateway.scheduling.slots")
    async with rig_with_cell(tmp_path, slots=slots) as (gateway, _):
        models = [await gateway.model(), await gateway.model()]
        for seq_id in range(1, 4):
            for model in models:
                await succeeded(gateway.scheduler.submit("alice", model, seq_id, forward_backward(only=True)))
    told = [record.getMessage() for record in caplog.records if "more models than slots" in record.getMessage()]
    assert told == (
        ["more models than slots are in use: 1 gave way to another since this was told"] if slots == 1 else []
    )


async def test_a_finished_session_gives_its_slots_away_and_its_client_may_come_back(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        session = gateway.session()
        made = gateway.scheduler.submit_create("alice", session, 0, create())
        model = made.model_id
        for future in gateway.submit(model, forward_backward(), optim_step(), forward_backward(9)):
            await succeeded(future)
        before = replace(cell.slots.models[model])
        await gateway.scheduler.finish_session("alice", session, "success", None)
        await until(lambda: not cell.slots.models)
        gateway.scheduler.sessions.beat("alice", session)
        await succeeded(gateway.scheduler.submit("alice", model, 4, save()))
        assert cell.slots.models[model] == before


async def test_a_silent_session_is_parked_as_well(tmp_path: Path) -> None:
    async with rig(tmp_path, session_silence_s=0.2) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            await until(lambda: not cell.slots.models)
            await succeeded(gateway.scheduler.submit("alice", model, 1, forward_backward()))


async def test_what_waits_runs_before_its_model_is_parked(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=1) as (gateway, cell):
        session = gateway.session()
        made = gateway.scheduler.submit_create("alice", session, 0, create())
        await succeeded(made)
        hold = cell.hold_next(ForwardBackward)
        queued = gateway.submit(made.model_id, *[forward_backward(*range(500))] * 5)
        await gateway.scheduler.finish_session("alice", session, "success", None)
        await reached(hold)
        other = gateway.scheduler.submit_create("bob", gateway.session("bob"), 0, create())
        hold.release()
        await succeeded(other)
        for future in queued:
            await succeeded(future)
        assert cell.count(ForwardBackward) >= 5


async def test_a_model_with_an_open_gradient_goes_on_before_it_gives_its_slot_away(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=1) as (gateway, cell):
        models = [await gateway.model() for _ in range(3)]
        hold = cell.hold_next(ForwardBackward)
        step = (forward_backward(1), forward_backward(2), optim_step())
        futures = [future for model in models for future in gateway.submit(model, *step, *step)]
        await reached(hold)
        await futures[-1].accepted()
        hold.release()
        for future in futures:
            await succeeded(future)
        # None was accumulated a second time.
        assert cell.count(ForwardBackward) == 12


async def test_a_model_that_never_steps_starves_no_other_of_its_tenant(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=1) as (gateway, cell):
        greedy, other = await gateway.model(), await gateway.model()
        hold = cell.hold_next(ForwardBackward)
        endless = gateway.submit(greedy, *[forward_backward(1)] * 60)
        await reached(hold)
        (one,) = gateway.submit(other, forward_backward(2))
        await one.accepted()
        hold.release()
        await succeeded(one)
        assert not endless[-1].is_done
        await succeeded(endless[-1])


async def test_a_load_gives_a_model_that_cannot_be_brought_back_another_state(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell():
            model = await gateway.model()
            for future in gateway.submit(model, forward_backward(), optim_step(), save()):
                await succeeded(future)
        gateway.scheduler._queues[model].history.is_broken = True
        with gateway.cell():
            assert await failed(gateway.scheduler.submit("alice", model, 4, forward_backward())) == "model_lost"
            await succeeded(gateway.scheduler.submit("alice", model, 5, load(path_of(model))))
        with gateway.cell():
            await succeeded(gateway.scheduler.submit("alice", model, 6, forward_backward()))
