"""The service's own directory: who may use it, its API key, its socket, and the pids of what runs.

STATE/            0700
  api_key         0600, `KEY=TENANT`, made at the first start that was given no key
  tenant_secret   0600, 32 random bytes: what the owners named in manifests are digested with
  journal.sqlite3 0600, sessions, models and accepted commands; beside it -wal, -shm and .lock
  checkpoints/    the checkpoint root, unless it is elsewhere
  run/            0700
    lock          held by the one `cellgate serve` of this state
    cell.sock     the socket the trainer cell dials, unless the path is too long for one
    pids.json     {"supervisor": …, "gateway": …, "cell": …}
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gateway.settings import split_api_key

# `sun_path` holds 108 bytes on Linux, the final zero among them.
_LONGEST_SOCKET_PATH = 107
DEFAULT_TENANT = "default"


class StateUnusable(Exception):
    """The state directory cannot serve; the message says why and names the path."""


class StateDirectory:
    """One service's state; `create()` comes first, everything else assumes it was called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path / "run"
        self._lock: int | None = None

    def create(self) -> None:
        """Make the directories, closed to others; raises `StateUnusable`."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.run.mkdir(mode=0o700, exist_ok=True)
            self.run.chmod(0o700)
        except OSError as error:
            raise StateUnusable(f"state directory {self.path}: {error.strerror} ({error.filename})") from error

    def lock(self) -> None:
        """Hold the state for this process, as long as it lives; raises `StateUnusable` when another one does."""
        descriptor = os.open(self.run / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StateUnusable(f"another cellgate serves from {self.path}") from None
        self._lock = descriptor

    def generated_key(self) -> tuple[dict[str, str], bool]:
        """The key of a service that was given none, as {key: tenant}, and whether this call made it."""
        place = self.path / "api_key"
        if fresh := not place.exists():
            self._replace(place, f"tml-{secrets.token_urlsafe(32)}={DEFAULT_TENANT}\n".encode())
        try:
            key, tenant = split_api_key(place.read_text())
        except ValueError as error:
            raise StateUnusable(f"{place}: {error}") from error
        return {key: tenant}, fresh

    def tenant_secret(self) -> bytes:
        """Made at the first call. Without it the owners of the checkpoints are not to be told any more."""
        place = self.path / "tenant_secret"
        if not place.exists():
            self._replace(place, secrets.token_bytes(32))
        return place.read_bytes()

    def journal_url(self) -> str:
        """As SQLAlchemy has it."""
        return f"sqlite:///{self.journal_path()}"

    def journal_path(self) -> Path:
        return self.path / "journal.sqlite3"

    def socket_path(self) -> Path:
        """Where the cell dials in: always the same for one state, in a directory of this user's own, 0700."""
        path = self.run / "cell.sock"
        if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
            return path
        return self._short_directory() / "cell.sock"

    def write_pids(self, pids: Mapping[str, int]) -> None:
        """Raises `OSError`; nothing is told then, rather than what was."""
        place = self.run / "pids.json"
        try:
            self._replace(place, json.dumps(pids).encode())
        except OSError:
            place.unlink(missing_ok=True)
            raise

    def clear_run(self) -> None:
        """Remove what says that something runs here."""
        (self.run / "pids.json").unlink(missing_ok=True)
        self.socket_path().unlink(missing_ok=True)

    def _short_directory(self) -> Path:
        digest = hashlib.blake2b(os.fsencode(self.path), digest_size=8).hexdigest()
        parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        directory = parent / f"cellgate-{os.geteuid()}-{digest}"
        directory.mkdir(mode=0o700, exist_ok=True)
        # The parent may be open to everyone: a directory another user laid there first must not get our socket.
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise StateUnusable(f"{directory} is not a directory of this user's alone")
        return directory

    def _replace(self, place: Path, content: bytes) -> None:
        """Write atomically and durably, readable by this user alone."""
        descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(place)
        except OSError as error:
            Path(temporary).unlink(missing_ok=True)
            error.filename = error.filename or str(place)
            raise
