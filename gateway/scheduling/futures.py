"""Futures: what a client polls for the answer of a command it sent. Waiting costs nothing until something happens."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from gateway.scheduling.errors import Refused, UnknownFuture
from gateway.scheduling.identity import new_request_id
from gateway.scheduling.requests import ForwardBackwardRequest, Operation, Request, operation_of, payload_bytes
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import ForwardBackwardDone, Progress, Success
from trainer_cell.vault.locks import Lock

FutureState = Literal["queued", "running", "capturing", "writing", "publishing", "succeeded", "failed"]

TOLD_GRACE_S = 600.0
UNTOLD_GRACE_S = 86_400.0
TOLD_BYTES = 256 << 20
_RECORD_BYTES = 1024


class Future:
    """One accepted command and, later, its answer. Changed by the `FutureBook` and the scheduler alone.

    request: what was asked; of a forward_backward the data are dropped once it has run.
    progress: bytes of bytes, while a save runs. waiting_for: why it has no turn though it is the first of its model.
    outcome / error: exactly one of them, once `is_done`.
    told: whether a poll has been given the answer.
    payload_bytes: of the arrays in the request, as they came.
    accepted_moment / told_moment: counters that order acceptance and telling among all futures.
    attempts: how often it was sent to a cell that was lost before it answered, the present time included.
    turn: its place in what its model has done, None until it is taken from the queue for good.
    version / lease: of a load, the checkpoint version it found, relative to the root, and what keeps it there.
    """

    def __init__(
        self,
        tenant: str,
        model_id: str,
        operation: Operation,
        request: Request,
        moment: int,
        request_id: str | None = None,
    ) -> None:
        self.request_id = request_id or new_request_id()
        self.tenant = tenant
        self.model_id = model_id
        self.operation: Operation = operation
        self.request = request
        self.payload_bytes = payload_bytes(request)
        self.state: FutureState = "queued"
        self.progress: tuple[int, int] | None = None
        self.waiting_for: str | None = None
        self.outcome: Success | None = None
        self.error: CommandFailed | None = None
        self.accepted_moment = moment
        self.told_moment: int | None = None
        self.attempts = 0
        self.turn: int | None = None
        self.version: str | None = None
        self.lease: Lock | None = None
        self._is_accepted = False
        self._refusal: Refused | None = None
        self._acceptance: set[asyncio.Future[None]] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_released = False

    @property
    def told(self) -> bool:
        return self.told_moment is not None

    @property
    def is_done(self) -> bool:
        return self.state in ("succeeded", "failed")

    def accept(self) -> None:
        """It is in the journal: whoever asked may be told so."""
        self._is_accepted = True
        _wake(self._acceptance)

    def refuse(self, refusal: Refused) -> None:
        """It could not be put into the journal: nothing of it remains."""
        self._refusal = refusal
        _wake(self._acceptance)

    async def accepted(self) -> Future:
        """Itself, once it is in the journal; raises what it was refused with."""
        while not self._is_accepted:
            if self._refusal is not None:
                raise self._refusal
            waiter = asyncio.get_running_loop().create_future()
            self._acceptance.add(waiter)
            try:
                await waiter
            finally:
                self._acceptance.discard(waiter)
        return self

    async def wait(self, timeout_s: float) -> bool:
        """Until the answer is there, `timeout_s` seconds are over or the gateway stops; True when it is there."""
        if self.is_done or self._is_released or timeout_s <= 0:
            return self.is_done
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._waiters.discard(waiter)
        return self.is_done

    def note_progress(self, said: Progress) -> None:
        self.state = said.phase
        self.progress = (said.bytes_done, said.bytes_total)

    def release(self) -> None:
        """End every wait, now and from now on."""
        self._is_released = True
        _wake(self._waiters)

    def finish(self, outcome: Success | CommandFailed) -> None:
        assert not self.is_done
        if isinstance(outcome, CommandFailed):
            self.error, self.state = outcome, "failed"
        else:
            self.outcome, self.state = outcome, "succeeded"
        self.drop_payload()
        _wake(self._waiters)

    def drop_payload(self) -> None:
        """The arrays are the bulk of a command; its fingerprint stays with the model's queue, they in the journal."""
        if isinstance(self.request, ForwardBackwardRequest):
            self.request = msgspec.structs.replace(self.request, data=())


class FutureBook:
    """All futures. An answer is kept until it was told and `told_grace_s` after, however many polls were abandoned.

    Told answers are dropped earlier, the longest told first, when together they hold more than `told_bytes`; answers
    that nobody asked for in `untold_grace_s` are dropped too. `now` gives seconds, monotonic.
    on_told: called with a future when its answer is told for the first time.
    """

    def __init__(
        self,
        told_grace_s: float = TOLD_GRACE_S,
        untold_grace_s: float = UNTOLD_GRACE_S,
        told_bytes: int = TOLD_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._told_grace_s = told_grace_s
        self._untold_grace_s = untold_grace_s
        self._told_bytes_limit = told_bytes
        self._now = now
        self.on_told: Callable[[Future], None] = lambda future: None
        self._moments = itertools.count()
        self._futures: dict[str, Future] = {}
        self._untold: OrderedDict[str, float] = OrderedDict()
        self._told: OrderedDict[str, float] = OrderedDict()
        self._told_bytes = 0

    def __len__(self) -> int:
        return len(self._futures)

    def open(self, tenant: str, model_id: str, request: Request) -> Future:
        future = Future(tenant, model_id, operation_of(request), request, next(self._moments))
        self._futures[future.request_id] = future
        return future

    def go_on_from(self, moment: int) -> None:
        """Count on from there: what came before this process is earlier than all that comes."""
        self._moments = itertools.count(moment)

    def remember(self, future: Future) -> None:
        """One of before this process."""
        self._futures[future.request_id] = future
        if future.is_done:
            (self._told if future.told else self._untold)[future.request_id] = self._now()
            self._told_bytes += _size(future) if future.told else 0

    def withdraw(self, future: Future) -> None:
        """It was never accepted."""
        del self._futures[future.request_id]

    def get(self, tenant: str, request_id: str) -> Future:
        """Raises `UnknownFuture`, also for another tenant's and for one whose answer was dropped."""
        future = self.find(request_id)
        if future is None or future.tenant != tenant:
            raise UnknownFuture(f"no operation {request_id}: never accepted, or its result was kept long enough")
        return future

    def find(self, request_id: str) -> Future | None:
        return self._futures.get(request_id)

    def forgotten(self, request_id: str, tenant: str, model_id: str, request: Request) -> Future:
        """Stands for a future whose answer was dropped; it carries the id for a late retry, and nothing else."""
        future = Future(tenant, model_id, operation_of(request), request, next(self._moments), request_id)
        future.accept()
        future.finish(CommandFailed(ErrorKind.DEADLINE_EXCEEDED, "the result was kept for long enough and dropped"))
        return future

    def finish(self, future: Future, outcome: Success | CommandFailed) -> None:
        future.finish(outcome)
        self._untold[future.request_id] = self._now()
        self._sweep()

    def mark_told(self, future: Future) -> None:
        """To be called with each answer given to a poll; the first time counts."""
        assert future.is_done
        if future.told_moment is None:
            future.told_moment = next(self._moments)
            self.on_told(future)
            if self._untold.pop(future.request_id, None) is not None:
                self._told[future.request_id] = self._now()
                self._told_bytes += _size(future)
        self._sweep()

    def release_waiters(self) -> None:
        """End every wait now, answered or not: the gateway is going down."""
        for future in self._futures.values():
            future.release()

    def _sweep(self) -> None:
        now = self._now()
        while self._told:
            request_id, since = next(iter(self._told.items()))
            if now - since < self._told_grace_s and self._told_bytes <= self._told_bytes_limit:
                break
            del self._told[request_id]
            self._told_bytes -= _size(self._futures.pop(request_id))
        while self._untold:
            request_id, since = next(iter(self._untold.items()))
            if now - since < self._untold_grace_s:
                break
            del self._untold[request_id], self._futures[request_id]


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _size(future: Future) -> int:
    """Roughly the memory of an answer, in bytes; the same at every call once the future is done."""
    if isinstance(future.outcome, ForwardBackwardDone):
        return _RECORD_BYTES + sum(len(logprobs) for logprobs in future.outcome.logprobs)
    return _RECORD_BYTES
