"""When a model is given a recovery snapshot, and what it spares."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from gateway.scheduling.requests import ForwardBackwardRequest, UnloadRequest
from gateway.scheduling.snapshot_rules import SnapshotRules
from gateway.store.errors import JournalUnavailable
from tests.fakes.fake_cell import FakeCell
from tests.gateway.scheduling.lives import lives
from tests.gateway.scheduling.rig import (
    Rig,
    forward_backward,
    load,
    optim_step,
    path_of,
    reached,
    rig,
    save,
    succeeded,
    until,
    within,
)
from trainer_cell.protocol.commands import CreateModel, ForwardBackward, LoadState, SaveState
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.vault.layout import CheckpointAddress

EVERY_TWO = SnapshotRules(steps=2)


async def train(gateway: Rig, model: str, steps: int, first: int = 1) -> None:
    for step in range(steps):
        for future in gateway.submit(model, forward_backward(step), optim_step(), first=first + 2 * step):
            await succeeded(future)


def snapshots(cell: FakeCell) -> int:
    return sum(isinstance(command, SaveState) and command.kind == "recovery" for command in cell.commands)


def version_of(gateway: Rig, model: str) -> str | None:
    return gateway.vault.resolve(CheckpointAddress(model, "recovery", "latest"))


async def snapshot_noted(gateway: Rig, model: str, turn: int) -> None:
    def is_noted() -> bool:
        (record,) = (one for one in gateway.scheduler.journal.load().models if one.model_id == model)
        return record.snapshot_turn >= turn

    await until(is_noted)


async def test_a_model_in_training_is_given_one_every_so_many_steps(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=EVERY_TWO) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            await train(gateway, model, 7)
            await snapshot_noted(gateway, model, 12)
            assert snapshots(cell) == 3


async def test_what_it_holds_is_not_done_again_and_its_data_are_dropped(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=EVERY_TWO) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            await train(gateway, model, 5)
            await snapshot_noted(gateway, model, 8)
            trained = copy.copy(cell.slots.models[model])
        rows = gateway.scheduler.journal.load().commands
        data = await gateway.scheduler.journal.payloads([row.request_id for row in rows])
        assert set(data) == {row.request_id for row in rows if row.operation == "forward_backward" and row.turn == 9}
        with gateway.cell() as second:
            await succeeded(gateway.scheduler.submit("alice", model, 11, forward_backward(only=True)))
            assert second.slots.models[model] == trained
            assert [second.count(kind) for kind in (CreateModel, LoadState, ForwardBackward)] == [0, 1, 2]


async def test_after_a_load_what_was_read_is_needed_no_longer(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=EVERY_TWO) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            for future in gateway.submit(model, forward_backward(), optim_step(), save(), load(path_of(model))):
                await succeeded(future)
            await snapshot_noted(gateway, model, 4)
            assert snapshots(cell) == 1


async def test_one_that_fails_harms_nothing_and_is_not_tried_at_each_step(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=EVERY_TWO) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            cell.fail_next(SaveState, CommandFailed(ErrorKind.STORAGE_FAILED, "ENOSPC"))
            await train(gateway, model, 8)
            assert snapshots(cell) == 1
            trained = copy.copy(cell.slots.models[model])
        with gateway.cell() as second:
            await succeeded(gateway.scheduler.submit("alice", model, 17, forward_backward(only=True)))
            assert second.slots.models[model] == trained


async def test_a_load_that_left_the_optimizer_out_leaves_it_out_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell(no_load_optim=True) as cell:
            model = await gateway.model()
            await train(gateway, model, 1)
            await succeeded(gateway.scheduler.submit("alice", model, 3, save()))
            cell.fail_next(SaveState, CommandFailed(ErrorKind.STORAGE_FAILED, "ENOSPC"))
            await succeeded(gateway.scheduler.submit("alice", model, 4, load(path_of(model))))
            before = copy.copy(cell.slots.models[model])
        with gateway.cell() as second:
            await succeeded(gateway.scheduler.submit("alice", model, 5, forward_backward(only=True)))
            assert second.slots.models[model] == before


async def test_one_that_is_gone_as_soon_as_it_was_made_is_not_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, rules=EVERY_TWO) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            asked: list[str] = []

            def gone(version: str) -> None:
                asked.append(version)

            monkeypatch.setattr(gateway.vault, "lease", gone)
            await train(gateway, model, 2)
            await until(lambda: bool(asked) and model not in gateway.scheduler._turns._publications)
            trained = copy.copy(cell.slots.models[model])
        assert gateway.scheduler._queues[model].history.snapshot is None
        with gateway.cell() as second:
            await succeeded(gateway.scheduler.submit("alice", model, 5, forward_backward(only=True)))
            assert second.slots.models[model] == trained
            assert second.count(LoadState) == 0


async def test_another_is_not_begun_while_one_is_being_written(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=SnapshotRules(steps=1)) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            publish = cell.hold_next_publish()
            await train(gateway, model, 1)
            await reached(publish)
            await train(gateway, model, 2, first=3)
            assert snapshots(cell) == 1
            publish.release()
            await snapshot_noted(gateway, model, 2)
            await train(gateway, model, 1, first=7)
            await snapshot_noted(gateway, model, 8)
            assert snapshots(cell) == 2


async def test_while_the_journal_cannot_be_written_none_is_made_and_what_was_accepted_goes_on(tmp_path: Path) -> None:
    async with lives(tmp_path, rules=SnapshotRules(steps=1)) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next(ForwardBackward)
            step = (forward_backward(), optim_step())
            futures = gateway.submit(model, *step, *step)
            await reached(hold)
            await futures[-1].accepted()
            transact, full = gateway.transact, JournalUnavailable("the journal is full")
            gateway.transact = lambda batch: full
            gateway.journal.note_turn("nobody", 0)
            await until(lambda: not gateway.journal.is_available)
            hold.release()
            await until(lambda: cell.slots.models[model].step == 2)
            assert snapshots(cell) == 0
            gateway.transact = transact
            for future in futures:
                await succeeded(future)


async def test_of_what_was_done_no_data_are_kept_in_memory(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell():
            model = await gateway.model()
            sent = forward_backward(*range(100))
            future = gateway.scheduler.submit("alice", model, 1, sent)
            await succeeded(future)
            (_, change) = gateway.scheduler._queues[model].history.changes
            assert change.payload_bytes == future.payload_bytes == 1600
            assert isinstance(change.request, ForwardBackwardRequest)
            assert change.request.data == ()


async def test_one_that_is_whole_after_its_model_was_unloaded_is_removed(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=EVERY_TWO) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            publish = cell.hold_next_publish()
            await train(gateway, model, 2)
            await reached(publish)
            await succeeded(gateway.scheduler.submit("alice", model, None, UnloadRequest()))
            publish.release()
            await until(lambda: model not in gateway.scheduler._turns._publications)
            await until(lambda: version_of(gateway, model) is None)


async def test_what_it_replaced_is_looked_after(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=EVERY_TWO) as gateway:
        replaced: list[None] = []
        gateway.scheduler.catalog.saves.on_replaced = lambda: replaced.append(None)
        with gateway.cell():
            model = await gateway.model()
            await train(gateway, model, 2)
            await until(lambda: len(replaced) == 1)


async def test_what_brings_a_model_back_obeys_no_flags_for_clients(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=EVERY_TWO) as gateway:
        with gateway.cell() as cell:
            read, trained = await gateway.model(), await gateway.model()
            await train(gateway, read, 1)
            # What it reads is all there is to bring it back from.
            await succeeded(gateway.scheduler.submit("alice", read, 3, save()))
            cell.fail_next(SaveState, CommandFailed(ErrorKind.STORAGE_FAILED, "ENOSPC"))
            await succeeded(gateway.scheduler.submit("alice", read, 4, load(path_of(read))))
            await train(gateway, trained, 2)
            await snapshot_noted(gateway, trained, 4)
            before = copy.deepcopy(cell.slots.models)
        with gateway.cell(no_load_optim=True) as second:
            for model in (read, trained):
                await succeeded(gateway.scheduler.submit("alice", model, 5, forward_backward(only=True)))
            assert second.slots.models == before
            assert second.count(LoadState) == 2


@pytest.mark.parametrize("is_orderly", [True, False], ids=["stopped", "killed first"])
async def test_an_orderly_stop_leaves_nothing_to_be_done_again(tmp_path: Path, is_orderly: bool) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            await within(gateway.link.ready.wait())
            model = await gateway.model()
            await train(gateway, model, 3)
            await succeeded(gateway.scheduler.submit("alice", model, 7, forward_backward(9)))
            trained = copy.copy(cell.slots.models[model])
            if is_orderly:
                await gateway.scheduler.stop(20)
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            await succeeded(gateway.scheduler.submit("alice", model, 8, forward_backward(only=True)))
            assert cell.slots.models[model] == trained
            # The gradient that was open is accumulated again; without a snapshot everything is.
            assert cell.count(ForwardBackward) == (2 if is_orderly else 5)


async def test_clients_neither_see_nor_touch_them_and_an_unloaded_model_leaves_none(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=EVERY_TWO) as gateway:
        with gateway.cell():
            model = await gateway.model()
            await train(gateway, model, 2)
            await snapshot_noted(gateway, model, 4)
            assert version_of(gateway, model) is not None
            assert await gateway.scheduler.catalog.list("alice") == []
            await succeeded(gateway.scheduler.submit("alice", model, None, UnloadRequest()))
            await until(lambda: version_of(gateway, model) is None)
