"""A connection between a gateway and a cell, as either end knows it, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gateway.scheduling.cell_link import CellLink
from tests.gateway.scheduling.stateful.clock import Clock
from trainer_cell.protocol.outcomes import Hello

_LENGTH = 4


class CellEnd(Protocol):
    def hear(self, connection: Connection, frame: bytes) -> None: ...

    def hung_up(self, connection: Connection) -> None: ...


class Connection:
    """Frames arrive in the order in which they were sent, each a little later. What is under way when one end goes may
    still arrive at the other.

    Stands for the writer of the gateway's end too.
    """

    def __init__(
        self, clock: Clock, delay_s: Callable[[], float], cell: CellEnd, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.reader = asyncio.StreamReader(limit=1 << 30, loop=loop)
        self._clock, self._delay_s, self._cell, self._loop = clock, delay_s, cell, loop
        self._written = b""
        self._due_there = self._due_here = 0.0
        self._has_gateway = self._has_cell = True

    # The cell's end

    def say(self, frame: bytes) -> None:
        self._due_here = max(self._due_here, self._clock.now + self._delay_s())
        data = len(frame).to_bytes(_LENGTH, "big") + frame
        self._at(self._due_here, lambda: self._arrive(data))

    def end_of_cell(self, loses_all: bool) -> None:
        """The cell's end is closed. loses_all: what it said last is lost."""
        self._has_cell = False
        if loses_all:
            self._arrive = lambda data: None  # type: ignore[method-assign]
        self._at(max(self._due_here, self._clock.now), self._end_here)

    def _arrive(self, data: bytes) -> None:
        if self._has_gateway:
            self.reader.feed_data(data)

    def _end_here(self) -> None:
        if self._has_gateway:
            self.reader.feed_eof()

    # The gateway's end

    def write(self, data: bytes) -> None:
        if not self._has_gateway:
            return
        self._written += data
        while len(self._written) >= _LENGTH:
            length = int.from_bytes(self._written[:_LENGTH], "big")
            if len(self._written) < _LENGTH + length:
                return
            frame, self._written = self._written[_LENGTH:][:length], self._written[_LENGTH + length :]
            self._due_there = max(self._due_there, self._clock.now + self._delay_s())
            self._at(self._due_there, lambda frame=frame: self._arrive_there(frame))  # type: ignore[misc]

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def is_closing(self) -> bool:
        return not self._has_gateway

    def get_extra_info(self, name: str) -> Any:
        return None

    def close(self) -> None:
        """In order: the reading side sees the end of it."""
        if self._has_gateway and not self._loop.is_closed():
            self._loop.call_soon(self.reader.feed_eof)
        self.end_of_gateway()

    def end_of_gateway(self) -> None:
        if self._has_gateway:
            self._has_gateway = False
            self._at(max(self._due_there, self._clock.now), self._end_there)

    def _arrive_there(self, frame: bytes) -> None:
        if self._has_cell:
            self._cell.hear(self, frame)

    def _end_there(self) -> None:
        if self._has_cell:
            self._has_cell = False
            self._cell.hung_up(self)

    def _at(self, moment: float, event: Callable[[], None]) -> None:
        self._clock.later(max(0.0, moment - self._clock.now), event)


class SimulatedLink(CellLink):
    """is_listening: whether a cell that dials is heard. on_hello / on_hung_up: called with the epoch of each cell that
    is taken, and whose connection ended, before anybody else knows."""

    is_listening = False
    on_hello: Callable[[str], None]
    on_hung_up: Callable[[str], None]

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.is_listening = True

    async def close(self) -> None:
        self.is_listening = False
        for connection in tuple(self._connections):
            connection.close()

    def take(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        task = loop.create_task(self._serve(connection.reader, connection))  # type: ignore[arg-type]
        self._tasks.append(task)

    async def _attend(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.on_hello(hello.epoch)
        await super()._attend(hello, reader, writer)

    def _detach(self, hello: Hello) -> None:
        self.on_hung_up(hello.epoch)
        super()._detach(hello)
