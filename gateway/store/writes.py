"""What the journal writes, each within a transaction that somebody else began and will commit.

Each may be done again after a crash or a failed commit, and then changes nothing more; `insert_…` alone may not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash
from sqlalchemy import Connection, Table, Update, bindparam, select

from gateway.store.records import CommandRecord, ModelRecord, SessionRecord
from gateway.store.tables import commands, counters, models, outcomes, payloads, sessions

log = logging.getLogger(__name__)


def digest(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)


def insert_session(connection: Connection, session: SessionRecord) -> None:
    connection.execute(sessions.insert(), msgspec.structs.asdict(session))


def delete_session(connection: Connection, session_id: str) -> None:
    connection.execute(sessions.delete().where(sessions.c.session_id == session_id))


def put_session(connection: Connection, session: SessionRecord) -> None:
    delete_session(connection, session.session_id)
    insert_session(connection, session)


def finish_session(connection: Connection, session: SessionRecord) -> None:
    values = {name: getattr(session, name) for name in ("finish_reason", "finish_detail", "last_sign")}
    _one(connection, _by_id(sessions), session.session_id, values)


def insert_command(connection: Connection, command: CommandRecord, model: ModelRecord | None) -> None:
    if model is not None:
        connection.execute(models.insert(), msgspec.structs.asdict(model))
    row = msgspec.structs.asdict(command)
    payload, outcome = row.pop("payload"), row.pop("outcome")
    connection.execute(commands.insert(), row)
    for table, data in ((payloads, payload), (outcomes, outcome)):
        if data is not None:
            _put(connection, table, command.request_id, data)


def delete_command(connection: Connection, command: CommandRecord, model: ModelRecord | None) -> None:
    """As if `insert_command` had not been."""
    for table in (payloads, outcomes, commands):
        connection.execute(table.delete().where(table.c.request_id == command.request_id))
    if model is not None:
        connection.execute(models.delete().where(models.c.model_id == model.model_id))


def note_command(connection: Connection, request_id: str, values: Mapping[str, object]) -> None:
    """values: columns of `commands`."""
    _one(connection, _by_id(commands), request_id, values)


def complete(
    connection: Connection, request_id: str, values: Mapping[str, object], outcome: bytes, model: ModelRecord
) -> None:
    """Of `model` are taken the facts and the last request: the rest is the journal's own, or never changes."""
    answer(connection, request_id, values, outcome)
    _one(connection, _by_id(models), model.model_id, {"facts": model.facts, "last_request": model.last_request})


def answer(connection: Connection, request_id: str, values: Mapping[str, object], outcome: bytes) -> None:
    """Of a command that changes no model."""
    note_command(connection, request_id, values)
    connection.execute(outcomes.delete().where(outcomes.c.request_id == request_id))
    _put(connection, outcomes, request_id, outcome)


def note_snapshot(connection: Connection, model_id: str, version: str, turn: int) -> None:
    """Also drops the payloads of what the snapshot holds the effect of."""
    _one(connection, _by_id(models), model_id, {"snapshot": version, "snapshot_turn": turn})
    covered = select(commands.c.request_id).where(
        commands.c.model_id == model_id, commands.c.finished.is_not(None), commands.c.turn <= turn
    )
    connection.execute(payloads.delete().where(payloads.c.request_id.in_(covered)))


def drop_model(connection: Connection, model_id: str) -> None:
    _one(connection, _by_id(models), model_id, {"is_over": True, "snapshot": None})
    of_model = select(commands.c.request_id).where(commands.c.model_id == model_id)
    connection.execute(payloads.delete().where(payloads.c.request_id.in_(of_model)))


def nothing(connection: Connection) -> None:
    """Its place in the order is all that matters."""


def probe(connection: Connection) -> None:
    """The smallest real write."""
    connection.execute(counters.update().where(counters.c.name == "probes").values(value=counters.c.value + 1))


def _put(connection: Connection, table: Table, request_id: str, data: bytes) -> None:
    connection.execute(table.insert(), {"request_id": request_id, "digest": digest(data), "data": data})


def _by_id(table: Table) -> Update:
    [key] = table.primary_key.columns
    return table.update().where(key == bindparam("id"))


def _one(connection: Connection, statement: Update, identity: str, values: Mapping[str, Any]) -> None:
    """values: by column; the statement takes its shape from them."""
    if connection.execute(statement, {"id": identity, **values}).rowcount != 1:
        # Whoever asked for it did so for a row that never was or was forgotten: the others must not wait for that.
        log.error("the journal has no row %s in %s", identity, statement.table)
