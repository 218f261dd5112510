"""A gateway that is killed is followed by another that knows what it knew; a cell that lives on is taken over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.scheduling.errors import SequenceConflict, UnknownModel
from gateway.scheduling.futures import Future
from gateway.scheduling.requests import UnloadRequest
from gateway.scheduling.snapshot_rules import SnapshotRules
from tests.gateway.scheduling.lives import lives
from tests.gateway.scheduling.rig import (
    create,
    failed,
    forward_backward,
    load,
    optim_step,
    path_of,
    reached,
    rejected,
    save,
    succeeded,
    until,
)
from trainer_cell.protocol.commands import (
    CreateModel,
    ForgetModels,
    ForwardBackward,
    LoadState,
    OptimStep,
)


async def test_models_that_the_cell_still_has_are_adopted_as_they_are(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            trained, fresh = await gateway.made(1), await gateway.made(2)
            for future in gateway.submit(trained, forward_backward(), optim_step(), forward_backward(5)):
                await succeeded(future)
            before = copy.deepcopy(cell.slots.models)
            gateway = await machine.next(cell)
            assert (await succeeded(gateway.scheduler.submit("alice", trained, 4, optim_step()))).step == 2
            await succeeded(gateway.scheduler.submit("alice", fresh, 1, forward_backward(only=True)))
            assert cell.slots.models[fresh] == before[fresh]
            assert (cell.count(CreateModel), cell.count(LoadState), cell.count(ForgetModels)) == (2, 0, 0)
            assert cell.count(ForwardBackward) == 3


async def test_an_outcome_that_its_gateway_did_not_live_to_hear_is_heard_by_the_next(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next(ForwardBackward)
            running, queued = gateway.submit(model, forward_backward(), optim_step())
            await reached(hold)
            await queued.accepted()
            gateway = await machine.next()
            hold.release()
            await succeeded(gateway.again(running))
            assert (await succeeded(gateway.again(queued))).step == 1
            assert gateway.again(running).attempts <= 1
            assert (cell.count(ForwardBackward), cell.count(OptimStep)) == (1, 1)
            assert cell.count(ForgetModels) == 0


async def test_an_outcome_that_was_not_durable_yet_is_asked_of_the_cell_again(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next(ForwardBackward)
            done_first, step = gateway.submit(model, forward_backward(), optim_step())
            await reached(hold)
            await step.accepted()
            gateway.is_stuck = True
            hold.release()
            await until(lambda: cell.slots.models[model].step == 1)
            assert not done_first.is_done
            assert not step.is_done
            gateway = await machine.next(cell)
            assert (await succeeded(gateway.again(step))).step == 1
            await succeeded(gateway.again(done_first))
            assert [type(command) for command in cell.executed] == [CreateModel, ForwardBackward, OptimStep]


async def test_with_the_cell_dead_too_every_model_is_brought_back(tmp_path: Path) -> None:
    async with lives(tmp_path, rules=SnapshotRules(steps=2)) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model, untrained = await gateway.made(1), await gateway.made(2)
            for round_ in range(5):
                for future in gateway.submit(model, forward_backward(round_), optim_step(), first=2 * round_ + 1):
                    await succeeded(future)
            await succeeded(gateway.scheduler.submit("alice", model, 11, save()))
            await succeeded(gateway.scheduler.submit("alice", model, 12, load(path_of(model))))
            await succeeded(gateway.scheduler.submit("alice", model, 13, forward_backward(9)))
            before = copy.deepcopy(cell.slots.models)
        waiting = await gateway.scheduler.submit("alice", model, 14, forward_backward(only=True)).accepted()
        gateway = await machine.next()
        with gateway.cell() as second:
            await succeeded(gateway.again(waiting))
            await succeeded(gateway.scheduler.submit("alice", untrained, 1, forward_backward(only=True)))
            assert second.slots.models == before
            assert second.count(ForwardBackward) < 7


async def test_retries_of_what_was_accepted_get_the_same_id_and_other_contents_a_conflict(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        session = await gateway.opened()
        accepted = [gateway.scheduler.submit_create("alice", session, 0, create())]
        model = accepted[0].model_id
        accepted.append(gateway.scheduler.submit("alice", model, 1, forward_backward()))
        accepted.append(gateway.scheduler.submit("alice", model, 7, rejected()))
        accepted.append(gateway.scheduler.submit("alice", model, None, save("k"), "key"))
        accepted.append(gateway.scheduler.submit_create_plain("alice", create(), "other key"))
        for future in accepted:
            await future.accepted()
        gateway = await machine.next()
        scheduler = gateway.scheduler
        again = [
            scheduler.submit_create("alice", session, 0, create()),
            scheduler.submit("alice", model, 1, forward_backward()),
            scheduler.submit("alice", model, 7, rejected()),
            scheduler.submit("alice", model, None, save("k"), "key"),
            scheduler.submit_create_plain("alice", create(), "other key"),
        ]
        assert [future.request_id for future in again] == [future.request_id for future in accepted]
        conflicts: list[Callable[[], Future]] = [
            lambda: scheduler.submit_create("alice", session, 0, create(rank=8)),
            lambda: scheduler.submit("alice", model, 1, optim_step()),
            lambda: scheduler.submit("alice", model, None, save("other"), "key"),
            lambda: scheduler.submit_create_plain("alice", create(rank=8), "other key"),
        ]
        for conflict in conflicts:
            with pytest.raises(SequenceConflict):
                conflict()
        with gateway.cell() as cell:
            for future in (again[0], again[1], again[3], again[4]):
                await succeeded(future)
            assert cell.count(CreateModel) == 2


async def test_what_was_told_is_known_and_told_again_as_it_was(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            good, bad = gateway.submit(model, forward_backward(), forward_backward(loss="no such"))
            outcome, error = await succeeded(good), await failed(bad)
            gateway.scheduler.futures.mark_told(bad)
            # The client knows, and decides.
            step = gateway.scheduler.submit("alice", model, 4, optim_step())
            await step.accepted()
            gateway = await machine.next(cell)
            assert await succeeded(gateway.again(good)) == outcome
            assert await failed(gateway.again(bad)) == error
            assert gateway.again(bad).told
            assert not gateway.again(good).told
            gateway.scheduler.submit("alice", model, 3, forward_backward())
            assert (await succeeded(gateway.again(step))).step == 1


async def test_a_failure_that_was_not_told_still_fails_the_step_after_it(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            _, bad = gateway.submit(model, forward_backward(), forward_backward(loss="no such"))
            await failed(bad)
            gateway = await machine.next(cell)
            assert await failed(gateway.scheduler.submit("alice", model, 3, optim_step())) == "partial_gradients"
            assert cell.slots.models[model].pending == 0


async def test_sessions_last_and_so_does_their_end(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            open_, over = await gateway.opened(), await gateway.opened("bob")
            model = await gateway.made(session=open_)
            await gateway.scheduler.finish_session("bob", over, "errored", "boom")
            gateway = await machine.next(cell)
            sessions = gateway.scheduler.sessions
            assert sessions.beat("alice", open_).model_ids == [model]
            assert (sessions.get("bob", over).finish_reason, sessions.get("bob", over).finish_detail) == (
                "errored",
                "boom",
            )
            assert not sessions.get("alice", open_).is_finished


async def test_a_model_that_was_unloaded_stays_so(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            await succeeded(gateway.scheduler.submit("alice", model, 1, UnloadRequest()))
            gateway = await machine.next(cell)
            assert gateway.scheduler.model("alice", model).state == "unloaded"
            with pytest.raises(UnknownModel):
                gateway.scheduler.submit("alice", model, 2, forward_backward())


async def test_numbers_that_came_before_a_lower_one_are_not_run_again(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            late = [gateway.scheduler.submit("alice", model, seq, forward_backward(seq)) for seq in (3, 2, 1)]
            outcomes = [await succeeded(future) for future in late]
            gateway = await machine.next(cell)
            await succeeded(gateway.scheduler.submit("alice", model, 4, forward_backward(only=True)))
            assert [await succeeded(gateway.again(future)) for future in late] == outcomes
            assert cell.count(ForwardBackward) == 4
            assert gateway.scheduler.model("alice", model).pending == 0


async def test_what_the_cell_did_after_a_dropped_gradient_is_done_again_where_the_drop_is_not_on_record(
    tmp_path: Path,
) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next(ForwardBackward)
            _, _, after = gateway.submit(model, forward_backward(loss="no such"), optim_step(), forward_backward())
            await reached(hold)
            await after.accepted()
            gateway.is_stuck = True
            hold.release()
            await until(lambda: cell.slots.models[model].pending == 3)
            gateway = await machine.next(cell)
            await succeeded(gateway.again(after))
            assert cell.slots.models[model].pending == 3
            # Nor does the cell remember for ever what it said.
            await succeeded(gateway.scheduler.submit("alice", model, 4, optim_step()))
