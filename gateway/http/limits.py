"""How much a request may be and how long it may wait, and the middleware that holds bodies to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import BodyTooLarge, answer
from gateway.scheduling.errors import InvalidRequest, Refused

# After an early answer a little more of the body is read and dropped, so that the client sees the answer and not a
# connection reset by bytes nobody read.
_LINGER_BYTES = 16 << 20
_LINGER_S = 2.0
_MAX_LENGTH_DIGITS = 18


@dataclass(frozen=True)
class Limits:
    """max_body_bytes: of a body, as sent and as decompressed. poll_s: how long retrieve_future waits for a result; the
    SDK gives up after 45 s. max_wait_s: the longest `wait` of GET /v1/operations/{id}. retry_after_s: told to polls
    while the gateway stops. stop_grace_s: how long what runs may take to finish then."""

    max_body_bytes: int = 64 << 20
    poll_s: float = 30.0
    max_wait_s: float = 60.0
    retry_after_s: int = 5
    stop_grace_s: float = 20.0


async def refuse(refused: Refused, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer before the body is read, then close the connection."""
    await answer(refused)(scope, receive, _then_linger(receive, send))


def _then_linger(receive: Receive, send: Send) -> Send:
    async def lingering_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        if message["type"] != "http.response.body" or message.get("more_body", False):
            await send(message)
            return
        await send({**message, "more_body": True})
        await _drop_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return lingering_send


async def _drop_body(receive: Receive) -> None:
    dropped = 0
    try:
        async with asyncio.timeout(_LINGER_S):
            while dropped < _LINGER_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


class BodyLimit:
    """Refuses a body over the limit: by its Content-Length before a byte is read, else as soon as it has come."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > _MAX_LENGTH_DIGITS:
            await refuse(InvalidRequest("Content-Length makes no sense"), scope, receive, send)
        elif int(declared) > self._max_body_bytes:
            await refuse(self._too_large(), scope, receive, send)
        else:
            await self._count(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0
        over = False

        async def counted_receive() -> Message:
            nonlocal received, over
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                over = True
                raise self._too_large()
            return message

        async def told_send(message: Message) -> None:
            await (_then_linger(receive, send) if over else send)(message)

        await self._app(scope, counted_receive, told_send)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is over the limit of {self._max_body_bytes} bytes")
