"""Accepts commands for models and gives each its place: the one surface of scheduling for those who serve clients.

All of it happens in one event loop and state changes only between awaits, so there are no locks. Accepting is
synchronous and answers at once; `turns` decides what runs when.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from datetime import UTC, datetime

from gateway.scheduling.admission import adapter_of, fingerprinted
from gateway.scheduling.backlog import Backlog
from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_link import CellLink
from gateway.scheduling.errors import InvalidRequest, Stopping, UnknownModel
from gateway.scheduling.futures import Future, FutureBook
from gateway.scheduling.identity import digest_of, model_id_of
from gateway.scheduling.model_queue import KeyBook, ModelQueue
from gateway.scheduling.models import Model
from gateway.scheduling.requests import CreateFromCheckpointRequest, CreateRequest, RejectedRequest, Request
from gateway.scheduling.sessions import Session, SessionBook
from gateway.scheduling.turns import Turns
from trainer_cell.protocol.outcomes import Hello

CreationRequest = CreateRequest | CreateFromCheckpointRequest | RejectedRequest
SESSION_SILENCE_S = 3600.0
STOP_GRACE_S = 20.0


class Scheduler:
    """The one place where commands wait.

    sessions, futures, catalog: the books, for those who read them.
    warnings: by tenant, what its new sessions are told.
    session_silence_s: a session without a sign of life for so long may lose its models' slots to others.
    on_crash: called if the task that runs commands ends by a bug; the gateway is of no use after that.
    """

    def __init__(
        self,
        link: CellLink,
        catalog: Catalog,
        sessions: SessionBook | None = None,
        futures: FutureBook | None = None,
        backlog: Backlog | None = None,
        session_silence_s: float = SESSION_SILENCE_S,
        on_crash: Callable[[], None] = lambda: None,
    ) -> None:
        self.sessions = sessions or SessionBook()
        self.futures = futures or FutureBook()
        self.catalog = catalog
        self.on_crash = on_crash
        self.warnings: dict[str, str] = {}
        self._start_up: Future | None = None
        self._backlog = backlog or Backlog()
        self._queues: dict[str, ModelQueue] = {}
        self._keys = KeyBook()
        self._plain_sessions: dict[str, Session] = {}
        self._turns = Turns(
            link,
            catalog,
            self._queues,
            self.futures,
            self._backlog,
            is_over=lambda session_id: self.sessions.is_over(session_id, session_silence_s),
            on_crash=lambda: self.on_crash(),
        )
        catalog.known_owner = self._owner

    # Life

    @property
    def hello(self) -> Hello | None:
        """What the cell said last, also while it is away; None until a first one came."""
        return self._turns.hello

    @property
    def is_ready(self) -> bool:
        """Whether a command would be run now: a cell is attached and settled, the model to start with is made, and the
        gateway is not going down."""
        return self._turns.is_ready and not self.is_starting_up

    @property
    def is_starting_up(self) -> bool:
        """Whether the model that the service starts with is still to be made."""
        return self._start_up is not None and self._start_up.outcome is None

    @property
    def is_stopping(self) -> bool:
        return self._turns.is_stopping

    async def start(self) -> None:
        """Listen for a cell and begin to run commands; raises what `CellLink.start` does."""
        await self._turns.start()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Refuse what comes, end every wait, let the running command finish within `grace_s`, hang up the cell."""
        await self._turns.stop(grace_s)

    # Accepting

    def submit_create(self, tenant: str, session_id: str, model_seq_id: int, request: CreationRequest) -> Future:
        """Accept the making of model `<session_id>:train:<model_seq_id>`.

        The same again answers with the same future. Raises `UnknownSession`, `InvalidRequest`, `SequenceConflict`,
        `QueueFull`, `Stopping`.
        """
        self._refuse_if_stopping()
        session = self.sessions.beat(tenant, session_id)
        if model_seq_id < 0:
            raise InvalidRequest("model_seq_id must not be negative")
        model_id = model_id_of(session_id, model_seq_id)
        asked, digest = fingerprinted(request)
        queue = self._queues.get(model_id)
        if queue is not None:
            known = queue.known(0, digest)
            assert known is not None, "every model has been created once"
            return self._again(known, queue, asked)
        self._backlog.check(tenant)
        queue = self._queues[model_id] = ModelQueue(_new_model(session, model_id, request))
        session.model_ids.append(model_id)
        return self._accept(queue, 0, asked, digest)

    def submit_create_plain(self, tenant: str, request: CreationRequest, idempotency_key: str | None = None) -> Future:
        """As `submit_create`, in a session of the tenant's own that has no client and never falls silent."""
        self._refuse_if_stopping()
        asked, digest = fingerprinted(request)
        if idempotency_key is not None:
            known = self._keys.known(tenant, idempotency_key, digest)
            future = self.futures.find(known) if known is not None else None
            if known is not None:
                return future or self.futures.forgotten(known, tenant, "", asked)
        session = self._plain_session(tenant)
        numbers = itertools.count(len(session.model_ids))
        number = next(number for number in numbers if model_id_of(session.session_id, number) not in self._queues)
        future = self.submit_create(tenant, session.session_id, number, request)
        if idempotency_key is not None:
            self._keys.accept(tenant, idempotency_key, future.request_id, digest)
        return future

    def submit_start_up(self, tenant: str, session_id: str, request: CreationRequest) -> Future:
        """As `submit_create`, in a session that no client opened; the scheduler is not ready until it has succeeded."""
        session = self.sessions.open(tenant, display_name="start-up", beats=False, session_id=session_id)
        self._start_up = self.submit_create(tenant, session.session_id, 0, request)
        return self._start_up

    def _plain_session(self, tenant: str) -> Session:
        if tenant not in self._plain_sessions:
            self._plain_sessions[tenant] = self.sessions.open(tenant, display_name="plain REST", beats=False)
        return self._plain_sessions[tenant]

    def submit(
        self, tenant: str, model_id: str, seq_id: int | None, request: Request, idempotency_key: str | None = None
    ) -> Future:
        """Accept a command; it runs in the order of `seq_id`, which starts at 1, earlier arrivals wait.

        seq_id None: it runs after the highest contiguous number accepted so far; `idempotency_key` tells its retries.
        The same again answers with the same future. Raises `UnknownModel`, `InvalidRequest`, `SequenceConflict`,
        `QueueFull`, `Stopping`.
        """
        self._refuse_if_stopping()
        queue = self._queue(tenant, model_id)
        self.sessions.beat(tenant, queue.model.session_id)
        asked, digest = fingerprinted(request)
        if seq_id == 0:
            raise InvalidRequest("seq_id starts at 1")
        known = self._known(queue, seq_id, idempotency_key, digest)
        if known is not None:
            return self._again(known, queue, asked)
        if queue.model.state == "unloaded":
            raise UnknownModel(f"model {model_id} was unloaded")
        if not queue.could_run_now(seq_id):
            # What holds up the others is let in however much waits: refusing it would hold them up for good.
            self._backlog.check(tenant)
        future = self._accept(queue, seq_id, asked, digest)
        if seq_id is None and idempotency_key is not None:
            self._keys.accept(tenant, idempotency_key, future.request_id, _key_digest(model_id, digest))
        return future

    def _known(self, queue: ModelQueue, seq_id: int | None, key: str | None, digest: bytes) -> str | None:
        if seq_id is not None:
            return queue.known(seq_id, digest)
        if key is None:
            return None
        return self._keys.known(queue.model.tenant, key, _key_digest(queue.model.model_id, digest))

    def _again(self, request_id: str, queue: ModelQueue, request: Request) -> Future:
        future = self.futures.find(request_id)
        return future or self.futures.forgotten(request_id, queue.model.tenant, queue.model.model_id, request)

    def _accept(self, queue: ModelQueue, seq_id: int | None, request: Request, digest: bytes) -> Future:
        model = queue.model
        future = self.futures.open(model.tenant, model.model_id, request)
        model.last_request_time = datetime.now(UTC)
        self._backlog.enter(model.tenant, future.payload_bytes)
        queue.accept(future, seq_id, digest)
        self._turns.advance(queue)
        return future

    def _refuse_if_stopping(self) -> None:
        if self.is_stopping:
            raise Stopping("the gateway is going down")

    # Reading

    def model(self, tenant: str, model_id: str) -> Model:
        """Raises `UnknownModel`, also for another tenant's."""
        return self._queue(tenant, model_id).model

    def models(self, tenant: str) -> list[Model]:
        """Newest first."""
        return [queue.model for queue in reversed(self._queues.values()) if queue.model.tenant == tenant]

    def _queue(self, tenant: str, model_id: str) -> ModelQueue:
        queue = self._queues.get(model_id)
        if queue is None or queue.model.tenant != tenant:
            raise UnknownModel(f"no model {model_id}")
        return queue

    def _owner(self, model_id: str) -> str | None:
        queue = self._queues.get(model_id)
        return queue.model.tenant if queue is not None else None


def _key_digest(model_id: str, digest: bytes) -> bytes:
    """Keys are a tenant's, over all its models."""
    return digest_of(model_id.encode() + b"\0" + digest)


def _new_model(session: Session, model_id: str, request: CreationRequest) -> Model:
    model = Model(model_id, session.session_id, session.tenant, None, None, None, {})
    match request:
        case CreateRequest():
            model.base_model = request.base_model
            model.adapter = adapter_of(request)
            model.seed = request.seed if request.seed is not None else secrets.randbits(32)
            model.user_metadata = request.user_metadata
        case CreateFromCheckpointRequest():
            model.user_metadata = request.user_metadata
        case RejectedRequest():
            pass
    return model
