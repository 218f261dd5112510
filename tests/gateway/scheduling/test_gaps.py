"""A number that never comes holds up those behind it for so long, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.scheduling import upkeep
from gateway.scheduling.errors import SequenceConflict
from gateway.store.errors import JournalUnavailable
from gateway.store.writer import Queued
from tests.fakes.fake_cell import FakeCell
from tests.gateway.scheduling.lives import lives
from tests.gateway.scheduling.rig import (
    Rig,
    failed,
    forward_backward,
    optim_step,
    rig,
    save,
    succeeded,
    until,
    within,
)
from trainer_cell.protocol.commands import ForwardBackward

PATIENCE_S = 0.4


@asynccontextmanager
async def impatient(root: Path, patience_s: float = PATIENCE_S) -> AsyncIterator[tuple[Rig, FakeCell]]:
    async with rig(root, gap_patience_s=patience_s) as gateway:
        with gateway.cell() as cell:
            await within(gateway.link.ready.wait())
            yield gateway, cell


def missing(gateway: Rig, model: str) -> Any:
    """The future under which the first number is sealed, once it is."""
    request_id = gateway.scheduler._queues[model].request_id_of(1)
    return gateway.scheduler.futures.find(request_id) if request_id is not None else None


async def test_those_behind_a_number_that_never_comes_go_on_without_it(tmp_path: Path) -> None:
    async with impatient(tmp_path) as (gateway, cell):
        model = await gateway.model()
        early = gateway.submit(model, save(), forward_backward(), first=2)
        for future in early:
            await succeeded(future)
        assert await failed(missing(gateway, model)) == "deadline_exceeded"
        await succeeded(gateway.scheduler.submit("alice", model, 4, forward_backward()))
        assert gateway.scheduler.model("alice", model).pending == 0
        assert cell.slots.models[model].pending == 6


async def test_a_number_that_comes_after_it_was_sealed_is_refused_and_does_nothing(tmp_path: Path) -> None:
    async with impatient(tmp_path) as (gateway, cell):
        model = await gateway.model()
        (early,) = gateway.submit(model, forward_backward(5), first=2)
        await succeeded(early)
        with pytest.raises(SequenceConflict):
            gateway.scheduler.submit("alice", model, 1, forward_backward())
        await succeeded(gateway.scheduler.submit("alice", model, 3, forward_backward(only=True)))
        assert cell.slots.models[model].pending == 1


async def test_a_number_that_comes_in_time_is_not_sealed(tmp_path: Path) -> None:
    async with impatient(tmp_path, patience_s=2.0) as (gateway, _cell):
        model = await gateway.model()
        (early,) = gateway.submit(model, optim_step(), first=2)
        await early.accepted()
        await until(lambda: model in gateway.scheduler._upkeep._gaps)
        assert missing(gateway, model) is None
        await succeeded(gateway.scheduler.submit("alice", model, 1, forward_backward()))
        assert (await succeeded(early)).step == 1


async def test_a_step_over_a_sealed_number_is_refused_and_clears_the_window(tmp_path: Path) -> None:
    async with impatient(tmp_path) as (gateway, cell):
        model = await gateway.model()
        good, step, after = gateway.submit(model, forward_backward(), optim_step(), forward_backward(), first=2)
        await succeeded(good)
        assert await failed(step) == "partial_gradients"
        await succeeded(after)
        assert (await succeeded(gateway.scheduler.submit("alice", model, 5, optim_step()))).step == 1
        # Of one forward_backward alone.
        assert cell.slots.models[model].momentum == 3


async def test_each_number_of_a_long_gap_is_sealed(tmp_path: Path) -> None:
    async with impatient(tmp_path) as (gateway, _):
        model = await gateway.model()
        last = gateway.scheduler.submit("alice", model, 30, forward_backward())
        await succeeded(last)
        for seq_id in range(1, 30):
            with pytest.raises(SequenceConflict):
                gateway.scheduler.submit("alice", model, seq_id, forward_backward())


async def test_a_number_that_is_on_its_way_into_the_journal_is_not_missing(tmp_path: Path) -> None:
    async with lives(tmp_path, gap_patience_s=PATIENCE_S) as machine:
        gateway = machine.gateway
        with gateway.cell() as cell:
            model = await gateway.made()
            (early,) = gateway.submit(model, optim_step(), first=2)
            await early.accepted()
            entered, go_on, transact = threading.Event(), threading.Event(), gateway.transact

            def slowly(batch: Sequence[Queued]) -> JournalUnavailable | None:
                entered.set()
                go_on.wait()
                return transact(batch)

            gateway.transact = slowly
            late = gateway.scheduler.submit("alice", model, 1, forward_backward())
            await until(entered.is_set)
            await until(lambda: gateway.scheduler._upkeep._gaps.get(model, (1, 0.0))[1] >= PATIENCE_S)
            found = missing(gateway, model)
            go_on.set()
            assert found is late
            await succeeded(late)
            assert (await succeeded(early)).step == 1
            assert cell.count(ForwardBackward) == 1


async def test_each_gap_is_given_the_whole_of_its_time(tmp_path: Path) -> None:
    async with impatient(tmp_path, patience_s=1000.0) as (gateway, _):
        model = await gateway.model()
        rounds = gateway.scheduler._upkeep
        gateway.submit(model, forward_backward(), first=2)
        (last,) = gateway.submit(model, forward_backward(), first=4)
        await last.accepted()
        rounds._seal_gaps(0.0)
        rounds._seal_gaps(900.0)
        await succeeded(gateway.scheduler.submit("alice", model, 1, forward_backward()))
        # Now another number is missing.
        rounds._seal_gaps(900.0)
        rounds._seal_gaps(900.0)
        assert not gateway.scheduler._queues[model].is_spent(3)
        rounds._seal_gaps(200.0)
        await succeeded(last)


async def test_time_for_which_the_process_was_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_ROUND_S", 0.01)
    stopped_s = 0.0
    monkeypatch.setattr(upkeep, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s))
    async with impatient(tmp_path, patience_s=100.0) as (gateway, _):
        model = await gateway.model()
        (early,) = gateway.submit(model, forward_backward(), first=2)
        await early.accepted()

        def waited_s() -> float:
            return gateway.scheduler._upkeep._gaps.get(model, (1, 0.0))[1]

        await until(lambda: waited_s() > 0)
        before_s, stopped_s = waited_s(), 1000.0
        await until(lambda: waited_s() > before_s)
        assert missing(gateway, model) is None
        assert waited_s() < 50


async def test_only_the_model_with_the_gap_waits(tmp_path: Path) -> None:
    async with impatient(tmp_path, patience_s=60) as (gateway, _):
        waiting, other = await gateway.model(), await gateway.model()
        (early,) = gateway.submit(waiting, forward_backward(), first=2)
        for future in gateway.submit(other, forward_backward(), optim_step()):
            await succeeded(future)
        assert early.state == "queued"


async def test_time_without_a_cell_does_not_count(tmp_path: Path) -> None:
    async with rig(tmp_path, gap_patience_s=PATIENCE_S) as gateway:
        with gateway.cell():
            model = await gateway.model()
        await until(lambda: not gateway.scheduler.is_ready)
        (early,) = gateway.submit(model, forward_backward(), first=2)
        await early.accepted()
        assert not await early.wait(3 * PATIENCE_S)
        assert missing(gateway, model) is None
        with gateway.cell():
            await succeeded(gateway.scheduler.submit("alice", model, 1, forward_backward()))
            await succeeded(early)


async def test_a_gap_that_was_there_before_a_restart_is_sealed_after_it_and_stays_so(tmp_path: Path) -> None:
    async with lives(tmp_path, gap_patience_s=PATIENCE_S) as machine:
        gateway = machine.gateway
        model = (await gateway.created()).model_id
        (early,) = gateway.submit(model, forward_backward(), first=2)
        await early.accepted()
        gateway = await machine.next()
        with gateway.cell() as cell:
            outcome = await succeeded(gateway.again(early))
            gateway = await machine.next(cell)
            with pytest.raises(SequenceConflict):
                gateway.scheduler.submit("alice", model, 1, forward_backward())
            assert await succeeded(gateway.again(early)) == outcome
            assert await failed(gateway.scheduler.submit("alice", model, 3, optim_step())) == "partial_gradients"
