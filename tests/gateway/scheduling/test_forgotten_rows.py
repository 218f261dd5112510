"""A gateway whose journal has forgotten what nobody needs, or lost what somebody does."""

from __future__ import annotations

import copy
import sqlite3
from pathlib import Path

import pytest

from gateway.scheduling import upkeep
from gateway.scheduling.errors import SequenceConflict
from gateway.scheduling.snapshot_rules import SnapshotRules
from tests.gateway.scheduling.lives import Life, lives
from tests.gateway.scheduling.rig import failed, forward_backward, optim_step, succeeded, until


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_PRUNE_S", 0.01)
    monkeypatch.setattr(upkeep, "_ROUND_S", 0.01)
    monkeypatch.setattr(upkeep, "TOLD_GRACE_S", 0.0)
    monkeypatch.setattr(upkeep, "REMEMBERED", 0)


def numbers(gateway: Life, model: str) -> list[int | None]:
    return [row.seq_id for row in gateway.journal.load().commands if row.model_id == model]


async def test_a_model_of_which_all_was_forgotten_goes_on_where_it_was(tmp_path: Path) -> None:
    async with lives(tmp_path, rules=SnapshotRules(steps=1)) as machine:
        gateway = machine.gateway
        with gateway.cell():
            made = await gateway.created()
            futures = [made, *gateway.submit(made.model_id, forward_backward(), optim_step())]
            for future in futures:
                await succeeded(future)
                gateway.scheduler.futures.mark_told(future)
            await until(lambda: numbers(gateway, made.model_id) == [])
        gateway = await machine.next()
        with pytest.raises(SequenceConflict):
            gateway.scheduler.submit("alice", made.model_id, 2, optim_step())
        with gateway.cell() as cell:
            for future in gateway.submit(made.model_id, forward_backward(5), optim_step(), first=3):
                await succeeded(future)
            trained = copy.copy(cell.slots.models[made.model_id])
            assert trained.step == 2
        gateway = await machine.next()
        with gateway.cell() as second:
            await succeeded(gateway.scheduler.submit("alice", made.model_id, 5, forward_backward(only=True)))
            assert second.slots.models[made.model_id] == trained


async def test_of_a_model_that_nobody_uses_no_number_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "REMEMBERED", 4096)
    monkeypatch.setattr(upkeep, "UNTOLD_GRACE_S", 0.0)
    async with lives(tmp_path, rules=SnapshotRules(steps=1)) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = (await gateway.created()).model_id
            for future in gateway.submit(model, forward_backward(), optim_step()):
                await succeeded(future)
            await until(lambda: numbers(gateway, model) == [])
            # In memory as well: which content a number had is not known any more.
            await until(lambda: not gateway.scheduler._queues[model].is_spent(2))
            with pytest.raises(SequenceConflict):
                gateway.scheduler.submit("alice", model, 2, optim_step())
            for future in gateway.submit(model, forward_backward(5), optim_step(), first=3):
                await succeeded(future)
            assert cell.slots.models[model].step == 2


async def test_an_answer_that_outlives_those_after_it_holds_up_no_number(tmp_path: Path) -> None:
    async with lives(tmp_path, rules=SnapshotRules(steps=1), gap_patience_s=0.4) as machine:
        gateway = machine.gateway
        with gateway.cell():
            made = await gateway.created()
            untold, *told = [made, *gateway.submit(made.model_id, forward_backward(), optim_step())]
            await succeeded(untold)
            for future in told:
                await succeeded(future)
                gateway.scheduler.futures.mark_told(future)
            await until(lambda: numbers(gateway, made.model_id) == [0])
        gateway = await machine.next()
        with gateway.cell():
            await succeeded(gateway.again(untold))
            # The number before it never comes, and is sealed.
            await succeeded(gateway.scheduler.submit("alice", made.model_id, 4, forward_backward()))


async def test_a_command_whose_data_the_journal_has_lost_fails_and_does_not_run_without_them(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        model = (await gateway.created()).model_id
        waiting = await gateway.scheduler.submit("alice", model, 1, forward_backward()).accepted()
        await gateway.end()
        with sqlite3.connect(tmp_path / "journal.sqlite3") as connection:
            assert connection.execute("delete from payloads").rowcount == 1
        connection.close()
        gateway = await machine.start()
        with gateway.cell() as cell:
            assert await failed(gateway.again(waiting)) == "storage_failed"
            await succeeded(gateway.scheduler.submit("alice", model, 2, forward_backward()))
            assert cell.slots.models[model].pending == 3
