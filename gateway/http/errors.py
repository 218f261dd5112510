"""One table from refusals to statuses, and the answers to everything else that goes wrong.

A refusal's body is `{"type": ..., "detail": ...}`. What a client does with each status decides the choice: the SDK
retries 408, 409, 429 and 5xx of a submit for five minutes, so a permanent refusal is 404 or 422, never 409.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.scheduling.errors import (
    CheckpointPinned,
    CheckpointUnreadable,
    ImportNotAllowed,
    InvalidRequest,
    NotFound,
    QueueFull,
    Refused,
    SequenceConflict,
    Stopping,
    Unavailable,
)
from trainer_cell.vault.errors import VaultError

log = logging.getLogger(__name__)


class Unauthorized(Refused):
    """No key, or one that belongs to nobody."""


class BodyTooLarge(Refused):
    """The body, as sent or as decompressed, is over the limit."""


class UnsupportedBody(Refused):
    """The body has a content type or an encoding this route does not read."""


class ErrorBody(BaseModel):
    """What every refusal looks like."""

    type: str = Field(description="What kind of refusal this is; stable, for programs.", examples=["not_found"])
    detail: str = Field(description="What is wrong; for people.", examples=["no model 'a:train:0'"])


class _Answer(NamedTuple):
    status: int
    type: str
    retry_after_s: int | None = None


_ANSWERS: dict[type[Refused], _Answer] = {
    Unauthorized: _Answer(401, "unauthorized"),
    ImportNotAllowed: _Answer(403, "import_not_allowed"),
    NotFound: _Answer(404, "not_found"),
    BodyTooLarge: _Answer(413, "body_too_large"),
    UnsupportedBody: _Answer(415, "unsupported_body"),
    InvalidRequest: _Answer(422, "invalid_request"),
    CheckpointPinned: _Answer(422, "checkpoint_pinned"),
    CheckpointUnreadable: _Answer(422, "checkpoint_unreadable"),
    SequenceConflict: _Answer(422, "sequence_conflict"),
    QueueFull: _Answer(429, "queue_full", retry_after_s=2),
    Stopping: _Answer(503, "stopping", retry_after_s=5),
    Unavailable: _Answer(503, "journal_unavailable", retry_after_s=5),
}
# Details name what was asked for, which may be long.
_MAX_DETAIL_CHARS = 500
_TYPES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed"}


def _answer_for(refused: Refused) -> _Answer:
    for kind in type(refused).__mro__:
        if kind in _ANSWERS:
            return _ANSWERS[kind]
    raise AssertionError(f"{type(refused).__name__} is not in the table")


def answer(refused: Refused) -> JSONResponse:
    """The response that tells a refusal."""
    status, kind, retry_after_s = _answer_for(refused)
    response = _error(status, kind, refused.message)
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(retry_after_s)
    if status == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="cellgate"'
    return response


def back_off(seconds: int) -> JSONResponse:
    """What a poll gets while the gateway stops: the SDK backs off on 429, but asks again at once on 408 and 503."""
    response = _error(429, "stopping", "the gateway is going down: ask again later")
    response.headers["Retry-After"] = str(seconds)
    return response


def _error(status: int, kind: str, detail: str) -> JSONResponse:
    return JSONResponse(ErrorBody(type=kind, detail=detail[:_MAX_DETAIL_CHARS]).model_dump(), status)


async def on_refused(request: Request, refused: Exception) -> JSONResponse:
    assert isinstance(refused, Refused)
    return answer(refused)


async def on_storage_failed(request: Request, error: Exception) -> JSONResponse:
    """The disk failed under a listing or a deletion: the one 5xx with a cause outside this program."""
    assert isinstance(error, VaultError)
    log.error("%s %s: %s", request.method, request.url.path, error)
    return _error(500, "storage_failed", str(error))


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Unknown routes and methods, as the router raises them."""
    assert isinstance(error, HTTPException)
    response = _error(error.status_code, _TYPES.get(error.status_code, "refused"), str(error.detail))
    response.headers.update(error.headers or {})
    return response


async def on_invalid_parameters(request: Request, error: Exception) -> JSONResponse:
    """Query, path and header parameters; bodies are read by `gateway.http.bodies`."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    return answer(InvalidRequest(f"{name}: {first['msg']}"))


class LastResort:
    """Outermost: a bug in a route is one 500 with a JSON body, and a traceback in the log alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            log.info("a client hung up in the middle of its body: %s %s", scope.get("method"), scope.get("path"))
        except Exception:
            log.exception("a request failed unexpectedly: %s %s", scope.get("method"), scope.get("path"))
            if scope["type"] != "http" or started:
                raise
            await _error(500, "internal", "the gateway failed on this request; see its log")(scope, receive, send)
