"""A fake cell's end of the socket: what was said is remembered as a real cell's link does it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer_cell.outcome_book import OutcomeBook
from trainer_cell.protocol.framing import send_frame
from trainer_cell.protocol.outcomes import Hello, Said, encode_said


class FakeLink:
    """check_alive: raises what ends the thread of a cell that was killed."""

    def __init__(self, path: Path, check_alive: Callable[[], None]) -> None:
        self._path, self._check_alive = path, check_alive
        self._book = OutcomeBook()
        # Over the book and the connection together, as in a real cell's link.
        self._saying = threading.Lock()
        self._connection: socket.socket | None = None

    @contextmanager
    def dialled(self, hello: Callable[[], Hello]) -> Iterator[socket.socket]:
        """A connection over which the hello was said. Raises `OSError`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(str(self._path))
                with self._saying:
                    # Before the look whether the cell lives, so that who kills it finds it.
                    self._connection = connection
                    self._check_alive()
                    send_frame(connection, encode_said(self._book.told_in(hello())))
                yield connection
            finally:
                with self._saying:
                    self._connection = None

    def shut_down(self) -> None:
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def is_to_run(self, frame: bytes) -> bool:
        """False for a command that is known: it is answered here, as far as it has been."""
        with self._saying:
            receipt = self._book.receive(frame)
            if receipt.answer is not None:
                self._send(receipt.answer)
        return receipt.is_to_run

    def say(self, said: Said) -> None:
        self._check_alive()
        with self._saying:
            self._book.note(said)
            self._send(said)

    def _send(self, said: Said) -> None:
        """A connection that broke is noticed by who reads it."""
        if self._connection is not None:
            with suppress(OSError):
                send_frame(self._connection, encode_said(said))
