"""What the journal holds, as the books of a gateway that starts: nothing that was accepted or answered is missing."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from typing import Literal

from gateway.scheduling.effects import note_change
from gateway.scheduling.futures import Future, FutureBook
from gateway.scheduling.history import History, Snapshot
from gateway.scheduling.identity import command_id_of
from gateway.scheduling.journal_rows import future_of, is_of_import, model_of, outcome_of, session_of
from gateway.scheduling.model_queue import KeyBook, ModelQueue
from gateway.scheduling.recovery_snapshots import SnapshotAhead, newest_snapshot
from gateway.scheduling.requests import RejectedRequest
from gateway.scheduling.sessions import Session, SessionBook
from gateway.scheduling.steady_clock import steady_time
from gateway.scheduling.visits import PLAIN_REST
from gateway.store.records import CommandRecord, ModelRecord, Stored
from trainer_cell.protocol.errors import CommandFailed
from trainer_cell.vault.errors import VaultError
from trainer_cell.vault.layout import Vault

log = logging.getLogger(__name__)


class Restored:
    """Fills the books it is given; blocks for the disk. Checkpoint versions that a model may still need are leased, so
    it comes before anything is recovered or collected.

    queues: in the order in which their models were made. plain_sessions: by tenant. orphans: commands of models whose
    create was refused, which were refused themselves or are to be.
    """

    def __init__(self, stored: Stored, vault: Vault, sessions: SessionBook, futures: FutureBook, keys: KeyBook) -> None:
        self.queues: list[ModelQueue] = []
        self.plain_sessions: dict[str, Session] = {}
        self._vault = vault
        self._sessions = sessions
        self._futures = futures
        self._keys = keys
        self._by_id: dict[str, Session] = {}
        self._commands: dict[str, list[CommandRecord]] = defaultdict(list)
        futures.go_on_from(stored.next_moment)
        for record in stored.sessions:
            self._open(session_of(record, time.monotonic()))
        for command in stored.commands:
            if command.operation == "import":
                self._remember(command, future_of(command))
            else:
                self._commands[command.model_id].append(command)
        for model in sorted(stored.models, key=lambda model: model.number):
            if not is_of_import(model):
                self.queues.append(self._restore(model))
        known = {model.model_id for model in stored.models}
        self.orphans = [command for command in stored.commands if command.model_id not in known]

    def waiting(self, queue: ModelQueue) -> list[Future]:
        """The model's futures without an answer."""
        found = (self._futures.find(record.request_id) for record in self._commands[queue.model.model_id])
        return [future for future in found if future is not None and not future.is_done]

    def _open(self, session: Session) -> None:
        self._sessions.remember(session)
        self._by_id[session.session_id] = session
        if session.display_name == PLAIN_REST and not session.beats:
            self.plain_sessions[session.tenant] = session

    def _restore(self, record: ModelRecord) -> ModelQueue:
        queue = ModelQueue(model_of(record))
        if (session := self._by_id.get(record.session_id)) is not None:
            session.model_ids.append(record.model_id)
        queue.contiguous = record.floor
        self._find_snapshot(queue, record)
        records = self._commands[record.model_id]
        futures = [future_of(command) for command in records]
        for command, future in zip(records, futures, strict=True):
            self._remember(command, future)
        for command in records:
            if command.seq_id is not None:
                queue.remember(command.request_id, command.seq_id, command.fingerprint)
            if command.key is not None and command.key_digest is not None:
                self._keys.accept(command.tenant, command.key, command.request_id, command.key_digest)
        self._replay(queue, list(zip(records, futures, strict=True)), record)
        for command, future in zip(records, futures, strict=True):
            self._place(queue, command, future)
        for command, future in zip(records, futures, strict=True):
            # Only now: what came before a lower number was placed together with that.
            if not _is_waiting(command, future):
                queue.take(future)
        return queue

    def _find_snapshot(self, queue: ModelQueue, record: ModelRecord) -> None:
        if queue.model.is_over:
            return
        noted = None if record.snapshot is None else Snapshot(record.snapshot, record.snapshot_turn)
        rows = self._commands[record.model_id]
        done = {row.turn: row.request_id for row in rows if row.turn is not None and row.finished is not None}
        try:
            queue.history = History(newest_snapshot(self._vault, record.model_id, record.created, noted, done))
        except SnapshotAhead as error:
            log.error("%s: the model is not brought back", error)
            queue.history = History(noted)
            queue.history.is_broken = True
        except VaultError as error:
            log.error("the snapshot of %s cannot be held: %s", record.model_id, error)
            queue.history = History(noted)

    def _remember(self, command: CommandRecord, future: Future) -> None:
        if command.finished is None or future.is_done:
            self._futures.remember(future)  # else its answer was kept for long enough

    def _replay(self, queue: ModelQueue, rows: list[tuple[CommandRecord, Future]], record: ModelRecord) -> None:
        """What was done since the snapshot, in the order in which it was done."""
        done = [(future.turn, command, future) for command, future in rows if future.turn is not None]
        done.sort(key=lambda row: row[0])
        queue.turn = max([record.floor_turn, record.snapshot_turn, *(turn for turn, _, _ in done)])
        start = queue.history.snapshot.turn if queue.history.snapshot is not None else -1
        for turn, command, future in done:
            if command.finished is None:
                queue.unsettled = future
            elif turn > start and not queue.model.is_over:
                self._do(queue, future)

    def _do(self, queue: ModelQueue, future: Future) -> None:
        answer = future.error or future.outcome
        is_changed = isinstance(future.request, RejectedRequest) and future.error is None
        if answer is None or is_changed:
            log.error("what was asked or answered as %s has changed on the disk", future.request_id)
            queue.history.is_broken = True
            return
        if future.version is not None:
            future.lease = self._vault.lease(future.version)
        note_change(queue, future, answer)

    def _place(self, queue: ModelQueue, command: CommandRecord, future: Future) -> None:
        if command.finished is None:
            queue.model.pending += 1
        # A number below what was forgotten has its place behind it.
        is_next = command.seq_id is not None and command.seq_id > queue.contiguous
        if is_next or (command.seq_id is None and _is_waiting(command, future)):
            queue.place(future, command.seq_id)


def _is_waiting(command: CommandRecord, future: Future) -> bool:
    """Neither answered nor, as a captured save, taken already."""
    return command.finished is None and future.turn is None


def outcomes_of(stored: Stored) -> Callable[[str], Literal["succeeded", "failed"] | None]:
    """What the journal says became of a command, by its id."""
    told: dict[str, Literal["succeeded", "failed"]] = {}
    for command in stored.commands:
        if command.outcome is not None and command.operation == "save":
            is_failed = isinstance(outcome_of(command.outcome), CommandFailed)
            told[command_id_of(command.request_id)] = "failed" if is_failed else "succeeded"
    return told.get


def last_sign(stored: Stored) -> float:
    """When the service was last heard of in the journal, in Unix time; now, of an empty one."""
    moments = [moment for command in stored.commands for moment in (command.accepted, command.finished) if moment]
    moments += [datetime.fromisoformat(model.last_request).timestamp() for model in stored.models]
    return max(moments, default=steady_time())
