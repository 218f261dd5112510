"""What becomes of an optim_step when a forward_backward of its window failed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.scheduling.requests import Request
from tests.gateway.scheduling.rig import (
    done,
    failed,
    forward_backward,
    load,
    optim_step,
    path_of,
    reached,
    rejected,
    rig_with_cell,
    save,
    succeeded,
)
from trainer_cell.protocol.commands import (
    DiscardGradients,
    ForwardBackward,
    OptimStep,
)


@pytest.mark.parametrize("bad", [rejected(), forward_backward(loss="no such loss")], ids=["rejected", "failed"])
async def test_a_pipelined_step_never_steps_on_a_partial_gradient(tmp_path: Path, bad: Request) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        good, wrong, step, kept = gateway.submit(model, forward_backward(), bad, optim_step(), save())
        await succeeded(good)
        assert await failed(wrong) == "bad_command"
        assert await failed(step) == "partial_gradients"
        assert (await succeeded(kept)).step == 0
        assert cell.count(OptimStep) == 0
        assert cell.count(DiscardGradients) == 1
        assert cell.slots.models[model].pending == 0
        # The window is closed: the next step is an ordinary one.
        gateway.scheduler.submit("alice", model, 5, forward_backward())
        assert (await succeeded(gateway.scheduler.submit("alice", model, 6, optim_step()))).step == 1


async def test_a_client_that_was_told_of_the_failure_decides_itself(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        gateway.scheduler.submit("alice", model, 1, forward_backward())
        wrong = gateway.scheduler.submit("alice", model, 2, rejected())
        await done(wrong)
        gateway.scheduler.futures.mark_told(wrong)
        assert (await succeeded(gateway.scheduler.submit("alice", model, 3, optim_step()))).step == 1


async def test_being_told_after_the_step_was_sent_does_not_count(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        hold = cell.hold_next(ForwardBackward)
        gateway.scheduler.submit("alice", model, 1, forward_backward())
        await reached(hold)
        wrong = gateway.scheduler.submit("alice", model, 2, rejected())
        step = gateway.scheduler.submit("alice", model, 4, optim_step())
        hold.release()
        await done(wrong)
        gateway.scheduler.futures.mark_told(wrong)
        gateway.scheduler.submit("alice", model, 3, forward_backward())
        assert await failed(step) == "partial_gradients"


async def test_a_failed_forward_only_pass_leaves_the_gradient_whole(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        requests = (forward_backward(), forward_backward(loss="?", only=True), rejected("forward"), optim_step())
        futures = gateway.submit(model, *requests)
        assert (await succeeded(futures[-1])).step == 1
        assert [future.state for future in futures] == ["succeeded", "failed", "failed", "succeeded"]


async def test_a_load_closes_the_window(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        requests = (save(), rejected(), load(path_of(model)), forward_backward(), optim_step())
        futures = gateway.submit(model, *requests)
        assert (await succeeded(futures[-1])).step == 1


async def test_a_gradient_that_was_dropped_is_not_there_again_with_the_next_cell(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        for first in (1, 4):
            bad = forward_backward(loss="no such")
            _, _, step = gateway.submit(model, forward_backward(), bad, optim_step(), first=first)
            assert await failed(step) == "partial_gradients"
        history = gateway.scheduler._queues[model].history
        # Nor does it take up room for ever.
        assert [change.what for change in history.changes] == ["create", "discard"]
        await asyncio.to_thread(cell.kill)
        with gateway.cell() as second:
            await succeeded(gateway.scheduler.submit("alice", model, 7, forward_backward(9)))
            assert second.slots.models[model].pending == 1


async def test_what_only_looked_forward_adds_nothing_to_the_gradient_with_the_next_cell_either(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        for future in gateway.submit(model, forward_backward(only=True), forward_backward(7, 8)):
            await succeeded(future)
        await asyncio.to_thread(cell.kill)
        with gateway.cell() as second:
            await succeeded(gateway.scheduler.submit("alice", model, 3, forward_backward(9)))
            assert second.slots.models[model].pending == 3
            assert second.count(ForwardBackward) == 2
