"""What a gateway that starts does not decide before a cell that lives, or a disk, has told what came of it."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from gateway.scheduling.durable import durable
from gateway.scheduling.requests import UnloadRequest
from gateway.scheduling.turns import MOST_ATTEMPTS
from tests.gateway.scheduling.lives import lives
from tests.gateway.scheduling.rig import failed, forward_backward, optim_step, reached, save, succeeded, until
from trainer_cell.protocol.commands import CreateModel, DiscardGradients, ForgetModels, ForwardBackward
from trainer_cell.vault.layout import CheckpointAddress


async def test_a_save_that_is_to_be_made_again_is_made_before_its_model_is_unloaded(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            cell.hold_next_publish()
            saving = await gateway.scheduler.submit("alice", model, 1, save()).accepted()
            await until(lambda: saving.state == "writing")
            unload = await gateway.scheduler.submit("alice", model, 2, UnloadRequest()).accepted()
            await durable(gateway.journal.when_written)
            await gateway.end()
            await asyncio.to_thread(cell.kill)
        gateway = await machine.start()
        assert not gateway.again(unload).is_done
        with gateway.cell():
            saved = await succeeded(gateway.again(saving))
            assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == saved.version
            await succeeded(gateway.again(unload))


async def test_a_command_is_not_held_to_end_cells_while_one_that_ran_it_may_live(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next(ForwardBackward)
            running = await gateway.scheduler.submit("alice", model, 1, forward_backward()).accepted()
            await reached(hold)
            await durable(partial(gateway.journal.note_attempt, running.request_id, MOST_ATTEMPTS))
            await gateway.end()
            hold.release()
            gateway = await machine.start()
            await succeeded(gateway.again(running))
            assert cell.count(ForwardBackward) == 1


async def test_a_command_under_which_so_many_cells_were_lost_fails_once_another_has_come(tmp_path: Path) -> None:
    """The control of the one above."""
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next(ForwardBackward)
            running = await gateway.scheduler.submit("alice", model, 1, forward_backward()).accepted()
            await reached(hold)
            await durable(partial(gateway.journal.note_attempt, running.request_id, MOST_ATTEMPTS))
            await gateway.end()
            await asyncio.to_thread(cell.kill)
        gateway = await machine.start()
        with gateway.cell() as second:
            assert await failed(gateway.again(running)) == "cell_lost"
            assert second.count(ForwardBackward) == 0


async def test_a_model_whose_slot_is_freed_after_its_making_was_told_is_brought_back(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            hold = cell.hold_next(CreateModel)
            made = await gateway.created()
            await reached(hold)
            refused, step = gateway.submit(made.model_id, forward_backward(loss="no such"), optim_step())
            await durable(gateway.journal.when_written)
            gateway.is_stuck = True
            hold.release()
            # The slot has come further than the outcomes tell: of a dropped gradient there is none.
            await until(lambda: cell.count(DiscardGradients) == 1)
            gateway = await machine.next(cell)
            assert await failed(gateway.again(refused)) == "bad_command"
            assert await failed(gateway.again(step)) == "partial_gradients"
            await succeeded(gateway.scheduler.submit("alice", made.model_id, 3, forward_backward()))
            assert cell.count(ForgetModels) == 1
