"""What a model may still need is kept on the disk whatever takes its name, and let go of when it needs it no longer."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import pytest

from gateway.scheduling.requests import UnloadRequest
from gateway.scheduling.snapshot_rules import SnapshotRules
from tests.gateway.scheduling.lives import Life, lives
from tests.gateway.scheduling.rig import (
    Rig,
    create_from,
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
from trainer_cell.protocol.commands import ForwardBackward, LoadState, SaveState
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.vault.disk import LOCAL_DISK
from trainer_cell.vault.layout import CheckpointAddress
from trainer_cell.vault.locks import lock_version

EACH_STEP = SnapshotRules(steps=1)
FULL = CommandFailed(ErrorKind.STORAGE_FAILED, "ENOSPC")


def is_held(gateway: Rig, version: str) -> bool:
    """Whether it is there, and may not go."""
    directory = gateway.vault.version_dir(version)
    lock = lock_version(LOCAL_DISK, directory, exclusive=True)
    if lock is not None:
        lock.release()
    return lock is None and directory.exists()


def snapshot_of(gateway: Rig, model: str) -> str | None:
    return gateway.vault.resolve(CheckpointAddress(model, "recovery", "latest"))


def noted_turn(gateway: Life, model: str) -> int:
    return next(one.snapshot_turn for one in gateway.journal.load().models if one.model_id == model)


async def test_a_checkpoint_that_was_loaded_is_kept_for_the_next_gateway_though_its_owner_deletes_it(
    tmp_path: Path,
) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            for future in gateway.submit(model, forward_backward(), optim_step(), save()):
                await succeeded(future)
            # Without a snapshot the model needs what it read.
            cell.fail_next(SaveState, FULL)
            await succeeded(gateway.scheduler.submit("alice", model, 4, load(path_of(model))))
            trained = copy.copy(cell.slots.models[model])
        gateway = await machine.next()
        await gateway.scheduler.catalog.delete("alice", path_of(model))
        with gateway.cell() as second:
            await succeeded(gateway.scheduler.submit("alice", model, 5, forward_backward(only=True)))
            assert second.slots.models[model] == trained


async def test_a_snapshot_that_its_gateway_did_not_live_to_note_is_used_and_kept_by_the_next(tmp_path: Path) -> None:
    async with lives(tmp_path, rules=EACH_STEP) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            for future in gateway.submit(model, forward_backward(), optim_step()):
                await succeeded(future)
            await until(lambda: noted_turn(gateway, model) == 2)
            first = snapshot_of(gateway, model)
            hold = cell.hold_next_publish()
            for future in gateway.submit(model, forward_backward(5), optim_step(), first=3):
                await succeeded(future)
            await reached(hold)
            gateway.is_stuck = True
            hold.release()
            await until(lambda: snapshot_of(gateway, model) != first)
            trained = copy.copy(cell.slots.models[model])
        gateway = await machine.next()
        newest = snapshot_of(gateway, model)
        assert newest is not None
        assert is_held(gateway, newest)
        with gateway.cell() as second:
            await succeeded(gateway.scheduler.submit("alice", model, 5, forward_backward(only=True)))
            assert second.slots.models[model] == trained
            (brought_back,) = (command for command in second.commands if isinstance(command, LoadState))
            assert brought_back.version == newest
            assert second.count(ForwardBackward) == 1


async def test_a_snapshot_is_held_from_its_making_over_a_restart_until_another_takes_its_place(tmp_path: Path) -> None:
    async with lives(tmp_path, rules=EACH_STEP) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            for future in gateway.submit(model, forward_backward(), optim_step()):
                await succeeded(future)
            await until(lambda: noted_turn(gateway, model) == 2)
            first = snapshot_of(gateway, model)
            assert first is not None
            assert is_held(gateway, first)
            gateway = await machine.next(cell)
            assert is_held(gateway, first)
            for future in gateway.submit(model, forward_backward(5), optim_step(), first=3):
                await succeeded(future)
            await until(lambda: noted_turn(gateway, model) == 4)
            assert not is_held(gateway, first)
            second = snapshot_of(gateway, model)
            assert second is not None
            assert is_held(gateway, second)


async def test_a_checkpoint_that_was_loaded_is_let_go_once_a_snapshot_holds_what_was_read(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            saved = await succeeded(gateway.scheduler.submit("alice", model, 1, save()))
            hold = cell.hold_next_publish()
            await succeeded(gateway.scheduler.submit("alice", model, 2, load(path_of(model))))
            await reached(hold)
            assert is_held(gateway, saved.version)
            hold.release()
            await until(lambda: not is_held(gateway, saved.version))


@pytest.mark.parametrize("has_snapshot", [True, False])
async def test_a_model_that_is_over_holds_nothing(tmp_path: Path, has_snapshot: bool) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            source = await gateway.model()
            saved = await succeeded(gateway.scheduler.submit("alice", source, 1, save()))
            if not has_snapshot:
                cell.fail_next(SaveState, FULL)
            made = gateway.scheduler.submit_create("alice", gateway.session(), 0, create_from(path_of(source)))
            await succeeded(made)
            versions = [saved.version]
            if has_snapshot:
                queue = gateway.scheduler._queues[made.model_id]
                await until(lambda: queue.history.snapshot is not None)
                assert queue.history.snapshot is not None
                versions.append(queue.history.snapshot.version)
            assert is_held(gateway, versions[-1])
            await succeeded(gateway.scheduler.submit("alice", made.model_id, 1, UnloadRequest()))
            await until(lambda: not any(is_held(gateway, version) for version in versions))


async def test_a_model_that_was_over_before_a_restart_holds_nothing_after_it(tmp_path: Path) -> None:
    async with lives(tmp_path) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            saved = await succeeded(gateway.scheduler.submit("alice", model, 1, save()))
            cell.fail_next(SaveState, FULL)
            for future in gateway.submit(model, load(path_of(model)), UnloadRequest(), first=2):
                await succeeded(future)
        gateway = await machine.next()
        assert not is_held(gateway, saved.version)


async def test_a_load_that_fails_holds_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            model = await gateway.model()
            saved = await succeeded(gateway.scheduler.submit("alice", model, 1, save()))
            cell.fail_next(LoadState, FULL)
            loading = gateway.scheduler.submit("alice", model, 2, load(path_of(model)))
            await until(lambda: loading.is_done)
            assert not is_held(gateway, saved.version)


async def test_a_load_that_is_tried_again_holds_what_it_found_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell() as cell:
            model, reader = await gateway.model(), await gateway.model()
            saved = await succeeded(gateway.scheduler.submit("alice", model, 1, save()))
            hold = cell.hold_next(LoadState)
            loading = gateway.scheduler.submit("alice", reader, 1, load(path_of(model)))
            await reached(hold)
            await asyncio.to_thread(cell.kill)
        second = gateway.cell()
        second.fail_next(SaveState, FULL)
        with second:
            await succeeded(loading)
            assert loading.attempts == 2
            assert is_held(gateway, saved.version)
            await succeeded(gateway.scheduler.submit("alice", reader, 2, UnloadRequest()))
            assert not is_held(gateway, saved.version)
