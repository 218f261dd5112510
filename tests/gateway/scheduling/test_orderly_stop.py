"""What a stop in the middle of saves leaves: every model has its snapshot, and nothing is done again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.gateway.scheduling.rig import forward_backward, rig, save, succeeded, until, within
from tests.gateway.scheduling.test_snapshots import snapshots, train, version_of
from trainer_cell.protocol.commands import ForwardBackward


async def test_a_model_whose_save_is_being_written_is_given_its_snapshot_after_that(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell(save_buffers=1) as cell:
            await within(gateway.link.ready.wait())
            model, other = await gateway.model(), await gateway.model()
            await train(gateway, other, 1)
            await train(gateway, model, 1)
            hold = cell.hold_next_publish()
            saving = gateway.scheduler.submit("alice", model, 3, save())
            await gateway.captured(saving)
            stopping = asyncio.create_task(gateway.scheduler.stop(20))
            # The other model's finds no memory, and waits, too.
            await until(lambda: snapshots(cell) > 0)
            hold.release()
            await stopping
            await succeeded(saving)
            assert version_of(gateway, model) is not None
            assert version_of(gateway, other) is not None
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            for one, number in ((model, 4), (other, 3)):
                await succeeded(gateway.scheduler.submit("alice", one, number, forward_backward(only=True)))
            assert cell.count(ForwardBackward) == 2


async def test_a_save_that_is_never_over_does_not_keep_the_service_beyond_its_grace(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            await within(gateway.link.ready.wait())
            model = await gateway.model()
            await train(gateway, model, 1)
            hold = cell.hold_next_publish()
            saving = gateway.scheduler.submit("alice", model, 3, save())
            await gateway.captured(saving)
            await within(gateway.scheduler.stop(0.2))
            assert version_of(gateway, model) is None
            hold.release()
