"""One tenant's odd requests and one bad moment of a disk or a cell are nobody else's trouble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gateway.scheduling import slots
from gateway.scheduling.errors import InvalidRequest
from gateway.scheduling.model_queue import MOST_AHEAD
from gateway.store.errors import JournalUnavailable
from tests.gateway.scheduling.rig import (
    create,
    forward_backward,
    optim_step,
    reached,
    rig,
    rig_with_cell,
    save,
    succeeded,
    until,
)


async def test_a_number_far_ahead_of_all_others_is_refused(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        model = await gateway.model()
        gateway.scheduler.submit("alice", model, MOST_AHEAD, forward_backward())
        with pytest.raises(InvalidRequest, match="ahead of the others"):
            gateway.scheduler.submit("alice", model, MOST_AHEAD + 1, forward_backward())


async def test_a_save_may_find_all_buffers_taken_as_often_as_it_will(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, save_buffers=1) as (gateway, cell):
        models = {tenant: await gateway.model(tenant) for tenant in "abcdef"}
        holds = [cell.hold_next_publish() for _ in range(4 * len(models))]
        sent = [
            gateway.scheduler.submit(tenant, model, seq_id, save(f"n{seq_id}"))
            for seq_id in range(1, 5)
            for tenant, model in models.items()
        ]
        for hold in holds:
            await reached(hold)
            # Those that wait have their try while this one is being written.
            await gateway.model()
            hold.release()
        for saving in sent:
            await succeeded(saving)
            assert saving.attempts == 1


async def test_a_model_waits_for_a_journal_that_cannot_be_read_just_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_READ_AGAIN_S", 0.01)
    async with rig(tmp_path) as gateway:
        with gateway.cell():
            model = await gateway.model()
            await succeeded(gateway.scheduler.submit("alice", model, 1, forward_backward()))
        journal = gateway.scheduler.journal
        read, failures = journal.payloads, 3

        async def payloads(request_ids: Sequence[str]) -> dict[str, bytes]:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise JournalUnavailable("disk I/O error")
            return await read(request_ids)

        monkeypatch.setattr(journal, "payloads", payloads)
        with gateway.cell():
            await succeeded(gateway.scheduler.submit("alice", model, 2, forward_backward()))
            assert failures < 0


async def test_a_cell_that_dialled_again_is_told_nothing_before_it_is_taken_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the gateway would believe the hello of before that."""
    async with rig_with_cell(tmp_path, slots=2) as (gateway, cell):
        first, second = await gateway.model(), await gateway.model()
        for model in (first, second):
            for future in gateway.submit(model, forward_backward(), optim_step()):
                await succeeded(future)
        journal, waiting = gateway.scheduler.journal, list[Callable[[], None]]()
        monkeypatch.setattr(journal, "when_written", waiting.append)
        third = gateway.scheduler.submit_create("alice", gateway.session(), 0, create())
        await until(lambda: bool(waiting))
        hello = gateway.link.hello
        cell.drop_connection()
        await until(lambda: gateway.link.hello not in (None, hello))
        monkeypatch.undo()
        for written in waiting:
            written()
        await succeeded(third)
        for model in (first, second):
            await succeeded(gateway.scheduler.submit("alice", model, 3, forward_backward()))


async def test_a_cell_remembers_nothing_of_what_the_gateway_did_on_its_own(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, slots=1) as (gateway, cell):
        models = [await gateway.model(), await gateway.model()]
        for seq_id in range(1, 4):
            for model in models:
                await succeeded(gateway.scheduler.submit("alice", model, seq_id, forward_backward()))
        await until(lambda: not cell._link._book._outcomes)
