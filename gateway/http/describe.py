"""The OpenAPI document: bodies that routes read by hand are described here as fully as those FastAPI would read."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.http.auth import OPEN_PATHS
from gateway.http.bodies import JSON, PROTOBUF
from gateway.http.errors import ErrorBody

_SCHEMAS = "x-schemas"
_REF = "#/components/schemas/{model}"
_DESCRIPTION = """Training with many LoRA adapters over one frozen base model.

`/v1` is for people: plain REST, where every write answers 202 with the operation to follow. `/api/v1` is what the
tinker SDK speaks."""
_SECURITY: list[dict[str, list[str]]] = [{"apiKey": []}, {"bearer": []}]

Responses = dict[int | str, dict[str, Any]]


def refusals(*statuses: int) -> Responses:
    """`responses=` of a route: the refusals it can answer with, besides 401 and 422."""
    texts = {
        403: "The operator does not allow it",
        404: "There is no such thing for this key",
        408: "Not done yet: ask again",
        429: "Too much is waiting, or the gateway is going down: ask again after Retry-After seconds",
        503: "The gateway is going down: send again after Retry-After seconds",
    }
    return {status: {"model": ErrorBody, "description": texts[status]} for status in statuses}


SUBMIT_REFUSALS = refusals(404, 429, 503)


def json_body(kind: type[BaseModel], *others: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra=` of a route that reads one of these from JSON."""
    kinds = [{"$ref": _REF.format(model=one.__name__)} for one in (kind, *others)]
    schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    _, described = models_json_schema([(one, "validation") for one in (kind, *others)], ref_template=_REF)
    return {
        "requestBody": {"required": True, "content": {JSON: {"schema": schema}}},
        _SCHEMAS: described["$defs"],
    }


def protobuf_body(message: str) -> dict[str, Any]:
    schema = {"type": "string", "format": "binary", "description": f"{message} of openapi/tinker.proto"}
    return {"requestBody": {"required": True, "content": {PROTOBUF: {"schema": schema}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document, ready for JSON; made once."""
    if app.openapi_schema is None:
        app.openapi_schema = _made(app)
    return app.openapi_schema


def _made(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(title=app.title, version=app.version, description=_DESCRIPTION, routes=app.routes)
    schemas = made["components"].setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    made["components"]["securitySchemes"] = {
        "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        "bearer": {"type": "http", "scheme": "bearer"},
    }
    for path, operations in made["paths"].items():
        for operation in operations.values():
            # Moved from the operation that reads a body to where its reference points.
            schemas.update(operation.pop(_SCHEMAS, {}))
            _complete(path, operation)
    return made


def _complete(path: str, operation: dict[str, Any]) -> None:
    """What holds of every route: keys, and what can be wrong with parameters and bodies."""
    if path in OPEN_PATHS:
        return
    operation["security"] = _SECURITY
    general = {"401": "No API key, or an unknown one", "422": "The request cannot be understood"}
    if "requestBody" in operation:
        general |= {"413": "The body is too large", "415": "The body is of another content type or encoding"}
    content = {JSON: {"schema": {"$ref": _REF.format(model=ErrorBody.__name__)}}}
    for status, description in general.items():
        operation["responses"][status] = {"description": description, "content": content}
