"""In what order commands run, and what their retries get."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gateway.scheduling.errors import (
    InvalidRequest,
    SequenceConflict,
)
from gateway.scheduling.requests import ForwardBackwardRequest, Request, UnloadRequest
from tests.gateway.scheduling.rig import (
    create,
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
)
from trainer_cell.protocol.commands import (
    CreateModel,
    ForwardBackward,
    LoadState,
    OptimStep,
    SaveState,
)


@pytest.mark.parametrize("seed", range(5))
async def test_commands_run_by_number_however_they_arrive(tmp_path: Path, seed: int) -> None:
    requests = [
        forward_backward(1),
        optim_step(),
        save("a"),
        forward_backward(2, 3),
        forward_backward(4),
        optim_step(),
        save("b"),
    ]
    expected = [ForwardBackward, OptimStep, SaveState, ForwardBackward, ForwardBackward, OptimStep, SaveState]
    order = list(range(len(requests)))
    random.Random(seed).shuffle(order)
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        futures = [gateway.scheduler.submit("alice", model, index + 1, requests[index]) for index in order]
        for future in futures:
            await succeeded(future)
        assert [type(command) for command in cell.commands[1:]] == expected
        assert gateway.scheduler.model("alice", model).step == 2
        assert gateway.scheduler.model("alice", model).pending == 0


async def test_nothing_runs_before_the_first_number_came(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        other = await gateway.model()
        early: dict[int, Request] = {4: save(), 3: optim_step(), 2: forward_backward(9)}
        waiting = [gateway.scheduler.submit("alice", model, seq, request) for seq, request in early.items()]
        await succeeded(gateway.scheduler.submit("alice", other, 1, forward_backward()))
        assert [future.state for future in waiting] == ["queued"] * 3
        first = gateway.scheduler.submit("alice", model, 1, forward_backward(5, 6))
        for future in (first, *waiting):
            await succeeded(future)
        # Both forward_backwards are in the step.
        assert cell.slots.models[model].momentum == 3.0


async def test_commands_accepted_before_the_create_finished_wait_for_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        session = gateway.session()
        made = gateway.scheduler.submit_create("alice", session, 0, create())
        trained = gateway.scheduler.submit("alice", made.model_id, 1, forward_backward())
        assert gateway.scheduler.model("alice", made.model_id).state == "creating"
        with gateway.cell():
            await succeeded(trained)
            assert made.state == "succeeded"
            assert gateway.scheduler.model("alice", made.model_id).state == "ready"


async def test_commands_of_a_model_that_was_not_made_fail_with_its_reason(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        made = gateway.scheduler.submit_create("alice", gateway.session(), 0, create(base_model="no/such"))
        trained = gateway.scheduler.submit("alice", made.model_id, 1, forward_backward())
        assert await failed(made) == "bad_command"
        assert await failed(trained) == "bad_command"
        assert "no/such" in (trained.error.message if trained.error else "")
        assert gateway.scheduler.model("alice", made.model_id).state == "failed"
        assert cell.commands == []


async def test_a_retry_gets_the_same_future_and_runs_once(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        session = gateway.session()
        made = [gateway.scheduler.submit_create("alice", session, 0, create()) for _ in range(3)]
        model = made[0].model_id
        requests: list[Request] = [forward_backward(), optim_step(), save(), load(path_of(model))]
        for seq, request in enumerate(requests, start=1):
            sent = [gateway.scheduler.submit("alice", model, seq, request) for _ in range(5)]
            await succeeded(sent[0])
            gateway.scheduler.futures.mark_told(sent[0])
            sent.append(gateway.scheduler.submit("alice", model, seq, request))
            assert {future.request_id for future in sent} == {sent[0].request_id}
        assert {future.request_id for future in made} == {made[0].request_id}
        told = [type(command) for command in cell.commands if getattr(command, "kind", "") != "recovery"]
        assert told == [CreateModel, ForwardBackward, OptimStep, SaveState, LoadState]
        assert gateway.scheduler.model("alice", model).step == 1


async def test_the_same_number_with_another_content_is_a_conflict(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        session = gateway.session()
        made = gateway.scheduler.submit_create("alice", session, 0, create(rank=4))
        with pytest.raises(SequenceConflict):
            gateway.scheduler.submit_create("alice", session, 0, create(rank=8))
        trained = gateway.scheduler.submit("alice", made.model_id, 1, forward_backward(1))
        early = gateway.scheduler.submit("alice", made.model_id, 5, save("x"))
        await succeeded(trained)
        for seq, other in ((1, forward_backward(2)), (1, optim_step()), (5, save("y"))):
            with pytest.raises(SequenceConflict):
                gateway.scheduler.submit("alice", made.model_id, seq, other)
        assert early.state == "queued"
        assert cell.count(ForwardBackward) == 1


async def test_a_retry_is_known_after_its_payload_was_dropped(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        trained = gateway.scheduler.submit("alice", model, 1, forward_backward())
        assert isinstance(trained.request, ForwardBackwardRequest)
        assert trained.request.data
        await succeeded(trained)
        assert isinstance(trained.request, ForwardBackwardRequest)
        assert trained.request.data == ()
        assert gateway.scheduler.submit("alice", model, 1, forward_backward()) is trained


async def test_a_rejected_request_spends_its_number_and_fails_at_its_place(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        after = gateway.scheduler.submit("alice", model, 3, save())
        bad = gateway.scheduler.submit("alice", model, 2, rejected("load"))
        assert bad.state == "queued"
        gateway.scheduler.submit("alice", model, 1, forward_backward())
        assert await failed(bad) == "bad_command"
        await succeeded(after)


async def test_numbers_start_at_one(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        for seq in (0, -1, 2**31):
            with pytest.raises(InvalidRequest):
                gateway.scheduler.submit("alice", model, seq, forward_backward())
        await succeeded(gateway.scheduler.submit("alice", model, 1, forward_backward()))


async def test_commands_without_a_number_run_behind_what_had_come_without_a_gap(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        hold = cell.hold_next(ForwardBackward)
        gateway.scheduler.submit("alice", model, 1, forward_backward())
        await reached(hold)
        gateway.scheduler.submit("alice", model, 2, optim_step())
        last = gateway.scheduler.submit("alice", model, 4, save("late"))
        plain = gateway.scheduler.submit("alice", model, None, save("plain"))
        gateway.scheduler.submit("alice", model, 3, forward_backward())
        hold.release()
        await succeeded(last)
        names = [getattr(command, "name", type(command).__name__) for command in cell.commands[1:]]
        assert names == ["ForwardBackward", "OptimStep", "plain", "ForwardBackward", "late"]
        assert plain.state == "succeeded"


async def test_an_idempotency_key_tells_retries_from_new_commands(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model, other = await gateway.model(), await gateway.model()
        first = gateway.scheduler.submit("alice", model, None, save("a"), idempotency_key="k")
        await succeeded(first)
        assert gateway.scheduler.submit("alice", model, None, save("a"), idempotency_key="k") is first
        for where, request in ((model, save("b")), (other, save("a"))):
            with pytest.raises(SequenceConflict):
                gateway.scheduler.submit("alice", where, None, request, idempotency_key="k")
        again = gateway.scheduler.submit("alice", model, None, save("a"))
        assert await failed(again) == "checkpoint_exists"
        assert cell.count(SaveState) == 2


async def test_models_made_by_plain_rest_are_told_apart_by_their_keys(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        first = gateway.scheduler.submit_create_plain("alice", create(), "k")
        again = gateway.scheduler.submit_create_plain("alice", create(), "k")
        third = gateway.scheduler.submit_create_plain("alice", create(), "other")
        assert again is first
        assert third.model_id != first.model_id
        with pytest.raises(SequenceConflict):
            gateway.scheduler.submit_create_plain("alice", create(rank=8), "k")
        assert gateway.scheduler.submit_create_plain("bob", create(rank=8), "k").model_id != first.model_id
        await succeeded(third)


async def test_what_waits_for_a_number_that_can_never_come_is_answered_when_the_model_ends(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        early = gateway.scheduler.submit("alice", model, 5, optim_step())
        await succeeded(gateway.scheduler.submit("alice", model, None, UnloadRequest()))
        await failed(early)
        never = gateway.scheduler.submit_create("alice", gateway.session(), 0, create(base_model="nobody/nothing"))
        before = gateway.scheduler.submit("alice", never.model_id, 3, optim_step())
        await failed(never)
        after = gateway.scheduler.submit("alice", never.model_id, 7, optim_step())
        for future in (before, after):
            await failed(future)
        assert gateway.scheduler.model("alice", never.model_id).pending == 0
