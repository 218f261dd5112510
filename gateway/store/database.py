"""Opening the database. What only SQLite has stands here and nowhere else.

STATE/journal.sqlite3        0600; beside it, with the same mode, SQLite's own -wal and -shm
STATE/journal.sqlite3.lock   0600, held by the one journal that is open on the file
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from gateway.store.errors import JournalInUse, JournalUnusable

# SQLite's smallest page. It takes a file that is shorter for an empty one.
_SHORTEST_FILE = 512

_PAGE_BYTES = 8192
# The write-ahead log is carried over into the file when it has grown to this, and cut back to twice this after a burst.
_LOG_BYTES = 32 << 20
_PRAGMAS = (
    # Of a file that is new. Arrays of some megabytes want long pages, the rows of commands short ones.
    f"page_size={_PAGE_BYTES}",
    # Milliseconds. Another process may look into the file: it is waited for so long before a write counts as failed.
    "busy_timeout=5000",
    "journal_mode=WAL",
    # Every commit is synced. NORMAL would sync at checkpoints only.
    "synchronous=FULL",
    f"wal_autocheckpoint={_LOG_BYTES // _PAGE_BYTES}",
    f"journal_size_limit={2 * _LOG_BYTES}",
)


def describe(url: URL) -> str:
    """How to name the database to people; without a password."""
    if url.database is not None and url.get_backend_name() == "sqlite":
        return f"the journal {url.database}"
    return f"the journal {url.render_as_string(hide_password=True)}"


def lock_file(url: URL) -> int | None:
    """The descriptor that holds the database for this journal alone, or None where the database is no file.

    On a file of its own: SQLite's locks on the database would go with the first descriptor of it that anybody here
    closes. Raises `JournalInUse` where another journal has it.
    """
    if url.get_backend_name() != "sqlite":
        return None
    assert url.database, "a journal in memory would be no journal"
    path = Path(f"{url.database}.lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalUnusable(f"{describe(url)}: {error.strerror} ({path})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EWOULDBLOCK:
            raise JournalUnusable(f"{describe(url)} cannot be locked: {error.strerror} ({path})") from error
        raise JournalInUse(
            f"{describe(url)} is in use by another gateway: end that one first, or give this one a state of its own"
        ) from error
    return descriptor


def new_engine(url: URL) -> Engine:
    """Makes the file, where there is one and it is not there. Connects only when asked to."""
    if url.get_backend_name() != "sqlite":
        return create_engine(url)
    assert url.database
    _create_file(Path(url.database))
    # The journal decides itself when a connection is opened anew.
    engine = create_engine(url, poolclass=QueuePool, pool_size=2, connect_args={"check_same_thread": False})
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def reading_engine(url: URL) -> Engine:
    """Of a database that is there and that nobody writes to; writes nothing, so that a full disk is no matter."""
    if url.get_backend_name() != "sqlite":
        return create_engine(url)
    # Without a log SQLite would make one before it reads; of one that is there it would write the index anew.
    has_log = Path(f"{url.database}-wal").exists()
    name = f"file:{quote(str(url.database))}?{'mode=ro&readonly_shm=1' if has_log else 'immutable=1'}"
    return create_engine(url, creator=lambda: sqlite3.connect(name, uri=True, check_same_thread=False))


def release(lock: int | None) -> None:
    """What `lock_file` gave."""
    if lock is not None:
        # Whatever it says, the descriptor is gone, and the lock with it.
        with suppress(OSError):
            os.close(lock)


def is_out_of_room(error: DBAPIError) -> bool:
    """Whether room may be all that is wanted: SQLite calls an exceeded quota a failed write."""
    room = ("SQLITE_FULL", "SQLITE_IOERR_WRITE")
    return isinstance(error.orig, sqlite3.Error) and error.orig.sqlite_errorname in room


def _create_file(path: Path) -> None:
    """SQLite would make it by the umask. Its directory entry is made durable by SQLite, with the log's."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        size = path.stat().st_size
    except OSError as error:
        raise JournalUnusable(f"the journal {path}: {error.strerror}") from error
    if 0 < size < _SHORTEST_FILE:
        raise JournalUnusable(f"the journal {path} was cut to {size} bytes: restore it from a backup, or move it away")


def _prepare(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    # The driver would begin transactions when it likes, and none before a change of tables.
    connection.isolation_level = None
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def check(connection: Connection, where: str) -> None:
    """Reads all of an SQLite file, about a second for each gigabyte; raises `JournalUnusable` if it is damaged."""
    if connection.dialect.name != "sqlite":
        return
    found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if found != "ok":
        raise JournalUnusable(
            f"{where} is damaged ({found}): restore it from a backup, or move it away to start without what it holds"
        )
