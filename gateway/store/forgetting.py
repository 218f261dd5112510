"""What is forgotten: outcomes that were delivered or that nobody came for, then the commands themselves."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select

from gateway.store.tables import commands, counters, models, outcomes, payloads


def prune(connection: Connection, told_before: float, untold_before: float, remembered: int) -> None:
    """Forget what nothing needs any more.

    A finished command is needed for making its model resident until a snapshot holds its effect, or the model is over:
    until then everything of it stays. After that its payload goes at once; its outcome when it was told before
    `told_before`, or, never told, when it finished before `untold_before`; and with the outcome its row, unless it
    finished later than `untold_before` and its seq_id is among the `remembered` highest of its model.
    """
    # The subqueries name each other's rows, so all that depends on what is deleted is looked up first.
    covered = and_(commands.c.finished.is_not(None), or_(models.c.is_over, commands.c.turn <= models.c.snapshot_turn))
    expired = and_(
        covered,
        or_(commands.c.told < told_before, and_(commands.c.told.is_(None), commands.c.finished < untold_before)),
    )
    rows = select(commands.c.request_id).join(models, models.c.model_id == commands.c.model_id)
    connection.execute(payloads.delete().where(payloads.c.request_id.in_(rows.where(covered))))
    connection.execute(outcomes.delete().where(outcomes.c.request_id.in_(rows.where(expired))))
    _forget_rows(connection, expired, untold_before, remembered)


def _forget_rows(connection: Connection, expired: ColumnElement[bool], untold_before: float, remembered: int) -> None:
    heights = (
        select(commands.c.model_id, func.max(commands.c.seq_id).label("highest"))
        .group_by(commands.c.model_id)
        .subquery()
    )
    # A key tells retries for as long as an answer that nobody asks for is kept.
    has_no_key = or_(commands.c.key.is_(None), commands.c.finished < untold_before)
    is_plain = and_(commands.c.seq_id.is_(None), has_no_key)
    is_old_number = or_(commands.c.seq_id <= heights.c.highest - remembered, commands.c.finished < untold_before)
    old = or_(is_plain, is_old_number)
    going = (
        select(commands.c.request_id, commands.c.model_id, commands.c.seq_id, commands.c.turn)
        .add_columns(func.coalesce(commands.c.told_moment, commands.c.moment).label("moment"))
        .join(models, models.c.model_id == commands.c.model_id)
        .join(heights, heights.c.model_id == commands.c.model_id)
        .where(expired, old)
        .subquery()
    )
    floors = connection.execute(
        select(going.c.model_id, func.max(going.c.seq_id), func.max(going.c.turn), func.max(going.c.moment)).group_by(
            going.c.model_id
        )
    ).all()
    connection.execute(commands.delete().where(commands.c.request_id.in_(select(going.c.request_id))))
    for model_id, seq_id, turn, moment in floors:
        _raise_floor(connection, model_id, seq_id, turn)
        reached = counters.update().where(counters.c.name == "moment", counters.c.value < moment)
        connection.execute(reached.values(value=moment))


def _raise_floor(connection: Connection, model_id: str, seq_id: int | None, turn: int | None) -> None:
    for column, value in ((models.c.floor, seq_id), (models.c.floor_turn, turn)):
        if value is not None:
            higher = models.update().where(models.c.model_id == model_id, column < value)
            connection.execute(higher.values({column: value}))
