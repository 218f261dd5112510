"""Collects at intervals what the rules of retention say goes, in a thread, and remembers what it did."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from trainer_cell.vault.collect import Collected, Collector
from trainer_cell.vault.errors import VaultError
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.staging import sweep_staging
from trainer_cell.vault.startup import RecoveryReport

log = logging.getLogger(__name__)

# Between the end of a sweep and the start of the next, however often it is asked for.
LEAST_PAUSE_S = 5.0


@dataclass(frozen=True)
class Sweep:
    """One that ended. error: why it could not even begin."""

    ended: datetime
    collected: Collected
    error: str | None = None


class Sweeper:
    """recovered: what the start-up found, for those who tell of it. last: the sweep that ended last.

    on_crash: called if the task ends by a bug.
    """

    def __init__(
        self,
        vault: Vault,
        collector: Collector,
        interval_s: float,
        recovered: RecoveryReport | None = None,
        least_pause_s: float = LEAST_PAUSE_S,
        on_crash: Callable[[], None] = lambda: None,
    ) -> None:
        self.collector = collector
        self.recovered = recovered
        self.last: Sweep | None = None
        self.on_crash = on_crash
        self._vault = vault
        self._interval_s = interval_s
        self._least_pause_s = min(least_pause_s, interval_s)
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._is_stopping = threading.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="sweeper")
        self._task.add_done_callback(self._on_task_done)

    async def stop(self) -> None:
        """The model being collected is finished, the others are left for the next start."""
        self._is_stopping.set()
        self._stopped.set()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    def nudge(self) -> None:
        """There may be something to collect before the interval is over."""
        self._wake.set()

    async def _run(self) -> None:
        while not self._is_stopping.is_set():
            # What is asked for from here on may come too late for this sweep.
            self._wake.clear()
            self.last = await asyncio.to_thread(self._sweep)
            _log_sweep(self.last)
            await _within(self._least_pause_s, self._stopped)
            await _within(self._interval_s - self._least_pause_s, self._wake)

    def _sweep(self) -> Sweep:
        try:
            collected = self.collector.collect(self._is_stopping.is_set)
            # What was set aside and could not be removed, then or by a gateway that died.
            sweep_staging(self._vault)
        except VaultError as error:
            return Sweep(datetime.now(UTC), Collected((), (), ()), str(error))
        return Sweep(datetime.now(UTC), collected)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("the sweeper ended by a bug", exc_info=task.exception())
            self.on_crash()


async def _within(seconds: float, event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def _log_sweep(sweep: Sweep) -> None:
    collected = sweep.collected
    if sweep.error is not None:
        log.error("the checkpoint root could not be swept: %s", sweep.error)
    for error in collected.errors:
        log.error("not collected: %s", error)
    for due in collected.removed:
        log.info("collected %s of %s: %s", due.version, due.address.model_id, due.reason)
    if collected.removed:
        reasons = Counter(due.reason for due in collected.removed)
        told = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        kept = f"; {len(collected.kept)} in use stay for now" if collected.kept else ""
        log.info("swept %d versions, %d bytes: %s%s", len(collected.removed), collected.freed_bytes, told, kept)


def log_recovery(report: RecoveryReport) -> None:
    """What the start-up did; whatever changed what a name stands for is a warning."""
    if report.swept:
        log.info("swept what dead cells had staged: %d entries", len(report.swept))
    for finding in report.findings:
        level = logging.INFO if finding.what in ("deleted", "collected") else logging.WARNING
        log.log(level, "%s %s: %s", finding.what, finding.address.uri, finding.detail)
    for error in report.errors:
        log.error("not recovered: %s", error)
