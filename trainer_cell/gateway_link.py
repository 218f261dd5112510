"""Rank 0's end of the socket to the gateway: dial, say hello, take frames, answer; dial again when it is gone.

The connection is the sign of life in both directions. A gateway that restarts costs the cell nothing but the dial: what
was said meanwhile is told with the hello, and a command that comes again is answered, not run.
"""

from __future__ import annotations

import logging
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer_cell.outcome_book import OutcomeBook
from trainer_cell.protocol.framing import FrameError, receive_frame, send_frame
from trainer_cell.protocol.outcomes import Hello, Said, encode_said

log = logging.getLogger(__name__)

TICK_S = 30.0
_REDIAL_S = 0.2


class GatewayLink:
    """A blocking connection of rank 0. `hello` is called at each dial, so that it tells the state of that moment; what
    was said and not acknowledged is added here.

    One thread takes frames; any may say something.
    """

    def __init__(self, socket_path: Path, hello: Callable[[], Hello]) -> None:
        self._path = socket_path
        self._hello = hello
        self._connection: socket.socket | None = None
        # Over the book and the connection together: an outcome is in a hello, or is said after it, or both.
        self._saying = threading.Lock()
        self._book = OutcomeBook()
        self._stop_reader, stop_writer = socket.socketpair()
        stop_writer.setblocking(False)
        self._stop_writer = stop_writer
        self.is_stopping = False

    def stop_on_signal(self, number: int) -> None:
        """From now on this signal makes `next_frame` return None for good, after the command in hand."""
        signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self.is_stopping = True
        self._stop_writer.send(b"x")

    def next_frame(self) -> bytes | None:
        """The next command to be run; None when there is none for `TICK_S`, or when `is_stopping`."""
        deadline = time.monotonic() + TICK_S
        while not self.is_stopping:
            wait_s = deadline - time.monotonic()
            if wait_s <= 0:
                return None
            if self._connection is None and not self._dial():
                self._wait_for([], min(wait_s, _REDIAL_S))
                continue
            assert self._connection is not None
            if not self._wait_for([self._connection], wait_s):
                continue
            frame = self._receive()
            if frame is not None and self._is_to_run(frame):
                return frame
        return None

    def say(self, said: Said) -> None:
        """Tell the gateway, if it is there; the next hello tells of an outcome that it has not acknowledged."""
        frame = encode_said(said)
        with self._saying:
            self._book.note(said)
            self._send(frame)

    def close(self) -> None:
        self._hang_up()

    def _is_to_run(self, frame: bytes) -> bool:
        with self._saying:
            receipt = self._book.receive(frame)
            if receipt.answer is not None:
                self._send(encode_said(receipt.answer))
        return receipt.is_to_run

    def _send(self, frame: bytes) -> None:
        if self._connection is None:
            return
        try:
            send_frame(self._connection, frame)
        except OSError:
            # Hanging up is for the thread that waits for frames: it sees the end of the connection now.
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> bytes | None:
        assert self._connection is not None
        try:
            frame = receive_frame(self._connection)
        except (OSError, FrameError) as error:
            log.warning("connection to the gateway failed: %s", error)
            frame = None
        if frame is None:
            log.warning("the gateway hung up; dialling again")
            self._hang_up()
        return frame

    def _wait_for(self, readers: list[socket.socket], timeout_s: float) -> bool:
        """True when one of `readers` has something; a stop request ends the wait at once."""
        ready, _, _ = select.select([*readers, self._stop_reader], [], [], timeout_s)
        return any(one in ready for one in readers)

    def _dial(self) -> bool:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self._path))
            with self._saying:
                send_frame(connection, encode_said(self._book.told_in(self._hello())))
                self._connection = connection
        except OSError:
            connection.close()
            return False
        return True

    def _hang_up(self) -> None:
        connection = self._connection
        if connection is not None:
            with self._saying:
                self._connection = None
            connection.close()
