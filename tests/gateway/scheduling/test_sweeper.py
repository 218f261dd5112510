"""The sweeper runs in a thread, at intervals and when asked, never faster than its pause, and ends when told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.scheduling.sweeper import Sweeper
from tests.gateway.scheduling.rig import within
from tests.trainer_cell.vault.checkpoints import new_vault, save
from tests.trainer_cell.vault.scenes import named
from trainer_cell.vault.collect import Collected, Collector
from trainer_cell.vault.errors import StorageFailed
from trainer_cell.vault.inventory import version_names
from trainer_cell.vault.layout import Vault, VersionName
from trainer_cell.vault.retention import Rules

NEVER_S = 3600.0


class WatchedCollector(Collector):
    """Stops in each round until it is let go; counts them; fails the next one with `error`."""

    def __init__(self, vault: Vault) -> None:
        super().__init__(vault, Rules(replaced_grace_s=0))
        self.watched = vault
        self.began = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.error: Exception | None = None

    def versions_of(self, model_id: str) -> list[VersionName]:
        return version_names(self.watched, model_id)

    def collect(self, should_stop: Callable[[], bool] = lambda: False) -> Collected:
        self.began.release()
        self.may_end.acquire()
        if self.error is not None:
            raise self.error
        return super().collect(should_stop)


async def begun(collector: WatchedCollector) -> None:
    await within(asyncio.to_thread(collector.began.acquire))


async def until(is_so: Callable[[], bool]) -> None:
    def wait() -> None:
        while not is_so():
            time.sleep(0.001)

    await within(asyncio.to_thread(wait))


def sweeper_of(collector: WatchedCollector, vault: Vault, interval_s: float, least_pause_s: float = 0.0) -> Sweeper:
    return Sweeper(vault, collector, interval_s, least_pause_s=least_pause_s)


async def test_it_sweeps_at_its_start_at_intervals_and_when_asked(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    collector = WatchedCollector(vault)
    sweeper = sweeper_of(collector, vault, interval_s=0.01)
    sweeper.start()
    for _ in range(3):
        await begun(collector)
        collector.may_end.release()
    await begun(collector)
    collector.may_end.release()
    collector.may_end.release()
    await within(sweeper.stop())
    assert sweeper.last is not None

    asked = WatchedCollector(vault)
    sweeper = sweeper_of(asked, vault, NEVER_S)
    sweeper.start()
    await begun(asked)
    asked.may_end.release()
    sweeper.nudge()
    asked.may_end.release()
    await begun(asked)
    asked.may_end.release()
    await within(sweeper.stop())


async def test_however_often_it_is_asked_it_pauses_between_two_sweeps(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    collector = WatchedCollector(vault)
    collector.may_end.release(1000)
    sweeper = sweeper_of(collector, vault, NEVER_S, least_pause_s=NEVER_S)
    sweeper.start()
    await begun(collector)
    await until(lambda: sweeper.last is not None)
    for _ in range(100):
        sweeper.nudge()
        await asyncio.sleep(0)
    await within(sweeper.stop())
    assert not collector.began.acquire(blocking=False)


async def test_the_event_loop_goes_on_while_a_sweep_hangs_on_the_disk(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    collector = WatchedCollector(vault)
    sweeper = sweeper_of(collector, vault, NEVER_S)
    sweeper.start()
    await begun(collector)
    for _ in range(100):
        await asyncio.sleep(0)
    collector.may_end.release()
    await within(sweeper.stop())


async def test_what_the_disk_refuses_is_told_and_the_next_sweep_is_tried(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    for seed in (1, 2):
        save(vault, named("n"), seed=seed, overwrite=True)
    collector = WatchedCollector(vault)
    collector.error = StorageFailed("list", tmp_path, 5)
    sweeper = sweeper_of(collector, vault, interval_s=0.01)
    sweeper.start()
    await begun(collector)
    collector.may_end.release()
    await until(lambda: sweeper.last is not None)
    assert sweeper.last.error is not None
    assert "EIO" in sweeper.last.error
    collector.error = None
    await begun(collector)
    collector.may_end.release()
    await until(lambda: sweeper.last is not None and sweeper.last.error is None)
    assert [due.reason for due in sweeper.last.collected.removed] == ["replaced"]
    collector.may_end.release()
    await within(sweeper.stop())


async def test_a_stop_ends_a_sweep_after_the_model_at_hand(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    for model_id in ("a", "b"):
        for seed in (1, 2):
            save(vault, named("n", model_id), seed=seed, overwrite=True)
    collector = WatchedCollector(vault)
    sweeper = sweeper_of(collector, vault, NEVER_S)
    sweeper.start()
    await begun(collector)
    stopping = asyncio.create_task(sweeper.stop())
    await asyncio.sleep(0)
    collector.may_end.release()
    await within(stopping)
    assert sweeper.last is not None
    assert sweeper.last.collected.removed == ()
    assert {len(collector.versions_of(model_id)) for model_id in ("a", "b")} == {2}


async def test_a_bug_ends_it_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vault = new_vault(tmp_path)
    collector = WatchedCollector(vault)
    collector.error = ZeroDivisionError("a bug")
    crashed = asyncio.Event()
    sweeper = Sweeper(vault, collector, NEVER_S, on_crash=crashed.set)
    sweeper.start()
    collector.may_end.release()
    await within(crashed.wait())
    assert "ended by a bug" in caplog.text
    await within(sweeper.stop())
