"""Bringing a database to the newest tables; the steps lie in `migrations/versions`, written by hand, never changed."""

from __future__ import annotations

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from gateway.store.errors import JournalUnusable

log = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).parent / "migrations"


def migrate(connection: Connection, where: str, migrations: Path = MIGRATIONS) -> None:
    """All or nothing, in the transaction of `connection`, which the caller commits.

    where: how to name the database to people. Raises `JournalUnusable` for a database of a newer cellgate, or of
    another program.
    """
    # It tells of itself at every start.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    config = _config(migrations)
    if is_newest(connection, where, migrations):
        return
    revisions = ScriptDirectory.from_config(config)
    log.info("bringing %s to revision %s", where, revisions.get_current_head())
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def is_newest(connection: Connection, where: str, migrations: Path = MIGRATIONS) -> bool:
    """Whether there is nothing to migrate. Raises `JournalUnusable` as `migrate` does."""
    found = MigrationContext.configure(connection).get_current_heads()
    revisions = ScriptDirectory.from_config(_config(migrations))
    if unknown := set(found) - {step.revision for step in revisions.walk_revisions()}:
        raise JournalUnusable(
            f"{where} was written by a newer cellgate (its tables have revision {', '.join(sorted(unknown))}, this "
            f"one knows {revisions.get_current_head()}): run that version, or restore the file from before the upgrade"
        )
    if not found and inspect(connection).get_table_names():
        raise JournalUnusable(f"{where} belongs to another program: move it away, or name another file")
    return set(found) == set(revisions.get_heads())


def _config(migrations: Path) -> Config:
    config = Config()
    # A `%` in a path would be taken for an interpolation.
    config.set_main_option("script_location", str(migrations).replace("%", "%%"))
    return config
