"""Reading bodies. They are read from bytes by models of our own, which ignore fields they do not know.

The SDK adds request fields with every release, so its own (strict) request classes must never be used here. Reading by
hand, and not through FastAPI's parameters, is what lets a request with a wrong content still spend its number.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import zstandard
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.requests import Request

from gateway.http.errors import BodyTooLarge, UnsupportedBody
from gateway.scheduling.errors import InvalidRequest

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

# JSON carries no arrays here, and is read in the event loop.
MAX_JSON_BYTES = 4 << 20
_MAX_MESSAGE_CHARS = 500
_MAX_PROBLEMS = 3
# A frame's window is memory; the SDK's frames need 8 MiB at the very most.
_MAX_WINDOW_BYTES = 32 << 20
# A zstd block of 4 bytes can stand for 128 KiB: little by little, no step can make more than 16 MiB.
_ZSTD_STEP_BYTES = 512
_THREAD_FROM_BYTES = 1 << 20

_object = TypeAdapter(dict[str, Any])


class Body(BaseModel):
    """A JSON object; types are not bent (`"1"` is no number, `1` no boolean), unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


BodyT = TypeVar("BodyT", bound=BaseModel)


async def json_of(request: Request) -> bytes:
    """The raw body of a JSON route. No content type is taken for JSON; any other, or an encoding, is refused."""
    content_type = _content_type(request)
    if content_type not in ("", JSON):
        raise UnsupportedBody(f"the body is {content_type!r}: this route reads {JSON}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedBody("this route reads no encoded bodies")
    raw = await request.body()
    if len(raw) > MAX_JSON_BYTES:
        raise BodyTooLarge(f"a JSON body may have {MAX_JSON_BYTES} bytes")
    return raw


async def protobuf_of(request: Request, max_body_bytes: int) -> bytes:
    """The body of a protobuf route, decompressed; raises `UnsupportedBody`, `BodyTooLarge` and `InvalidRequest`."""
    content_type = _content_type(request)
    if content_type != PROTOBUF:
        raise UnsupportedBody(f"the body is {content_type or 'of no type'!r}: this route reads {PROTOBUF} only")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "zstd"):
        raise UnsupportedBody(f"unknown Content-Encoding {encoding!r}: zstd is read")
    raw = await request.body()
    if encoding == "identity":
        return raw
    return await asyncio.to_thread(decompress, raw, max_body_bytes)


def is_big(raw: bytes) -> bool:
    """Whether decoding this would hold up the event loop for longer than a thread costs."""
    return len(raw) >= _THREAD_FROM_BYTES


def decompress(raw: bytes, max_body_bytes: int) -> bytes:
    """One whole zstd frame; raises `BodyTooLarge` as soon as it passes the limit, `InvalidRequest` for other faults."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
    pieces: list[bytes] = []
    size = 0
    try:
        for begin in range(0, len(raw), _ZSTD_STEP_BYTES):
            pieces.append(decompressor.decompress(raw[begin : begin + _ZSTD_STEP_BYTES]))
            size += len(pieces[-1])
            if size > max_body_bytes:
                raise BodyTooLarge(f"the decompressed body is over the limit of {max_body_bytes} bytes")
            if decompressor.eof:
                break
    except zstandard.ZstdError as error:
        raise InvalidRequest("the body is not a zstd frame") from error
    if not decompressor.eof:
        raise InvalidRequest("the zstd frame ends too early")
    return b"".join(pieces)


def read(kind: type[BodyT], raw: bytes) -> BodyT:
    """The body as `kind`; raises `InvalidRequest` naming the fields at fault, never their contents."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidRequest(_problems(error)) from error


def read_object(raw: bytes) -> dict[str, Any]:
    """Any JSON object; raises `InvalidRequest`."""
    try:
        return _object.validate_json(raw)
    except ValidationError as error:
        raise InvalidRequest(_problems(error)) from error


def _problems(error: ValidationError) -> str:
    problems = [
        ": ".join(filter(None, (".".join(str(part) for part in problem["loc"]), problem["msg"])))
        for problem in error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_PROBLEMS]
    ]
    return "; ".join(problems)[:_MAX_MESSAGE_CHARS]


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
