"""The gateway's end of the socket a trainer cell dials: one cell at a time, one command at a time on its ranks.

A save is on the ranks only until it is captured; its outcome comes later, whatever else was sent meanwhile.

The connection is the cell's sign of life: its end of file is the cell's death, and nothing is ever sent twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from trainer_cell.protocol.commands import (
    PROTOCOL_VERSION,
    Acknowledge,
    ForgetModels,
    ModelCommand,
    SaveState,
    encode_command,
)
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.framing import FrameError, put_frame, read_frame, write_frame
from trainer_cell.protocol.outcomes import Failed, Hello, Progress, Success, decode_said

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 30.0
_READ_BUFFER_BYTES = 4 << 20
# For commands that name no deadline; and what the cell's own watchdog is given to end it first.
_PATIENCE_S = 600.0
_SLACK_S = 30.0


class CellLost(Exception):
    """The connection ended before the cell answered; whether the command took effect is not known."""


class SocketDirectoryOpen(Exception):
    """Others could reach the socket: its directory must be this user's alone."""


class _NotAdmitted(Exception):
    """Whom the link does not take, for the log."""


class _Greeting(msgspec.Struct):
    """What any version of the protocol says first."""

    protocol_version: int


class Flight:
    """One command that was sent. captured: done once the ranks are free of it; answer: its outcome."""

    def __init__(self, command_id: str, on_progress: Callable[[Progress], None] | None) -> None:
        loop = asyncio.get_running_loop()
        self.command_id = command_id
        self.captured: asyncio.Future[None] = loop.create_future()
        self.answer: asyncio.Future[Success | Failed] = loop.create_future()
        self._on_progress = on_progress

    async def outcome(self) -> Success:
        """Raises `CommandFailed` as the cell answered it, `CellLost` when the connection ends first."""
        said = await self.answer
        if isinstance(said, Failed):
            raise said.as_error()
        return said

    def hear(self, said: Progress | Success | Failed) -> None:
        if not isinstance(said, Progress):
            self.answer.set_result(said)
        elif self._on_progress is not None:
            self._on_progress(said)
        is_free = not isinstance(said, Progress) or said.phase != "capturing"
        if is_free and not self.captured.done():
            self.captured.set_result(None)

    def lose(self) -> None:
        for awaited in (self.answer, self.captured):
            if not awaited.done():
                awaited.set_exception(CellLost("the trainer cell was lost before it answered"))
                awaited.exception()  # known to whoever awaits it, if anybody does


class CellLink:
    """Listens at `socket_path`, whose directory is made 0700 if it is not there.

    hello: what the attached cell said, None while there is none; `ready` is set exactly while it is not None.
    is_barred: nothing is to be sent to whoever is attached, as if nobody were.
    on_attached / on_lost: called with the cell's hello in the event loop, at once.
    """

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.hello: Hello | None = None
        self.ready = asyncio.Event()
        self.is_barred = False
        self.on_attached: Callable[[Hello], None] = lambda hello: None
        self.on_lost: Callable[[Hello], None] = lambda hello: None
        self._server: asyncio.Server | None = None
        self._attached: asyncio.StreamWriter | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._last_refusal = ""
        self._on_ranks: Flight | None = None
        self._flights: dict[str, Flight] = {}
        self._unadopted: dict[str, Flight] = {}
        self._acknowledged: list[str] = []

    async def start(self) -> None:
        """Listen; raises `SocketDirectoryOpen`, or `OSError` when the path cannot be bound."""
        directory = self.socket_path.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise SocketDirectoryOpen(f"{directory} must belong to this user and be closed to others (mode 0700)")
        self._server = await asyncio.start_unix_server(self._serve, self.socket_path, limit=_READ_BUFFER_BYTES)

    async def close(self) -> None:
        """Stop listening and hang up; a command in flight raises `CellLost`."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._connections):
            writer.close()
        if self._server is not None:
            await self._server.wait_closed()
        self.socket_path.unlink(missing_ok=True)

    def hang_up(self) -> None:
        """End the attached cell's connection; it will dial again."""
        if self._attached is not None:
            self._attached.close()

    async def execute(self, command: ModelCommand | ForgetModels) -> Success:
        """Send one command and wait for its outcome. Not to be called while another is on the ranks.

        Raises `CommandFailed` as the cell answered it, `CellLost` when the connection ends first or there is none.
        """
        return await (await self._send(command, None)).outcome()

    async def execute_own(self, command: ModelCommand | ForgetModels) -> Success:
        """As `execute`, of a command that nobody else asked for: the cell need not remember what came of it."""
        try:
            return await self.execute(command)
        finally:
            self.acknowledge(command.command_id)

    async def capture(self, command: SaveState, on_progress: Callable[[Progress], None]) -> Flight:
        """Send a save and wait until the ranks are free of it: captured, or failed before. The outcome is the flight's.

        Not to be called while another command is on the ranks. Raises `CellLost`, or `CommandFailed` for what cannot
        be sent.
        """
        return await self._send(command, on_progress)

    def adopt(self, command_id: str) -> Flight:
        """A save that the attached cell was publishing when it said hello."""
        return self._unadopted.pop(command_id)

    def unadopted(self) -> list[Flight]:
        """The other saves that the cell was publishing; nobody asks for them any more."""
        flights = list(self._unadopted.values())
        self._unadopted.clear()
        return flights

    def acknowledge(self, command_id: str) -> None:
        """Its outcome is in the journal, or nobody's: the cell need not remember it. Sent with others, soon."""
        if not self._acknowledged:
            asyncio.get_running_loop().call_soon(self._send_acknowledged)
        self._acknowledged.append(command_id)

    def _send_acknowledged(self) -> None:
        acknowledged, self._acknowledged = tuple(self._acknowledged), []
        # A cell that is away tells them again in its hello.
        if self._attached is not None and not self._attached.is_closing():
            put_frame(self._attached, encode_command(Acknowledge(acknowledged)))

    async def _send(
        self, command: ModelCommand | ForgetModels, on_progress: Callable[[Progress], None] | None
    ) -> Flight:
        """Until the ranks are free of it."""
        writer = self._attached
        if writer is None or self.is_barred:
            raise CellLost("no trainer cell is attached")
        assert self._on_ranks is None, "one command at a time"
        flight = self._on_ranks = self._flights[command.command_id] = Flight(command.command_id, on_progress)
        patience_s = getattr(command, "deadline_s", _PATIENCE_S) + _SLACK_S
        overdue = asyncio.get_running_loop().call_later(patience_s, self._end_cell, writer, command)
        try:
            await self._write(writer, command)
            await flight.captured
        except FrameError as error:
            del self._flights[flight.command_id]
            raise CommandFailed(ErrorKind.BAD_COMMAND, f"the request is too large: {error}") from error
        finally:
            overdue.cancel()
            self._on_ranks = None
        return flight

    def _end_cell(self, writer: asyncio.StreamWriter, command: ModelCommand | ForgetModels) -> None:
        """The cell's own watchdog should have ended it by now: rank 0 is stopped, or worse. Its agent ends the rest."""
        connection = writer.get_extra_info("socket")
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        log.critical("the cell is overdue with %s %s: it is ended", type(command).__name__, command.command_id)
        if pid not in (0, os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        writer.close()

    async def _write(self, writer: asyncio.StreamWriter, command: ModelCommand | ForgetModels) -> None:
        try:
            await write_frame(writer, encode_command(command))
        except ConnectionError as error:
            log.warning("the cell hung up while it was sent a command: %s", error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            hello = await self._greet(reader)
            if hello is not None:
                await self._attend(hello, reader, writer)
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader) -> Hello | None:
        """The hello of a cell that may attach; None, with a line in the log, for every other peer."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                frame = await read_frame(reader)
            return self._admitted(frame) if frame is not None else None
        except _NotAdmitted as error:
            reason = str(error)
        except (TimeoutError, FrameError, msgspec.DecodeError) as error:
            reason = f"a connection that did not say hello: {error!r}"
        # Who is refused dials again and again: the log tells of it once.
        log.log(logging.DEBUG if reason == self._last_refusal else logging.ERROR, "refused %s", reason)
        self._last_refusal = reason
        return None

    def _admitted(self, frame: bytes) -> Hello:
        greeting = msgspec.msgpack.decode(frame, type=_Greeting)
        if greeting.protocol_version != PROTOCOL_VERSION:
            raise _NotAdmitted(f"a cell of protocol {greeting.protocol_version}: ours is {PROTOCOL_VERSION}")
        hello = decode_said(frame)
        if not isinstance(hello, Hello):
            raise _NotAdmitted(f"a connection that began with {type(hello).__name__}")
        if self.hello is not None:
            raise _NotAdmitted(f"a second cell, of epoch {hello.epoch}: that of epoch {self.hello.epoch} is attached")
        return hello

    async def _attend(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hello, self._attached = hello, writer
        for command_id in hello.publishing:
            flight = self._flights[command_id] = self._unadopted[command_id] = Flight(command_id, None)
            flight.captured.set_result(None)
        self.ready.set()
        self.on_attached(hello)
        try:
            while (frame := await read_frame(reader)) is not None:
                self._hear(frame)
        except (FrameError, msgspec.DecodeError) as error:
            log.error("the cell (epoch %s) said what it must not: %s", hello.epoch, error)
        finally:
            self._detach(hello)

    def _hear(self, frame: bytes) -> None:
        said = decode_said(frame)
        if isinstance(said, Hello):
            raise FrameError("a second hello on one connection")
        flight = self._flights.get(said.command_id)
        if flight is None:
            log.warning("%s of command %s, which is not in flight", type(said).__name__, said.command_id)
            return
        flight.hear(said)
        if not isinstance(said, Progress):
            del self._flights[said.command_id]

    def _detach(self, hello: Hello) -> None:
        self.hello = self._attached = None
        self.ready.clear()
        self.on_lost(hello)
        flights = tuple(self._flights.values())
        self._flights.clear()
        self._unadopted.clear()
        for flight in flights:
            flight.lose()
