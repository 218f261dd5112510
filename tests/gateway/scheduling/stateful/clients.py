"""What clients have asked, what they were told of it, and what they do about it: they ask again until they know."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from gateway.scheduling.errors import QueueFull, SequenceConflict, Stopping, Unavailable, UnknownFuture, UnknownModel
from gateway.scheduling.futures import TOLD_GRACE_S, Future, FutureBook
from gateway.scheduling.identity import model_id_of
from gateway.scheduling.requests import CreateRequest, Request
from gateway.scheduling.scheduler import Scheduler
from tests.gateway.scheduling.stateful.world import Gateway, World
from trainer_cell.protocol.errors import CommandFailed
from trainer_cell.protocol.outcomes import Success

State = Literal["unsure", "accepted", "refused"]


@dataclass(eq=False)
class Sent:
    """One request, however often it was sent. seq_id None: told by its key.

    state: unsure until somebody answered whether it is accepted. sent_at: the moments it was sent before it was.
    told_at: the moment of the first telling of its answer, told_s: by the clock; told_in: the life of the gateway in
    which it was; sent_in: those in which it was sent before it was known to be accepted.
    is_late: it came when its number or its model was gone.
    """

    model: ClientsModel
    seq_id: int | None
    request: Request
    key: str | None = None
    state: State = "unsure"
    sent_at: list[int] = field(default_factory=list)
    sent_in: list[int] = field(default_factory=list)
    request_id: str | None = None
    told: Success | CommandFailed | None = None
    told_at: int | None = None
    told_s: float = 0.0
    told_in: int = 0
    is_late: bool = False

    @property
    def is_told(self) -> bool:
        return self.told is not None


@dataclass(eq=False)
class ClientsModel:
    """owed: numbers that were left out so far, with what will be sent under them."""

    tenant: str
    session_id: str
    number: int
    sent: dict[int, Sent] = field(default_factory=dict)
    plain: list[Sent] = field(default_factory=list)
    owed: list[Sent] = field(default_factory=list)
    next_seq_id: int = 1
    is_over: bool = False

    @property
    def model_id(self) -> str:
        return model_id_of(self.session_id, self.number)

    @property
    def all(self) -> list[Sent]:
        return [*self.sent.values(), *self.plain]

    def new(self, request: Request) -> Sent:
        sent = Sent(self, self.next_seq_id, request)
        self.next_seq_id += 1
        return sent


class Clients:
    """All of them. models: that they have asked for."""

    def __init__(self, world: World) -> None:
        self.models: list[ClientsModel] = []
        self._world = world
        self._moments = itertools.count()
        self._ids: dict[str, Sent] = {}

    def all(self) -> Iterator[Sent]:
        for model in self.models:
            yield from model.all

    @property
    def unsure(self) -> list[Sent]:
        return [sent for sent in self.all() if sent.state != "accepted"]

    @property
    def to_send(self) -> list[Sent]:
        """What a client would still send: a number that came too late it gives up."""
        return [sent for sent in self.unsure if not sent.is_late]

    def finish(self, model: ClientsModel) -> None:
        """Say goodbye; the client may come back all the same."""
        gateway = self._gateway
        if gateway is not None:
            finishing = gateway.scheduler.finish_session(model.tenant, model.session_id, "success", None)
            gateway.loop.create_task(finishing).add_done_callback(_raise_at_once)

    @property
    def _gateway(self) -> Gateway | None:
        """One that serves."""
        gateway = self._world.gateway
        return gateway if gateway is not None and gateway.start.done() else None

    def open(self, tenant: str, request: CreateRequest) -> None:
        """A session with a model; nothing if the session cannot be had now."""
        gateway = self._gateway
        if gateway is None:
            return

        async def go_on() -> None:
            try:
                session = await gateway.scheduler.visits.open(tenant)
            except Unavailable:
                return
            model = ClientsModel(tenant, session.session_id, 0)
            self.models.append(model)
            self.send(Sent(model, 0, request))

        gateway.loop.create_task(go_on()).add_done_callback(_raise_at_once)

    def send(self, sent: Sent) -> None:
        """For the first time or again."""
        if sent.seq_id is None:
            if sent not in sent.model.plain:
                sent.model.plain.append(sent)
        else:
            sent.model.sent[sent.seq_id] = sent
        gateway = self._gateway
        if gateway is None:
            return
        gateway.loop.create_task(self._send(gateway, sent)).add_done_callback(_raise_at_once)

    async def _send(self, gateway: Gateway, sent: Sent) -> None:
        if sent.state != "accepted":
            sent.state = "unsure"
            sent.sent_at.append(next(self._moments))
            sent.sent_in.append(self._world.lives)
        try:
            future = self._submit(gateway.scheduler, sent, sent.request)
            await future.accepted()
        except (Unavailable, QueueFull, Stopping):
            assert sent.state != "accepted", "what was accepted is refused when it comes again"
            sent.state = "refused"
            return
        except SequenceConflict:
            # Sealed: it came too late.
            assert sent.request_id is None, "what was accepted is a conflict when it comes again"
            sent.state, sent.is_late = "refused", True
            return
        except UnknownModel:
            assert sent.state != "accepted", "a retry is not known"
            sent.state, sent.is_late = "refused", sent.model.is_over
            return
        assert sent.request_id in (None, future.request_id), "a retry got another request id"
        assert self._ids.setdefault(future.request_id, sent) is sent, "two requests got one id"
        sent.request_id, sent.state = future.request_id, "accepted"

    def _submit(self, scheduler: Scheduler, sent: Sent, request: Request) -> Future:
        model = sent.model
        if sent.seq_id == 0:
            assert isinstance(request, CreateRequest)
            return scheduler.submit_create(model.tenant, model.session_id, model.number, request)
        return scheduler.submit(model.tenant, model.model_id, sent.seq_id, request, sent.key)

    def send_changed(self, sent: Sent, request: Request) -> None:
        """Something else under the number of what is accepted: a conflict, whatever became of the other."""
        gateway = self._gateway
        if gateway is None or sent.state != "accepted" or request == sent.request:
            return
        try:
            gateway.loop.call(lambda: self._submit(gateway.scheduler, sent, request))
        except SequenceConflict:
            return
        raise AssertionError("another content under the same number was accepted")

    def poll(self) -> None:
        """Ask for every answer; once told it never changes."""
        if (gateway := self._gateway) is not None:
            gateway.loop.call(lambda: self._poll(gateway.scheduler.futures))

    def _poll(self, futures: FutureBook) -> None:
        for sent in self.all():
            if sent.request_id is None or (sent.is_told and self._world.clock.now - sent.told_s >= TOLD_GRACE_S):
                continue
            try:
                future = futures.get(sent.model.tenant, sent.request_id)
            except UnknownFuture as error:
                raise AssertionError(f"what was accepted is not known: {sent.seq_id} {sent.request}") from error
            if not future.is_done:
                assert not sent.is_told, "an answer that was told is gone"
                continue
            futures.mark_told(future)
            answer = future.error or future.outcome
            assert answer is not None
            if sent.told is None:
                sent.told, sent.told_at, sent.told_in = answer, next(self._moments), self._world.lives
                sent.told_s = self._world.clock.now
            assert _same(sent.told, answer), f"was told {sent.told!r}, now {answer!r}"


def _raise_at_once(task: asyncio.Task[None]) -> None:
    """What a client found, it found now."""
    if not task.cancelled():
        task.result()


def _same(first: Success | CommandFailed, second: Success | CommandFailed) -> bool:
    if isinstance(first, CommandFailed) and isinstance(second, CommandFailed):
        return (first.kind, first.message) == (second.kind, second.message)
    return first == second
