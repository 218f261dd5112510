"""The journal of a service that is down, as a command line reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, make_url
from sqlalchemy.exc import DBAPIError

from gateway.store.database import check, describe, lock_file, reading_engine, release
from gateway.store.errors import JournalUnavailable, JournalUnusable
from gateway.store.migration import is_newest
from gateway.store.reader import Reader
from gateway.store.records import Stored


@contextmanager
def read_shut(url: str) -> Iterator[Stored]:
    """All it holds; nothing is written. Until the end of the block no gateway can open it.

    Raises `JournalInUse` while one has it, and `JournalUnusable`.
    """
    address = make_url(url)
    where = describe(address)
    lock = lock_file(address)
    try:
        yield _read(reading_engine(address), where)
    finally:
        release(lock)


def _read(engine: Engine, where: str) -> Stored:
    try:
        with engine.begin() as connection:
            check(connection, where)
            if not is_newest(connection, where):
                raise JournalUnusable(f"{where} was written by an older cellgate: start the service once")
        reader = Reader(engine, where)
        try:
            return reader.load()
        finally:
            reader.disconnect()
    except DBAPIError as error:
        raise JournalUnusable(
            f"{where} cannot be read: {error.orig}. It tells which checkpoints models still need: restore it from a "
            "backup, or move it away to go on without what it holds"
        ) from error
    except JournalUnavailable as error:
        raise JournalUnusable(str(error)) from error
    finally:
        engine.dispose()
