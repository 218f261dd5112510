"""What is opened: a new file, an older one, a newer one, a damaged one, one that is in use."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, create_engine, make_url, select

from gateway.store.database import new_engine
from gateway.store.journal import Journal, JournalUnusable
from gateway.store.migration import MIGRATIONS, migrate
from gateway.store.tables import commands, metadata
from tests.gateway.store.rows import a_command, a_model, url_of, writing

NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "of the future"
down_revision = "{newest}"


def upgrade():
    op.add_column("commands", sa.Column("colour", sa.String, server_default="blue"))
    op.create_table("later", sa.Column("name", sa.String, primary_key=True))
    {more}
"""


def with_a_next_step(tmp_path: Path, more: str = "") -> Path:
    migrations = tmp_path / "100% migrations"
    shutil.copytree(MIGRATIONS, migrations, ignore=shutil.ignore_patterns("__pycache__"))
    (migrations / "versions/future.py").write_text(NEXT.format(newest="1", more=more))
    return migrations


def upgrade(directory: Path, migrations: Path) -> None:
    engine = new_engine(make_url(url_of(directory)))
    try:
        with engine.begin() as connection:
            migrate(connection, "the journal", migrations)
    finally:
        engine.dispose()


async def filled(directory: Path) -> None:
    async with writing(directory) as journal:
        await journal.accept(a_command(0), a_model())
        await journal.complete(a_command(0), 0)


def test_a_new_file_has_the_tables_that_the_code_names(tmp_path: Path) -> None:
    upgrade(tmp_path, MIGRATIONS)
    engine = create_engine(url_of(tmp_path))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata) == []
    engine.dispose()


async def test_an_older_file_is_brought_up_with_what_it_holds(tmp_path: Path) -> None:
    await filled(tmp_path)
    upgrade(tmp_path, with_a_next_step(tmp_path))
    with sqlite3.connect(tmp_path / "journal.sqlite3") as connection:
        assert connection.execute("SELECT request_id, colour FROM commands").fetchall() == [
            (a_command(0).request_id, "blue")
        ]
    connection.close()


async def test_a_step_that_fails_half_way_leaves_the_older_file(tmp_path: Path) -> None:
    await filled(tmp_path)
    with pytest.raises(ZeroDivisionError):
        upgrade(tmp_path, with_a_next_step(tmp_path, more="1 / 0"))
    async with writing(tmp_path) as journal:
        assert len(journal.journal.load().commands) == 1
        assert "later" not in tables(tmp_path)


def tables(directory: Path) -> set[str]:
    engine = create_engine(url_of(directory))
    with engine.connect() as connection:
        found = {name for (name,) in connection.exec_driver_sql("SELECT name FROM sqlite_master")}
    engine.dispose()
    return found


async def test_a_newer_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    await filled(tmp_path)
    upgrade(tmp_path, with_a_next_step(tmp_path))
    for _ in range(2):
        with pytest.raises(JournalUnusable, match=r"journal\.sqlite3 was written by a newer cellgate.*of the future"):
            Journal.open(url_of(tmp_path))
    assert "later" in tables(tmp_path)


async def test_a_second_journal_on_a_file_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    async with writing(tmp_path) as journal:
        for _ in range(2):
            with pytest.raises(JournalUnusable, match=r"journal\.sqlite3 is in use by another gateway"):
                Journal.open(url_of(tmp_path))
        await journal.accept(a_command(0), a_model())
    async with writing(tmp_path) as journal:
        assert len(journal.journal.load().commands) == 1


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite3").write_bytes(b"not a database at all" * 500)
    with pytest.raises(JournalUnusable, match=r"journal\.sqlite3 cannot be opened"):
        Journal.open(url_of(tmp_path))


def test_another_programs_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "journal.sqlite3") as connection:
        connection.execute("CREATE TABLE theirs (name TEXT)")
    connection.close()
    with pytest.raises(JournalUnusable, match="belongs to another program"):
        Journal.open(url_of(tmp_path))
    assert tables(tmp_path) == {"theirs"}


def test_a_directory_that_is_not_there_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(JournalUnusable, match="nowhere"):
        Journal.open(url_of(tmp_path / "nowhere"))


def test_a_refused_file_can_be_opened_once_it_is_mended(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite3").write_bytes(b"not a database at all" * 500)
    with pytest.raises(JournalUnusable):
        Journal.open(url_of(tmp_path))
    os.truncate(tmp_path / "journal.sqlite3", 0)
    engine = new_engine(make_url(url_of(tmp_path)))
    with engine.begin() as connection:
        migrate(connection, "the journal")
        assert _count(connection) == 0
    engine.dispose()


def _count(connection: Connection) -> int:
    return len(connection.execute(select(commands)).all())
