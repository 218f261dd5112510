"""retrieve_future: the long poll.

Not done yet is 408 with the state of the queue: the SDK asks again at once, so the answer is held for a while. Done is
200, a failure too; the SDK takes any 4xx of this route for a broken server. While the gateway stops it is 429, on which
the SDK backs off. An answer counts as told when it was sent whole to a client that was still there; it stays readable.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from gateway.http import wire
from gateway.http.bodies import PROTOBUF, json_of, read
from gateway.http.context import Gateway, GatewayOf, TenantOf
from gateway.http.describe import json_body, refusals
from gateway.http.errors import back_off
from gateway.http.results import sdk_response
from gateway.scheduling.futures import Future

router = APIRouter(prefix="/api/v1", tags=["SDK: futures"])


@router.post(
    "/retrieve_future",
    openapi_extra=json_body(wire.RetrieveFuture),
    responses=refusals(404, 408, 429),
    response_class=Response,
)
async def retrieve_future(request: Request, gateway: GatewayOf, tenant: TenantOf) -> Response:
    body = read(wire.RetrieveFuture, await json_of(request))
    future = gateway.scheduler.futures.get(tenant, body.request_id)
    await wait_for(future, gateway.limits.poll_s, gateway, request)
    if future.is_done:
        accepts_protobuf = PROTOBUF in request.headers.get("accept", "")
        return Telling(await sdk_response(future, accepts_protobuf), future, gateway)
    if gateway.is_stopping:
        return back_off(gateway.limits.retry_after_s)
    return _try_again(future, gateway)


def _try_again(future: Future, gateway: Gateway) -> JSONResponse:
    body = {"type": "try_again", "request_id": future.request_id, "queue_state": "active"}
    if not gateway.scheduler.is_ready:
        body |= {"queue_state": "paused_capacity", "queue_state_reason": "waiting for a trainer cell"}
    elif future.waiting_for is not None:
        body |= {"queue_state": "paused_capacity", "queue_state_reason": future.waiting_for}
    elif future.progress is not None:
        body["queue_state_reason"] = _progress_of(future, *future.progress)
    return JSONResponse(body, 408)


def _progress_of(future: Future, bytes_done: int, bytes_total: int) -> str:
    """Of a save, for people."""
    if bytes_total == 0:
        return future.state
    return f"{future.state}: {bytes_done / 1e6:.1f} of {bytes_total / 1e6:.1f} MB"


async def wait_for(future: Future, timeout_s: float, gateway: Gateway, request: Request) -> None:
    """Until it is done, the time is over, the gateway stops or the client hangs up."""
    if future.is_done or gateway.is_stopping or timeout_s <= 0:
        return
    waits = {
        asyncio.create_task(future.wait(timeout_s)),
        asyncio.create_task(gateway.stopping.wait()),
        asyncio.create_task(_hung_up(request)),
    }
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Telling(Response):
    """An answer that marks its future told, unless the client is known to have hung up before it was sent whole."""

    def __init__(self, response: Response, future: Future, gateway: Gateway) -> None:
        super().__init__(response.body, response.status_code, dict(response.headers))
        self._future = future
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        # Asked before the last message: after it, servers report every client as gone.
        is_gone = await _is_gone(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if not is_gone:
            self._gateway.scheduler.futures.mark_told(self._future)


async def _is_gone(receive: Receive) -> bool:
    """Whether the client had hung up, as far as is known now."""
    message = asyncio.create_task(_next(receive))
    await asyncio.sleep(0)
    if message.done():
        return bool(message.result()["type"] == "http.disconnect")
    message.cancel()
    return False


async def _next(receive: Receive) -> Message:
    return await receive()
