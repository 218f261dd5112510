"""How long answers are kept, and what waiting costs."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from gateway.scheduling.errors import UnknownFuture
from gateway.scheduling.futures import Future, FutureBook
from tests.gateway.scheduling.rig import forward_backward, optim_step, within
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import ForwardBackwardDone, OptimStepDone

DONE = OptimStepDone("command", 1, 1, {})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def finished(book: FutureBook) -> Future:
    future = book.open("alice", "m", optim_step())
    book.finish(future, DONE)
    return future


async def test_a_wait_ends_with_the_answer_and_not_before() -> None:
    book = FutureBook()
    future = book.open("alice", "m", optim_step())
    assert not await future.wait(0)
    assert not await future.wait(0.001)
    waits = [asyncio.create_task(future.wait(60)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(wait.done() for wait in waits)
    book.finish(future, CommandFailed(ErrorKind.BAD_COMMAND, "no"))
    assert await within(asyncio.gather(*waits)) == [True] * 3
    assert (future.state, future.error is not None, future.outcome) == ("failed", True, None)


async def test_a_thousand_waiting_polls_cost_no_work() -> None:
    book = FutureBook()
    futures = [book.open("alice", "m", optim_step()) for _ in range(1000)]
    waits = [asyncio.create_task(future.wait(60)) for future in futures]
    await asyncio.sleep(0.05)
    loop = asyncio.get_running_loop()
    turns = 0
    run_once = loop._run_once  # type: ignore[attr-defined]

    def counted() -> None:
        nonlocal turns
        turns += 1
        run_once()

    loop._run_once = counted  # type: ignore[attr-defined]
    cpu = time.process_time()
    try:
        await asyncio.sleep(0.5)
    finally:
        loop._run_once = run_once  # type: ignore[attr-defined]
    # A loop of queries at any useful rate would turn thousands of times.
    assert turns < 20
    assert time.process_time() - cpu < 0.25
    book.finish(futures[0], DONE)
    assert await within(waits[0])
    assert sum(wait.done() for wait in waits) == 1
    for future in futures[1:]:
        book.finish(future, DONE)
    await within(asyncio.gather(*waits))


async def test_abandoned_polls_leave_nothing_behind_and_the_answer_stays() -> None:
    clock = Clock()
    book = FutureBook(told_grace_s=600, now=clock)
    future = book.open("alice", "m", optim_step())
    tasks = len(asyncio.all_tasks())
    waits = [asyncio.create_task(future.wait(60)) for _ in range(2000)]
    await asyncio.sleep(0)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    assert len(asyncio.all_tasks()) == tasks
    assert not future._waiters
    book.finish(future, DONE)
    # Hours later, after any number of polls that went away: nobody has been told, so it is there.
    clock.now += 3600 * 5
    finished(book)
    assert book.get("alice", future.request_id).outcome == DONE


def test_a_told_answer_is_kept_for_the_grace_period_and_then_dropped() -> None:
    clock = Clock()
    book = FutureBook(told_grace_s=600, now=clock)
    future = finished(book)
    book.mark_told(future)
    clock.now += 599
    finished(book)
    assert book.get("alice", future.request_id) is future
    book.mark_told(future)
    clock.now += 2
    finished(book)
    with pytest.raises(UnknownFuture):
        book.get("alice", future.request_id)


def test_an_answer_nobody_asks_for_is_dropped_in_the_end() -> None:
    clock = Clock()
    book = FutureBook(untold_grace_s=86_400, now=clock)
    future, waiting = finished(book), book.open("alice", "m", optim_step())
    clock.now += 86_399
    finished(book)
    assert book.find(future.request_id) is future
    clock.now += 2
    finished(book)
    assert book.find(future.request_id) is None
    assert book.find(waiting.request_id) is waiting


def test_told_answers_together_stay_within_their_memory() -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(one, ForwardBackwardDone) for one in gc.get_objects())

    before = alive()
    book = FutureBook(told_bytes=10 << 20)
    untold = finished(book)
    told = []
    for _ in range(100):
        future = book.open("alice", "m", forward_backward())
        book.finish(future, ForwardBackwardDone("command", (bytes(1 << 20),), {}))
        book.mark_told(future)
        told.append(future.request_id)
    kept = [request_id for request_id in told if book.find(request_id)]
    assert kept == told[-len(kept) :]
    assert 5 <= len(kept) <= 10
    assert book.find(untold.request_id) is untold
    del future
    assert alive() - before <= 12


def test_a_future_is_its_tenants_alone() -> None:
    book = FutureBook()
    future = finished(book)
    with pytest.raises(UnknownFuture) as theirs:
        book.get("bob", future.request_id)
    with pytest.raises(UnknownFuture) as absent:
        book.get("bob", "future-x")
    assert str(theirs.value).replace(future.request_id, "X") == str(absent.value).replace("future-x", "X")


async def test_release_ends_every_wait_now_and_from_now_on() -> None:
    book = FutureBook()
    future = book.open("alice", "m", optim_step())
    wait = asyncio.create_task(future.wait(60))
    await asyncio.sleep(0)
    book.release_waiters()
    assert await within(wait) is False
    assert await within(future.wait(60)) is False
    book.finish(future, DONE)
    assert await future.wait(60)
