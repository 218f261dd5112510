"""What does not happen before what came before it is in the journal: the next gateway would find it, and not that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.scheduling import captures
from gateway.scheduling.durable import durable
from gateway.scheduling.recovery_snapshots import forget_snapshots
from gateway.scheduling.requests import UnloadRequest
from gateway.scheduling.snapshot_rules import SnapshotRules
from gateway.store.errors import JournalUnavailable
from gateway.store.writer import Queued
from tests.gateway.scheduling.lives import lives
from tests.gateway.scheduling.rig import (
    failed,
    forward_backward,
    load,
    optim_step,
    path_of,
    reached,
    save,
    succeeded,
    until,
)
from trainer_cell.protocol.commands import ForwardBackward, SaveState
from trainer_cell.vault.layout import CheckpointAddress, Vault

NOT_ON_RECORD = "what came before is not on record yet"


async def test_a_save_is_not_found_by_the_load_that_came_before_it_and_is_done_again(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            hold = cell.hold_next(ForwardBackward)
            training, loading, saving = gateway.submit(model, forward_backward(), load(path_of(model)), save(), first=1)
            await reached(hold)
            await durable(gateway.journal.when_written)
            gateway.is_stuck = True
            hold.release()
            await until(lambda: saving.waiting_for == NOT_ON_RECORD)
            gateway = await machine.next(cell)
            await succeeded(gateway.again(training))
            assert await failed(gateway.again(loading)) == "checkpoint_not_found"
            await succeeded(gateway.again(saving))


async def test_a_save_goes_on_as_soon_as_what_came_before_is_on_record(tmp_path: Path) -> None:
    """Who has nothing to save does not wait meanwhile."""
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model, other = await gateway.made(), await gateway.made(8)
            hold = cell.hold_next(ForwardBackward)
            _, saving = gateway.submit(model, forward_backward(), save())
            step = gateway.scheduler.submit("alice", other, 1, forward_backward())
            await reached(hold)
            await durable(gateway.journal.when_written)
            go_on, transact = threading.Event(), gateway.transact

            def slowly(batch: Sequence[Queued]) -> JournalUnavailable | None:
                go_on.wait()
                return transact(batch)

            gateway.transact = slowly
            hold.release()
            try:
                await until(lambda: saving.waiting_for == NOT_ON_RECORD and step.turn is not None)
                assert (cell.count(ForwardBackward), cell.count(SaveState)) == (2, 0)
            finally:
                go_on.set()
            await succeeded(saving)


async def test_the_snapshot_of_a_model_is_there_until_it_is_on_record_that_it_was_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = list[str]()

    async def remove(vault: Vault, model_id: str) -> None:
        removed.append(model_id)
        await forget_snapshots(vault, model_id)

    monkeypatch.setattr(captures, "forget_snapshots", remove)
    async with lives(tmp_path, rules=SnapshotRules(steps=1)) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            for future in gateway.submit(model, forward_backward(), optim_step()):
                await succeeded(future)
            snapshot = CheckpointAddress(model, "recovery", "latest")
            await until(lambda: gateway.vault.resolve(snapshot) is not None)
            await until(lambda: model not in gateway.scheduler._turns._publications)
            hold = cell.hold_next(ForwardBackward)
            last, unload = gateway.submit(model, forward_backward(), UnloadRequest(), first=3)
            await reached(hold)
            await durable(gateway.journal.when_written)
            gateway.is_stuck = True
            hold.release()
            await until(lambda: gateway.scheduler.model("alice", model).is_over)
            await until(lambda: bool(gateway.scheduler._turns._execution.captures._forgetting))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not removed
            await gateway.end()
            await asyncio.to_thread(cell.kill)
        gateway = await machine.start()
        assert gateway.vault.resolve(snapshot) is not None
        with gateway.cell():
            await succeeded(gateway.again(last))
            await succeeded(gateway.again(unload))
            await until(lambda: gateway.vault.resolve(snapshot) is None)
            assert removed == [model]
