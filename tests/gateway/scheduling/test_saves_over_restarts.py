"""Saves and snapshots that were under way when their gateway was killed."""

from __future__ import annotations

import asyncio
import errno
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.scheduling import settlement
from gateway.scheduling.durable import durable
from gateway.scheduling.snapshot_rules import SnapshotRules
from tests.gateway.scheduling.lives import lives
from tests.gateway.scheduling.rig import (
    forward_backward,
    optim_step,
    reached,
    save,
    succeeded,
    until,
)
from trainer_cell.protocol.commands import (
    ForgetModels,
    OptimStep,
    SaveState,
)
from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import read_manifest


async def test_a_save_that_is_being_published_is_adopted(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next_publish()
            saving, _, step = gateway.submit(model, save(), forward_backward(), optim_step())
            await succeeded(step)
            gateway = await machine.next(cell)
            assert gateway.again(saving).state == "writing"
            # It holds up nobody now either.
            await succeeded(gateway.scheduler.submit("alice", model, 4, forward_backward(only=True)))
            hold.release()
            saved = await succeeded(gateway.again(saving))
            assert read_manifest(gateway.version_dir(saved)).step == 0
            assert (cell.count(SaveState), cell.count(ForgetModels)) == (1, 0)
            assert (await succeeded(gateway.scheduler.submit("alice", model, 5, save("later")))).step == 1


async def test_a_save_whose_capture_was_not_on_record_yet_is_adopted_too(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next_publish()
            held = cell.hold_next(SaveState)
            saving = await gateway.scheduler.submit("alice", model, 1, save()).accepted()
            await reached(held)
            gateway.is_stuck = True
            held.release()
            await reached(hold)
            await until(lambda: saving.turn is not None)
            gateway = await machine.next(cell)
            hold.release()
            saved = await succeeded(gateway.again(saving))
            assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == saved.version
            assert len([command for command in cell.executed if isinstance(command, SaveState)]) == 1


@pytest.mark.parametrize("has_cell", [True, False], ids=["the cell lives", "both die"])
async def test_a_save_that_was_published_while_no_gateway_lived_is_settled(tmp_path: Path, has_cell: bool) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next_publish()
            saving = gateway.scheduler.submit("alice", model, 1, save())
            await until(lambda: saving.state == "writing")
            await succeeded(gateway.scheduler.submit("alice", model, 2, forward_backward()))
            await gateway.end()
            hold.release()
            disk = Vault(gateway.vault.root)
            await until(lambda: disk.resolve(CheckpointAddress(model, "weights", "n")) is not None)
            if not has_cell:
                await asyncio.to_thread(cell.kill)
            gateway = await machine.start()
            with ExitStack() as stack:
                alive = cell if has_cell else stack.enter_context(gateway.cell())
                saved = await succeeded(gateway.again(saving))
                assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == saved.version
                assert alive.count_saves(model) == (1 if has_cell else 0)


async def test_a_save_that_could_not_be_looked_up_and_is_made_again_is_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next_publish()
            saving = gateway.scheduler.submit("alice", model, 1, save())
            await until(lambda: saving.state == "writing")
            await durable(gateway.journal.when_written)
            await gateway.end()
            hold.release()
            disk = Vault(gateway.vault.root)
            await until(lambda: disk.resolve(CheckpointAddress(model, "weights", "n")) is not None)
        look, failures = settlement.settle_publish, [StorageFailed("read", Path("manifest.json"), errno.EIO)]

        def look_later(*facts: Any) -> Any:
            if failures:
                raise failures.pop()
            return look(*facts)

        monkeypatch.setattr(settlement, "settle_publish", look_later)
        gateway = await machine.start()
        with gateway.cell() as second:
            # The name is found to be taken behind the ranks' back, as in a real cell.
            second.hold_next_publish().release()
            saved = await succeeded(gateway.again(saving))
            assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == saved.version
            assert second.count_saves(model) == 1
            assert failures == []


async def test_a_snapshot_never_holds_what_the_journal_does_not_know_of(tmp_path: Path) -> None:
    async with lives(tmp_path, rules=SnapshotRules(steps=1)) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next(OptimStep)
            _, step = gateway.submit(model, forward_backward(), optim_step())
            await reached(hold)
            await step.accepted()
            gateway.is_stuck = True
            hold.release()
            await until(lambda: cell.slots.models[model].step == 1)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await until(lambda: cell.count(SaveState) > 0)
        gateway = await machine.next()
        with gateway.cell() as second:
            assert (await succeeded(gateway.again(step))).step == 1
            assert second.slots.models[model].step == 1


async def test_a_save_waits_for_the_room_that_a_snapshot_of_the_gateway_before_still_takes(tmp_path: Path) -> None:
    async with lives(tmp_path, rules=SnapshotRules(steps=1)) as machine:
        gateway = machine.gateway
        with gateway.cell(save_buffers=1) as cell:
            model, other = await gateway.made(1), await gateway.made(2)
            hold = cell.hold_next_publish()
            for future in gateway.submit(model, forward_backward(), optim_step()):
                await succeeded(future)
            await until(lambda: cell.count(SaveState) > 0)
            gateway = await machine.next(cell)
            saving = gateway.scheduler.submit("alice", other, 1, save())
            await until(lambda: saving.waiting_for is not None or saving.is_done)
            hold.release()
            await succeeded(saving)


async def test_of_two_saves_the_second_waits_until_the_outcome_of_the_first_is_on_record(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next_publish()
            first, second = gateway.submit(model, save("a"), save("b"))
            await second.accepted()
            await reached(hold)
            await until(lambda: first.turn is not None)
            await durable(gateway.journal.when_written)
            gateway.is_stuck = True
            hold.release()
            await until(lambda: second.waiting_for == "what came before is not on record yet")
            assert cell.count(SaveState) == 1
            gateway = await machine.next(cell)
            for future in (first, second):
                await succeeded(gateway.again(future))
            assert cell.count(SaveState) == 2


async def test_a_save_that_a_cell_without_a_connection_finishes_is_found_and_not_made_again(tmp_path: Path) -> None:
    """The cell is no more attached, but writes on: it is over when its epoch is."""
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            publish = cell.hold_next_publish()
            saving = await gateway.scheduler.submit("alice", model, 1, save()).accepted()
            await reached(publish)
            await until(lambda: saving.state == "writing")
            cell._link._path = tmp_path / "nowhere"
            cell.drop_connection()
            await until(lambda: not gateway.link.ready.is_set())
            with gateway.cell() as second:
                await until(gateway.link.ready.is_set)
                await durable(gateway.journal.when_written)
                publish.release()
                disk = Vault(gateway.vault.root)
                await until(lambda: disk.resolve(CheckpointAddress(model, "weights", "n")) is not None)
                await asyncio.to_thread(cell.kill)
                saved = await succeeded(saving)
                assert gateway.vault.resolve(CheckpointAddress(model, "weights", "n")) == saved.version
                assert second.count_saves(model) == 0


async def test_what_waits_is_counted_again_after_a_restart(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        model = (await gateway.created()).model_id
        waiting = [await future.accepted() for future in gateway.submit(model, forward_backward(), save())]
        gateway = await machine.next()
        assert gateway.scheduler.model("alice", model).pending == 3
        with gateway.cell():
            for future in waiting:
                await succeeded(gateway.again(future))
        assert gateway.scheduler.model("alice", model).pending == 0
