"""Reading the journal: all of it when the gateway starts, payloads when commands are executed again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Row, Table, func, select
from sqlalchemy.exc import DBAPIError

from gateway.store.errors import JournalUnavailable
from gateway.store.records import CommandRecord, ModelRecord, SessionRecord, Stored
from gateway.store.tables import commands, counters, models, outcomes, payloads, sessions
from gateway.store.writes import digest

log = logging.getLogger(__name__)

# PostgreSQL and SQLite take more parameters, but not without end.
_ROWS_AT_ONCE = 500


class Reader:
    """For any thread, one at a time. Its connection stays open, which keeps SQLite's index of the log alive while the
    writer opens one anew: on a full disk there may be no room for another."""

    def __init__(self, engine: Engine, where: str) -> None:
        """where: how to name the database to people."""
        self._engine = engine
        self._where = where
        self._lock = threading.Lock()
        self._connection: Connection | None = engine.connect()

    def load(self) -> Stored:
        """Everything; raises `JournalUnavailable`."""
        with self._reading() as connection:
            found = dict(_blobs(connection, outcomes))
            found_payloads = dict(_blobs(connection, payloads, _of_unfinished()))
            return Stored(
                sessions=[_session(row) for row in connection.execute(select(sessions).order_by(sessions.c.created))],
                models=[_model(row) for row in connection.execute(select(models).order_by(models.c.number))],
                commands=[
                    _command(row, found_payloads, found)
                    for row in connection.execute(select(commands).order_by(commands.c.moment))
                ],
                next_moment=_next_moment(connection),
            )

    def payloads(self, request_ids: Sequence[str]) -> dict[str, bytes]:
        """Of those that have one; a damaged one is left out. Raises `JournalUnavailable`."""
        found: dict[str, bytes] = {}
        with self._reading() as connection:
            for at in range(0, len(request_ids), _ROWS_AT_ONCE):
                wanted = payloads.c.request_id.in_(request_ids[at : at + _ROWS_AT_ONCE])
                found.update(_blobs(connection, payloads, wanted))
        return found

    def disconnect(self) -> None:
        """The next to read connects anew."""
        with self._lock:
            self._disconnect()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """One consistent view. It ends with the block, so that the log can be started anew behind it."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._engine.connect()
                yield self._connection
                self._connection.rollback()
            except DBAPIError as error:
                self._disconnect()
                raise JournalUnavailable(f"{self._where} cannot be read: {error.orig}") from error

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None


def _of_unfinished() -> ColumnElement[bool]:
    return payloads.c.request_id.in_(select(commands.c.request_id).where(commands.c.finished.is_(None)))


def _blobs(
    connection: Connection, table: Table, wanted: ColumnElement[bool] | None = None
) -> Iterator[tuple[str, bytes]]:
    """(request_id, data) of the whole ones."""
    query = select(table)
    for row in connection.execute(query if wanted is None else query.where(wanted)):
        if digest(row.data) == row.digest:
            yield row.request_id, row.data
        else:
            log.error(
                "%s: the stored bytes of %s have changed on the disk; they are not used", table.name, row.request_id
            )


def _session(row: Row[Any]) -> SessionRecord:
    values = dict(row._mapping)
    return SessionRecord(**{**values, "tags": tuple(values["tags"])})


def _model(row: Row[Any]) -> ModelRecord:
    return ModelRecord(**row._mapping)


def _command(row: Row[Any], found_payloads: dict[str, bytes], found_outcomes: dict[str, bytes]) -> CommandRecord:
    return CommandRecord(
        **row._mapping,
        payload=found_payloads.get(row.request_id),
        outcome=found_outcomes.get(row.request_id),
    )


def _next_moment(connection: Connection) -> int:
    """Higher than any in use, and than any that was, so that nothing that happens is older than what was forgotten."""
    reached: list[int | None] = [
        connection.scalar(select(func.max(commands.c.moment))),
        connection.scalar(select(func.max(commands.c.told_moment))),
        connection.scalar(select(counters.c.value).where(counters.c.name == "moment")),
    ]
    return max(value for value in reached if value is not None) + 1
