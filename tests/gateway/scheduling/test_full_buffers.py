"""A cell that has no memory for one more capture is asked again when that can help, and not for ever."""

from __future__ import annotations

from pathlib import Path

from gateway.scheduling.durable import durable
from tests.gateway.scheduling.lives import lives
from tests.gateway.scheduling.rig import (
    failed,
    forward_backward,
    optim_step,
    reached,
    rig,
    rig_with_cell,
    save,
    succeeded,
    until,
)
from tests.gateway.scheduling.test_cell_epoch import kill, until_lost
from trainer_cell.protocol.commands import ForwardBackward, SaveState


async def test_a_save_for_which_there_never_is_memory_fails_after_one_more_try(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, save_buffers=0) as (gateway, cell):
        model = await gateway.model()
        for seq_id in (1, 2):
            assert await failed(gateway.scheduler.submit("alice", model, seq_id, save())) == "save_buffers_full"
            assert cell.count(SaveState) == 2 * seq_id
        await succeeded(gateway.scheduler.submit("alice", model, 3, forward_backward()))
        # Nothing of it is remembered.
        assert not gateway.scheduler._turns._execution.captures._tried_alone
        assert not gateway.scheduler.catalog.saves._open


async def test_that_there_once_was_no_memory_holds_up_no_later_save(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, save_buffers=1) as (gateway, cell):
        models = [await gateway.model() for _ in range(2)]
        hold = cell.hold_next_publish()
        first = gateway.scheduler.submit("alice", models[0], 1, save())
        await reached(hold)
        second = gateway.scheduler.submit("alice", models[1], 1, save())
        await until(lambda: second.waiting_for is not None)
        hold.release()
        for future in (first, second):
            await succeeded(future)
        cell._save_buffers = 2
        holds = [cell.hold_next_publish() for _ in models]
        later = [gateway.scheduler.submit("alice", model, 2, save("later")) for model in models]
        for hold in holds:
            await reached(hold)
        for hold in holds:
            hold.release()
        for future in later:
            await succeeded(future)


async def test_of_a_save_that_was_tried_alone_and_found_memory_nothing_is_remembered(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, save_buffers=0) as (gateway, cell):
        model = await gateway.model()
        hold = cell.hold_next(SaveState, after=1)
        saving = gateway.scheduler.submit("alice", model, 1, save())
        await reached(hold)
        cell._save_buffers = 1
        hold.release()
        await succeeded(saving)
        assert not gateway.scheduler._turns._execution.captures._tried_alone


async def test_a_save_that_is_made_again_waits_until_another_has_been_written(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            model, other, third = [await gateway.model() for _ in range(3)]
            cell.hold_next_publish()
            _, _, saving = gateway.submit(model, forward_backward(), optim_step(), save())
            await gateway.captured(saving)
            hold = cell.hold_next(ForwardBackward)
            running = gateway.scheduler.submit("alice", third, 1, forward_backward())
            await reached(hold)
            # It had its place before the save was lost, and has its turn before that.
            saved_first = await gateway.scheduler.submit("alice", other, 1, save()).accepted()
            await kill(cell)
        await until_lost(gateway)
        second = gateway.cell(save_buffers=1)
        publish = second.hold_next_publish()
        with second:
            await until(lambda: second.count(SaveState) == 2)
            assert saved_first.state == "writing"
            await durable(gateway.scheduler.journal.when_written)
            publish.release()
            for future in (saved_first, saving, running):
                await succeeded(future)
            # That of the other, and its own, which was refused once and not asked for again meanwhile.
            assert second.count(SaveState) == 3


async def test_a_lack_of_memory_that_an_earlier_gateway_did_not_hear_of_is_no_answer_now(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell(save_buffers=1) as cell:
            model, other = await gateway.made(1), await gateway.made(2)
            publish = cell.hold_next_publish()
            first = await gateway.scheduler.submit("alice", other, 1, save()).accepted()
            await reached(publish)
            hold = cell.hold_next(SaveState)
            saving = await gateway.scheduler.submit("alice", model, 1, save()).accepted()
            await reached(hold)
            await gateway.end()
            hold.release()
            gateway = await machine.start()
            await until(lambda: gateway.scheduler.is_ready)
            publish.release()
            await succeeded(gateway.again(first))
            await succeeded(gateway.again(saving))
