"""Accepts commands for models and gives each its place: the one surface of scheduling for those who serve clients.

All of it happens in one event loop and state changes only between awaits, so there are no locks. Accepting is
synchronous and answers at once; `turns` decides what runs when.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from gateway.scheduling.acceptance import Acceptance
from gateway.scheduling.admission import fingerprinted
from gateway.scheduling.backlog import Backlog
from gateway.scheduling.catalog import Catalog
from gateway.scheduling.cell_link import CellLink
from gateway.scheduling.errors import InvalidRequest, Stopping, UnknownModel
from gateway.scheduling.futures import Future, FutureBook
from gateway.scheduling.identity import model_id_of
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.models import Model
from gateway.scheduling.new_models import model_to_be
from gateway.scheduling.requests import (
    CreateFromCheckpointRequest,
    CreateRequest,
    RejectedRequest,
    Request,
    UnloadRequest,
)
from gateway.scheduling.restored import Restored, last_sign
from gateway.scheduling.sessions import FinishReason, Session, SessionBook
from gateway.scheduling.snapshot_rules import SnapshotRules
from gateway.scheduling.steady_clock import steady_time
from gateway.scheduling.turns import Turns
from gateway.scheduling.upkeep import Patience, Upkeep
from gateway.scheduling.visits import Visits
from gateway.store.journal import Journal
from gateway.store.records import Stored
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Hello

log = logging.getLogger(__name__)

CreationRequest = CreateRequest | CreateFromCheckpointRequest | RejectedRequest
SESSION_SILENCE_S = 3600.0
# The SDK sends a request again for 300 s.
GAP_PATIENCE_S = 360.0
IDLE_MODEL_S = 30 * 86_400.0
STOP_GRACE_S = 20.0


class Scheduler:
    """The one place where commands wait.

    sessions, futures, catalog: the books, for those who read them. journal: where all of it lasts. visits: opens
    sessions.
    warnings: by tenant, what its new sessions are told.
    session_silence_s: models of a session without a sign of life for so long are parked.
    gap_patience_s: how long, in time that the service was ready, a number may be missing that others wait for.
    idle_model_s: a model that nobody has asked anything of for so long is unloaded.
    on_crash: called if the task that runs commands ends by a bug; the gateway is of no use after that.
    """

    def __init__(
        self,
        link: CellLink,
        catalog: Catalog,
        journal: Journal,
        sessions: SessionBook | None = None,
        futures: FutureBook | None = None,
        backlog: Backlog | None = None,
        rules: SnapshotRules | None = None,
        session_silence_s: float = SESSION_SILENCE_S,
        gap_patience_s: float = GAP_PATIENCE_S,
        idle_model_s: float = IDLE_MODEL_S,
        on_crash: Callable[[], None] = lambda: None,
    ) -> None:
        self.sessions = sessions or SessionBook()
        self.futures = futures or FutureBook()
        self.visits = Visits(self.sessions, journal)
        self.catalog = catalog
        self.journal = journal
        self.on_crash = on_crash
        self.warnings: dict[str, str] = {}
        self._start_up: Future | None = None
        self._backlog = backlog or Backlog()
        self._queues: dict[str, ModelQueue] = {}
        self._num_models = 0
        self._turns = Turns(
            link,
            catalog,
            journal,
            self._queues,
            self.futures,
            self._backlog,
            rules or SnapshotRules(),
            on_crash=lambda: self.on_crash(),
        )
        self._acceptance = Acceptance(journal, self.sessions, self.futures, self._queues, self._backlog, self._turns)
        self._upkeep = Upkeep(
            self._queues,
            self._turns,
            self.sessions,
            journal,
            self._seal,
            self._retire,
            Patience(session_silence_s, gap_patience_s, idle_model_s),
        )
        catalog.known_owner = self._owner
        self.futures.on_told = self._on_told

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

    def restore(self, stored: Stored) -> None:
        """Go on where the process before stopped; before `start`."""
        restored = Restored(stored, self.catalog.vault, self.sessions, self.futures, self._acceptance.keys)
        for queue in restored.queues:
            self._queues[queue.model.model_id] = queue
            for future in restored.waiting(queue):
                self._backlog.enter(future.tenant, future.payload_bytes)
            self._num_models = max(self._num_models, queue.model.number)
        self.visits.plain_sessions |= restored.plain_sessions
        self._upkeep.away_s = max(0.0, steady_time() - last_sign(stored))
        self._acceptance.orphans = restored.orphans

    async def start(self) -> None:
        """Listen for a cell and begin to run commands; raises what `CellLink.start` does."""
        self._acceptance.withdraw_orphans()
        for queue in self._queues.values():
            self._turns.advance(queue)
        await self._turns.start()
        self._upkeep.start()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Refuse what comes, end every wait, let the running command finish within `grace_s`, hang up the cell; what
        still waits is in the journal, which is whoever's opened it to close: answers may be told after this."""
        await self._upkeep.stop()
        await self._turns.stop(grace_s)

    async def finish_session(self, tenant: str, session_id: str, reason: FinishReason, detail: str | None) -> None:
        """Its models are parked, and stay. Raises `UnknownSession`."""
        session = await self.visits.finish(tenant, session_id, reason, detail)
        for model_id in session.model_ids:
            self._turns.park(model_id)

    # Accepting

    def submit_create(
        self, tenant: str, session_id: str, model_seq_id: int, request: CreationRequest, key: str | None = None
    ) -> Future:
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
        queue = self._queues[model_id] = ModelQueue(model_to_be(session, model_id, asked))
        queue.model.number = self._num_models = self._num_models + 1
        session.model_ids.append(model_id)
        return self._acceptance.accept(queue, 0, asked, digest, key)

    def submit_create_plain(self, tenant: str, request: CreationRequest, idempotency_key: str | None = None) -> Future:
        """As `submit_create`, in a session of the tenant's own that has no client and never falls silent."""
        self._refuse_if_stopping()
        asked, digest = fingerprinted(request)
        if idempotency_key is not None:
            known = self._acceptance.keys.known(tenant, idempotency_key, digest)
            future = self.futures.find(known) if known is not None else None
            if known is not None:
                return future or self.futures.forgotten(known, tenant, "", asked)
        session = self.visits.plain(tenant)
        numbers = itertools.count(len(session.model_ids))
        number = next(number for number in numbers if model_id_of(session.session_id, number) not in self._queues)
        return self.submit_create(tenant, session.session_id, number, request, idempotency_key)

    def submit_start_up(self, tenant: str, session_id: str, request: CreationRequest) -> Future:
        """As `submit_create`, in a session that no client opened; the scheduler is not ready until it has succeeded."""
        session = self.visits.start_up(tenant, session_id)
        self._start_up = self._unused(session, request)
        if self._start_up is None:
            self._start_up = self.submit_create(tenant, session.session_id, len(session.model_ids), request)
        return self._start_up

    def _unused(self, session: Session, request: CreationRequest) -> Future | None:
        """What a gateway that never became ready was asked for just like that."""
        queue = self._queues.get(session.model_ids[-1]) if session.model_ids else None
        if queue is None or queue.contiguous > 0 or queue.model.is_over:
            return None
        known = queue.request_id_of(0)
        future = self.futures.find(known) if known is not None else None
        return future if future is not None and future.request == request else None

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
        known = self._acceptance.known(queue, seq_id, idempotency_key, digest)
        if known is not None:
            return self._again(known, queue, asked)
        if queue.model.state == "unloaded":
            raise UnknownModel(f"model {model_id} was unloaded")
        if not queue.could_run_now(seq_id):
            # What holds up the others is let in however much waits: refusing it would hold them up for good.
            self._backlog.check(tenant)
        return self._acceptance.accept(queue, seq_id, asked, digest, idempotency_key if seq_id is None else None)

    def _seal(self, model_id: str, seq_id: int) -> Future:
        """Fail a number that never came, at its place, so that those behind it can go on."""
        queue = self._queues[model_id]
        asked, digest = fingerprinted(
            RejectedRequest(
                "forward_backward",
                ErrorKind.DEADLINE_EXCEEDED,
                f"request {seq_id} of model {model_id} never came, while later ones waited for it",
            )
        )
        log.warning("number %d of model %s never came and is sealed", seq_id, model_id)
        return self._acceptance.accept(queue, seq_id, asked, digest, None)

    def _again(self, request_id: str, queue: ModelQueue, request: Request) -> Future:
        future = self.futures.find(request_id)
        return future or self.futures.forgotten(request_id, queue.model.tenant, queue.model.model_id, request)

    def _retire(self, model_id: str) -> None:
        """Unload a model that nobody came back to."""
        log.warning("nobody has used model %s for long: it is unloaded, its checkpoints stay", model_id)
        asked, digest = fingerprinted(UnloadRequest())
        self._acceptance.accept(self._queues[model_id], None, asked, digest, None)

    def _on_told(self, future: Future) -> None:
        if future.told_moment is not None:
            self.journal.note_told(future.request_id, future.told_moment, steady_time())

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
