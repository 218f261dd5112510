"""What the journal holds, as its users hand it in and get it back.

Times are seconds of the wall clock unless a name says otherwise.
"""

from __future__ import annotations

from typing import Any

import msgspec


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """created: ISO 8601. last_sign: when its client last showed itself. finish_reason None: it is not over."""

    session_id: str
    tenant: str
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] = {}
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    beats: bool = True
    created: str
    finish_reason: str | None = None
    finish_detail: str | None = None
    last_sign: float


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """number: order of making, over all models. facts: what the scheduler knows of it, packed by the scheduler.

    snapshot: version of its last recovery snapshot, which holds the effect of every command up to `snapshot_turn`
    (-1: there is none). floor, floor_turn: the highest seq_id, and the highest turn, of a command that was forgotten
    (-1: none was). is_over: it was unloaded.
    """

    model_id: str
    session_id: str
    tenant: str
    number: int
    created: str
    last_request: str
    facts: bytes
    snapshot: str | None = None
    snapshot_turn: int = -1
    floor: int = -1
    floor_turn: int = -1
    is_over: bool = False


class CommandRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted command.

    moment: its place among all acceptances and tellings. key, key_digest: of the plain REST face. request: the packed
    command without its arrays; payload: the arrays, None where there are none or where they were dropped, and in what
    `Journal.load` returns also for every finished command. attempts: how often it was sent to a cell. turn: its place
    among the commands of its model that were run or answered. version: the checkpoint version it resolved or made.
    outcome: packed by the scheduler; finished without an outcome: its outcome was dropped.
    """

    request_id: str
    model_id: str
    tenant: str
    moment: int
    seq_id: int | None = None
    key: str | None = None
    key_digest: bytes | None = None
    fingerprint: bytes
    operation: str
    request: bytes
    payload: bytes | None = None
    payload_bytes: int = 0
    accepted: float
    attempts: int = 0
    turn: int | None = None
    version: str | None = None
    outcome: bytes | None = None
    finished: float | None = None
    told_moment: int | None = None
    told: float | None = None


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """models: in order of `number`; commands: in order of `moment`. next_moment: higher than any that was used."""

    sessions: list[SessionRecord]
    models: list[ModelRecord]
    commands: list[CommandRecord]
    next_moment: int
