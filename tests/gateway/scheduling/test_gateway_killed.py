"""What a killed gateway leaves: rows that were not durable yet, and a cell or a disk that knows more than they do."""

from __future__ import annotations

import asyncio
import copy
import sqlite3
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.scheduling import turns
from gateway.scheduling.requests import UnloadRequest
from gateway.scheduling.snapshot_rules import SnapshotRules
from gateway.store import writer
from gateway.store.errors import JournalUnavailable
from tests.gateway.scheduling.rig import (
    ADAM,
    Rig,
    create,
    failed,
    forward_backward,
    load,
    optim_step,
    path_of,
    reached,
    rig,
    save,
    succeeded,
    until,
)
from trainer_cell.protocol.commands import ForwardBackward, SaveState
from trainer_cell.vault import locks
from trainer_cell.vault.layout import CheckpointAddress

EACH_STEP = SnapshotRules(steps=1)


def disk_is_full(gateway: Rig) -> None:
    """From now on nothing gets into the journal."""
    writer, full = gateway.scheduler.journal._writer, JournalUnavailable("the journal is full")
    writer._transact = lambda batch: full  # type: ignore[method-assign]


@asynccontextmanager
async def killed_rig(root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[Rig]:
    """A gateway that gets nothing more into its journal when it ends."""
    monkeypatch.setattr(turns, "_LAST_WRITES_S", 0.0)
    monkeypatch.setattr(writer, "_LAST_TRIES_S", 0.0)
    monkeypatch.setattr(locks, "_EPOCH_PATIENCE_S", 0.1)
    with suppress(JournalUnavailable):
        async with rig(root, **options) as gateway:
            yield gateway


def snapshot_of(gateway: Rig, model: str) -> str | None:
    return gateway.vault.resolve(CheckpointAddress(model, "recovery", "latest"))


async def bring_back(gateway: Rig, model: str, seq_id: int) -> None:
    await succeeded(gateway.scheduler.submit("alice", model, seq_id, forward_backward(only=True)))


async def train(gateway: Rig, model: str, *batches: tuple[int, ...], first: int = 1) -> None:
    for step, tokens in enumerate(batches):
        for future in gateway.submit(model, forward_backward(*tokens), optim_step(), first=first + 2 * step):
            await succeeded(future)


async def snapshot_noted(gateway: Rig, model: str) -> None:
    def is_noted() -> bool:
        return any(one.model_id == model and one.snapshot_turn >= 2 for one in gateway.scheduler.journal.load().models)

    await until(is_noted)


@pytest.mark.parametrize("is_orderly", [True, False], ids=["stopped", "killed"])
async def test_a_snapshot_never_tells_of_what_is_not_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_orderly: bool
) -> None:
    """Else the next gateway would do again what the snapshot holds already."""
    async with killed_rig(tmp_path, monkeypatch, rules=EACH_STEP) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            hold = cell.hold_next(ForwardBackward)
            sent = gateway.submit(model, forward_backward(), optim_step())
            for future in sent:
                await future.accepted()
            await reached(hold)
            disk_is_full(gateway)
            hold.release()
            await until(lambda: cell.slots.models[model].step == 1)
            if is_orderly:
                await gateway.scheduler.stop(1)
            else:
                # A snapshot that is not to be is no event.
                await asyncio.sleep(0.3)
            trained = copy.copy(cell.slots.models[model])
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            for future in sent:
                await succeeded(gateway.scheduler.futures.get("alice", future.request_id))
            assert cell.slots.models[model] == trained


async def test_what_a_cell_has_done_behind_a_save_of_unknown_place_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with killed_rig(tmp_path, monkeypatch) as gateway:
        cell = gateway.cell().start()
        model = await gateway.model()
        await train(gateway, model, (1, 2, 3))
        await succeeded(gateway.scheduler.submit("alice", model, 3, forward_backward(1)))
        hold = cell.hold_next(SaveState)
        sent = gateway.submit(model, save(), forward_backward(5, 6), optim_step(), first=4)
        for future in sent:
            await future.accepted()
        await reached(hold)
        publish = cell.hold_next_publish()
        disk_is_full(gateway)
        hold.release()
        await until(lambda: cell.slots.models[model].step == 2)
        trained = copy.copy(cell.slots.models[model])
        publish.release()
    async with rig(tmp_path) as gateway:
        cell._link._path = gateway.socket_path
        for future in sent:
            await succeeded(gateway.scheduler.futures.get("alice", future.request_id))
        assert cell.slots.models[model] == trained
        await asyncio.to_thread(cell.kill)
        with gateway.cell() as second:
            await bring_back(gateway, model, 7)
            assert second.slots.models[model] == trained


async def test_a_snapshot_of_another_life_of_its_id_is_nothing_to_a_model(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=EACH_STEP) as gateway:
        with gateway.cell():
            made = gateway.scheduler.submit_start_up("alice", "startup", create())
            await train(gateway, made.model_id, *[(1, 2, 3, 4)] * 6)
            await snapshot_noted(gateway, made.model_id)
    for file in list(tmp_path.glob("journal*")):  # noqa: ASYNC240 - in memory
        file.unlink()
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            again = gateway.scheduler.submit_start_up("alice", "startup", create())
            assert again.model_id == made.model_id
            await train(gateway, again.model_id, (1,))
            trained = copy.copy(cell.slots.models[again.model_id])
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            await bring_back(gateway, made.model_id, 3)
            assert cell.slots.models[made.model_id] == trained


async def test_a_journal_older_than_its_snapshots_is_not_believed(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=EACH_STEP) as gateway:
        with gateway.cell():
            model = await gateway.model()
            await train(gateway, model, (1,))
    older = (tmp_path / "journal.sqlite3").read_bytes()
    async with rig(tmp_path, rules=EACH_STEP) as gateway:
        with gateway.cell():
            await train(gateway, model, (2, 3), (4, 5), first=3)
    (tmp_path / "journal.sqlite3").write_bytes(older)
    async with rig(tmp_path) as gateway:
        with gateway.cell():
            assert await failed(gateway.scheduler.submit("alice", model, 3, forward_backward())) == "model_lost"


async def test_a_load_waits_for_a_save_that_is_to_be_made_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            reader, model = await gateway.model(), await gateway.model()
            await train(gateway, model, (1, 2, 3))
            await succeeded(gateway.scheduler.submit("alice", model, 3, save()))
            await train(gateway, model, (1,), first=4)
            newest = cell.slots.models[model].weight
            cell.hold_next_publish()
            saving = gateway.scheduler.submit("alice", model, 6, save(overwrite=True))
            await until(lambda: saving.state == "writing")
            loading = gateway.scheduler.submit("alice", reader, 1, load(path_of(model)))
            await until(lambda: loading.waiting_for is not None)
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            await succeeded(gateway.scheduler.futures.get("alice", loading.request_id))
            assert cell.slots.models[reader].weight == newest


async def test_a_step_whose_request_has_changed_on_the_disk_is_not_done_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            await train(gateway, model, (1,))
            await asyncio.to_thread(cell.kill)
    flip_a_bit(tmp_path / "journal.sqlite3", struct.pack(">d", ADAM.learning_rate))
    async with rig(tmp_path) as gateway:
        with gateway.cell():
            assert await failed(gateway.scheduler.submit("alice", model, 3, forward_backward())) == "model_lost"


def flip_a_bit(journal: Path, of: bytes) -> None:
    with sqlite3.connect(journal) as connection:
        name, request = connection.execute(
            "select request_id, request from commands where operation = 'optim_step'"
        ).fetchone()
        changed = bytes([of[0], of[1], of[2] ^ 1, *of[3:]])
        assert of in request
        connection.execute("update commands set request = ? where request_id = ?", (request.replace(of, changed), name))
    connection.close()


async def test_a_snapshot_that_came_after_its_model_was_unloaded_goes_with_the_next_cell(tmp_path: Path) -> None:
    async with rig(tmp_path, rules=EACH_STEP) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            hold = cell.hold_next_publish()
            await train(gateway, model, (1,))
            await reached(hold)
            gateway.link.hang_up()
            await succeeded(gateway.scheduler.submit("alice", model, None, UnloadRequest()))
            hold.release()
            await until(lambda: snapshot_of(gateway, model) is not None)
    async with rig(tmp_path) as gateway:
        with gateway.cell():
            await until(lambda: snapshot_of(gateway, model) is None)
