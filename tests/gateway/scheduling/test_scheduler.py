"""The scheduler over a fake cell: making models, failing early, fairness, tenants, stopping."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.scheduling.errors import (
    Stopping,
    UnknownFuture,
    UnknownModel,
    UnknownSession,
)
from gateway.scheduling.requests import UnloadRequest
from gateway.scheduling.scheduler import CreationRequest
from tests.gateway.scheduling.rig import (
    create,
    failed,
    forward_backward,
    optim_step,
    reached,
    rejected,
    rig_with_cell,
    save,
    succeeded,
)
from trainer_cell.protocol.commands import (
    ForwardBackward,
    OptimStep,
    SaveState,
)
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Progress


@pytest.mark.parametrize(
    "request_",
    [
        create(rank=0),
        create(rank=65),
        create(base_model="other/base"),
        create(train_attn=False, train_mlp=False, train_unembed=False),
        create(seed=-1),
        create(seed=2**64),
        rejected("create"),
    ],
    ids=["rank 0", "rank too large", "unknown base", "nothing to train", "negative seed", "seed too large", "rejected"],
)
async def test_an_impossible_create_fails_its_future_and_touches_no_rank(
    tmp_path: Path, request_: CreationRequest
) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        made = gateway.scheduler.submit_create("alice", gateway.session(), 0, request_)
        assert await failed(made) == "bad_command"
        assert made.operation == "create"
        assert cell.commands == []


async def test_two_tenants_see_nothing_of_each_other(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        scheduler = gateway.scheduler
        session = gateway.session("alice")
        made = scheduler.submit_create("alice", session, 0, create())
        saved = scheduler.submit("alice", made.model_id, 1, save())
        await succeeded(saved)
        stranger, nobody = "bob", "0" * 24
        refusals = []
        for the_session, the_model, the_future in (
            (session, made.model_id, saved.request_id),
            (nobody, f"{nobody}:train:0", "future-none"),
        ):
            for kind, call in (
                (UnknownSession, lambda at=the_session: scheduler.sessions.beat(stranger, at)),
                (UnknownSession, lambda at=the_session: scheduler.sessions.finish(stranger, at, "success")),
                (UnknownSession, lambda at=the_session: scheduler.submit_create(stranger, at, 1, create())),
                (UnknownModel, lambda at=the_model: scheduler.model(stranger, at)),
                (UnknownModel, lambda at=the_model: scheduler.submit(stranger, at, 2, optim_step())),
                (UnknownModel, lambda at=the_model: scheduler.submit(stranger, at, None, UnloadRequest())),
                (UnknownFuture, lambda at=the_future: scheduler.futures.get(stranger, at)),
            ):
                with pytest.raises(kind) as refused:
                    call()  # type: ignore[no-untyped-call]
                refusals.append(refused.value.message.replace(the_session, "S").replace(the_future, "F"))
        assert refusals[: len(refusals) // 2] == refusals[len(refusals) // 2 :]
        assert scheduler.models(stranger) == []
        assert scheduler.sessions.list(stranger) == []
        assert await scheduler.catalog.list(stranger) == []
        assert len(await scheduler.catalog.list("alice")) == 1


async def test_progress_of_a_save_shows_on_its_future(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        seen = []
        saving = gateway.scheduler.submit("alice", model, 1, save())
        note = saving.note_progress

        def watched(said: Progress) -> None:
            note(said)
            seen.append((saving.state, saving.progress))

        saving.note_progress = watched  # type: ignore[method-assign]
        await succeeded(saving)
        assert [state for state, _ in seen] == ["capturing", "writing", "publishing"]
        done_bytes, total = seen[-1][1] or (0, 1)
        assert done_bytes == total > 0


async def test_stopping_finishes_the_running_command_and_refuses_the_rest(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        hold = cell.hold_next(ForwardBackward)
        running = gateway.scheduler.submit("alice", model, 1, forward_backward())
        queued = gateway.scheduler.submit("alice", model, 2, optim_step())
        await reached(hold)
        polls = [asyncio.create_task(queued.wait(60)) for _ in range(10)]
        stopping = asyncio.create_task(gateway.scheduler.stop())
        assert await asyncio.gather(*polls) == [False] * 10
        assert not await queued.wait(60)
        for refused in (
            lambda: gateway.scheduler.submit("alice", model, 3, forward_backward()),
            lambda: gateway.scheduler.submit_create("alice", gateway.session(), 0, create()),
            lambda: gateway.scheduler.submit_create_plain("alice", create()),
        ):
            with pytest.raises(Stopping):
                refused()
        assert not stopping.done()
        hold.release()
        await stopping
        assert running.state == "succeeded"
        assert queued.state == "queued"
        assert cell.count(OptimStep) == 0


async def test_a_tenant_with_a_hundred_commands_does_not_starve_another(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        busy, quiet = await gateway.model("alice"), await gateway.model("bob")
        hold = cell.hold_next(ForwardBackward)
        hundred = [gateway.scheduler.submit("alice", busy, seq, forward_backward(*range(500))) for seq in range(1, 101)]
        await reached(hold)
        one = await gateway.scheduler.submit("bob", quiet, 1, forward_backward()).accepted()
        hold.release()
        await succeeded(one)
        await succeeded(hundred[-1])
        ran = [command.model_id for command in cell.commands if isinstance(command, ForwardBackward)]
        assert ran.index(quiet) < 10


async def test_models_of_one_tenant_take_turns(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        models = [await gateway.model() for _ in range(3)]
        hold = cell.hold_next(ForwardBackward)
        for model in models:
            futures = [gateway.scheduler.submit("alice", model, seq, forward_backward()) for seq in range(1, 6)]
        await reached(hold)
        await futures[-1].accepted()
        hold.release()
        await succeeded(futures[-1])
        ran = [command.model_id for command in cell.commands if isinstance(command, ForwardBackward)]
        assert ran == models * 5


async def test_a_save_with_an_impossible_name_or_lifetime_fails_before_the_cell(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        names = ("../x", "/etc/x", "a/b", ".", "..", "", "x\0", "x\n", "x" * 300, " ", "x ", ".hidden", "x.", "\ud800")
        wrong = [save(name) for name in names] + [save(ttl_seconds=ttl) for ttl in (-1, 0, 3599, 2**40, 2**70)]
        for seq, request in enumerate(wrong, start=1):
            assert await failed(gateway.scheduler.submit("alice", model, seq, request)) == "bad_command"
        assert cell.count(SaveState) == 0
        fine = gateway.scheduler.submit("alice", model, len(wrong) + 1, save(ttl_seconds=3600))
        await succeeded(fine)


async def test_a_failure_the_cell_answers_is_the_future_s(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model()
        cell.fail_next(SaveState, CommandFailed(ErrorKind.STORAGE_FAILED, "rank 1: ENOSPC"))
        assert await failed(gateway.scheduler.submit("alice", model, 1, save())) == "storage_failed"
        await succeeded(gateway.scheduler.submit("alice", model, 2, save()))
