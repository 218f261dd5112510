"""A proxy between the SDK and the gateway that loses connections and repeats requests, by a seeded plan.

It reads whole HTTP/1.1 messages by their Content-Length, which is all that the SDK and the gateway send.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_START_S = 10.0
# What a server that is dying, starting or gone does to a connection.
_LOST = (OSError, asyncio.IncompleteReadError)


class Fault(Enum):
    BEFORE = "the connection is lost before the request is sent on"
    AFTER = "the request is sent on and takes effect, and the answer is lost"
    MIDDLE = "the connection is lost in the middle of the answer"
    TWICE = "the request is sent twice at once"
    LATE = "the request is sent again after the next one was answered"


RATES: Mapping[Fault, float] = dict.fromkeys(Fault, 0.015)


class FaultPlan:
    """One draw for each request: a fault, each with the probability `rates` gives, or none."""

    def __init__(self, seed: object, rates: Mapping[Fault, float] = RATES) -> None:
        self._random = random.Random(f"faults/{seed}")
        self._rates = rates

    def next(self) -> Fault | None:
        drawn = self._random.random()
        for fault, rate in self._rates.items():
            drawn -= rate
            if drawn < 0:
                return fault
        return None

    def part_of(self, answer: bytes) -> bytes:
        """Some of it, at least one byte and never all."""
        return answer[: self._random.randrange(1, len(answer))]


class Proxy:
    """Listens at `url` while it is entered, in a thread of its own. `target`: the gateway's URL, may be changed.

    counts: faults that happened. disagreements: repeated requests that were accepted as two different ones.
    """

    def __init__(self, target: str, plan: FaultPlan) -> None:
        self.target = target
        self.counts: Counter[Fault] = Counter()
        self.disagreements: list[str] = []
        self.url = ""
        self._plan = plan
        self._late: list[tuple[bytes, bytes]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._is_listening = threading.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._listen()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_listening.wait(_START_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_listening.set()
        await self._over.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(await read_message(reader), writer):
                pass
        except _LOST:
            pass  # either side has gone, and the other learns it by our going too
        except asyncio.CancelledError:
            pass  # the proxy ends; a task that its server knows of may not end as cancelled
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _exchange(self, request: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        fault = self._plan.next()
        if fault is not None:
            self.counts[fault] += 1
        if fault is Fault.BEFORE:
            return False
        if fault is Fault.TWICE:
            answer, other = await asyncio.gather(self._ask(request), self._ask(request))
            self._compare(request, answer, other)
        else:
            answer = await self._ask(request)
        if fault is Fault.AFTER:
            return False
        if fault is Fault.MIDDLE:
            writer.write(self._plan.part_of(answer))
            await writer.drain()
            return False
        writer.write(answer)
        await writer.drain()
        late, self._late = self._late, [(request, answer)] if fault is Fault.LATE else []
        for repeated, first in late:
            self._in_background(repeated, first)
        return True

    def _in_background(self, request: bytes, first: bytes) -> None:
        task = self._loop.create_task(self._ask_again(request, first))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_again(self, request: bytes, first: bytes) -> None:
        try:
            self._compare(request, first, await self._ask(request))
        except _LOST:
            return  # repeated into a gateway that has just gone: nothing to compare

    async def _ask(self, request: bytes) -> bytes:
        """A connection of its own for each request: one that is kept would outlive the gateway it was made to."""
        where = urlsplit(self.target)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            writer.write(request)
            return await read_message(reader)
        finally:
            writer.transport.abort()

    def _compare(self, request: bytes, one: bytes, other: bytes) -> None:
        ids = request_id_of(one), request_id_of(other)
        if None not in ids and ids[0] != ids[1]:
            self.disagreements.append(f"{request.split(maxsplit=2)[1].decode()}: {ids[0]} and {ids[1]}")


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Head and body as they came; raises `IncompleteReadError` when the other side hangs up before the end."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower(), head
    length = _LENGTH.search(head)
    return head + await reader.readexactly(int(length[1]) if length else 0)


def request_id_of(answer: bytes) -> str | None:
    """Of a request that was accepted, from the HTTP answer to it; None for any other answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split(maxsplit=2)[1] != b"200" or b"application/json" not in head:
        return None
    said = json.loads(body)
    # Polls that found nothing yet name their request too.
    return said.get("request_id") if isinstance(said, dict) and "type" not in said else None
