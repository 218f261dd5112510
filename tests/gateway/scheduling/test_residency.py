"""Who has a slot in the cell, and who gives way."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.scheduling.errors import (
    UnknownModel,
)
from gateway.scheduling.requests import UnloadRequest
from tests.gateway.scheduling.rig import (
    create,
    failed,
    forward_backward,
    reached,
    rig_with_cell,
    save,
    succeeded,
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


async def test_a_slot_is_taken_only_from_models_whose_session_is_over(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=2) as (gateway, cell):
        scheduler = gateway.scheduler
        session = gateway.session()
        first = scheduler.submit_create("alice", session, 0, create())
        second = scheduler.submit_create("alice", gateway.session(), 0, create())
        await succeeded(second)
        assert await failed(scheduler.submit_create("bob", gateway.session("bob"), 0, create())) == "no_free_slot"
        await succeeded(scheduler.submit("alice", first.model_id, 1, save()))
        scheduler.sessions.finish("alice", session, "success")
        assert cell.count(FreeModel) == 0
        await succeeded(scheduler.submit_create("bob", gateway.session("bob"), 0, create()))
        assert first.model_id not in cell.slots.models
        assert second.model_id in cell.slots.models
        assert scheduler.model("alice", first.model_id).state == "lost"
        assert await failed(scheduler.submit("alice", first.model_id, 2, forward_backward())) == "model_lost"


async def test_a_model_with_waiting_commands_keeps_its_slot(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=1) as (gateway, cell):
        session = gateway.session()
        made = gateway.scheduler.submit_create("alice", session, 0, create())
        await succeeded(made)
        hold = cell.hold_next(ForwardBackward)
        queued = gateway.submit(made.model_id, *[forward_backward(*range(500))] * 5)
        gateway.scheduler.sessions.finish("alice", session, "success")
        await reached(hold)
        other = gateway.scheduler.submit_create("bob", gateway.session("bob"), 0, create())
        hold.release()
        assert await failed(other) == "no_free_slot"
        for future in queued:
            await succeeded(future)
