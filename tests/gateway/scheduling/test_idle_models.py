"""Models that nobody comes back to are unloaded; time in which nobody could come back does not count."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gateway.scheduling import upkeep
from gateway.scheduling.requests import UnloadRequest
from gateway.scheduling.restored import last_sign
from gateway.scheduling.steady_clock import steady_time
from gateway.store.records import Stored
from tests.gateway.scheduling.rig import (
    Rig,
    create,
    forward_backward,
    optim_step,
    path_of,
    rig,
    save,
    succeeded,
    until,
)
from trainer_cell.vault.layout import CheckpointAddress


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_PRUNE_S", 0.01)
    monkeypatch.setattr(upkeep, "_ROUND_S", 0.01)


async def test_a_model_that_nobody_uses_is_unloaded_and_its_checkpoints_stay(tmp_path: Path) -> None:
    async with rig(tmp_path, idle_model_s=0.5) as gateway:
        with gateway.cell():
            model = await gateway.model()
            for future in gateway.submit(model, forward_backward(), optim_step(), save()):
                await succeeded(future)
            await until(lambda: gateway.scheduler.model("alice", model).state == "unloaded")
            assert [entry.uri for entry in await gateway.scheduler.catalog.list("alice")] == [path_of(model)]
            assert gateway.vault.resolve(CheckpointAddress(model, "recovery", "latest")) is None


async def test_a_model_that_is_over_is_not_unloaded_again_and_again(tmp_path: Path) -> None:
    async with rig(tmp_path, idle_model_s=0.0) as gateway:
        with gateway.cell():
            model = await gateway.model()
            await until(lambda: gateway.scheduler.model("alice", model).state == "unloaded")
            await another_round(gateway)
            await another_round(gateway)
            unloads = [row for row in gateway.scheduler.journal.load().commands if row.operation == "unload"]
            assert len(unloads) == 1


async def test_a_model_for_which_something_waits_is_not_unloaded(tmp_path: Path) -> None:
    async with rig(tmp_path, idle_model_s=0.0) as gateway:
        made = await gateway.scheduler.submit_create("alice", gateway.session(), 0, create()).accepted()
        await another_round(gateway)
        await another_round(gateway)
        assert gateway.scheduler.model("alice", made.model_id).pending == 1


async def test_answers_that_were_told_long_ago_go_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "TOLD_GRACE_S", 0.0)
    async with rig(tmp_path) as gateway:
        with gateway.cell():
            model = await gateway.model()
            for future in gateway.submit(model, forward_backward(), UnloadRequest()):
                await succeeded(future)
                gateway.scheduler.futures.mark_told(future)
            told = [row.request_id for row in gateway.scheduler.journal.load().commands if row.seq_id]

            def outcomes() -> list[str]:
                rows = gateway.scheduler.journal.load().commands
                return [row.request_id for row in rows if row.outcome is not None]

            await until(lambda: not set(told) & set(outcomes()))


async def another_round(gateway: Rig) -> None:
    began = gateway.scheduler._upkeep._pruned_s
    await until(lambda: gateway.scheduler._upkeep._pruned_s > began)


async def test_the_time_the_service_was_away_or_its_clock_was_wrong_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell():
            model = await gateway.model()
            stored = gateway.scheduler.journal.load()
    monkeypatch.setattr("gateway.scheduling.steady_clock._START_S", steady_time() + 60 * 86_400 - time.monotonic())
    assert steady_time() - last_sign(stored) > 59 * 86_400
    async with rig(tmp_path, idle_model_s=30 * 86_400) as gateway:
        with gateway.cell():
            await succeeded(gateway.scheduler.submit_create("alice", gateway.session(), 0, create()))
            await another_round(gateway)
            assert gateway.scheduler.model("alice", model).state == "ready"


def test_the_last_sign_of_an_empty_journal_is_now() -> None:
    stored = Stored(sessions=[], models=[], commands=[], next_moment=0)
    assert abs(last_sign(stored) - steady_time()) < 5
