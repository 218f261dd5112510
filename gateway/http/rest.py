"""Plain REST, for people without the SDK, on the same commands.

A write answers 202 with `Location: /v1/operations/{id}` and is run once for each `Idempotency-Key`. It has no number of
its own: it runs after everything that had come without a gap before it.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.http import wire
from gateway.http.bodies import Body, json_of, read
from gateway.http.checkpoints import checked_name, training_path
from gateway.http.context import GatewayOf, TenantOf
from gateway.http.describe import SUBMIT_REFUSALS, json_body, refusals
from gateway.http.errors import back_off
from gateway.http.futures import Telling, wait_for
from gateway.http.models import fresh_adapter
from gateway.http.operations import OperationStatus, accepted_operation, status_of
from gateway.http.schedules import Schedule, Step
from gateway.scheduling.requests import CreateRequest, LoadRequest, SaveRequest, UnloadRequest

router = APIRouter(prefix="/v1", tags=["Plain REST"])

IdempotencyKey = Annotated[
    str | None,
    Header(
        pattern=r"^[\x21-\x7e]+$",
        max_length=200,
        description="Sent again with the same content, the answer is the operation it began; with another, 422.",
    ),
]
_LOCATION = {"Location": {"description": "Where the operation can be followed.", "schema": {"type": "string"}}}
WRITE: dict[str, Any] = {
    "status_code": 202,
    "response_model": OperationStatus,
    "responses": {202: {"description": "Accepted", "headers": _LOCATION}, **SUBMIT_REFUSALS},
}


class NewModel(Body):
    """A fresh adapter over the base model. Without a seed one is drawn and recorded."""

    base_model: wire.Id
    rank: int = Field(ge=1, le=65_536)
    seed: wire.Seed | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    user_metadata: wire.TextMetadata = Field(default={})
    lr_scheduler: Schedule | None = None


class NewCheckpoint(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", description="One path segment.")
    overwrite: bool = False
    ttl_seconds: wire.TtlSeconds | None = None
    user_metadata: wire.TextMetadata = Field(default={})


class Load(Body):
    """load_optimizer has no default: with it Adam's moments and step are restored, without it they start fresh."""

    path: wire.Text = Field(description="tinker://<model_id>/weights/<name>")
    load_optimizer: bool


@router.post("/models", openapi_extra=json_body(NewModel), **WRITE)
async def create_model(
    request: Request, gateway: GatewayOf, tenant: TenantOf, idempotency_key: IdempotencyKey = None
) -> JSONResponse:
    body = read(NewModel, await json_of(request))
    asked = fresh_adapter(
        CreateRequest(
            base_model=body.base_model,
            rank=body.rank,
            seed=body.seed,
            train_attn=body.train_attn,
            train_mlp=body.train_mlp,
            train_unembed=body.train_unembed,
            user_metadata=body.user_metadata,
            lr_schedule=None if body.lr_scheduler is None else body.lr_scheduler.as_schedule(),
        )
    )
    return await accepted_operation(gateway.scheduler.submit_create_plain(tenant, asked, idempotency_key))


@router.delete("/models/{model_id}", **WRITE)
async def unload_model(
    model_id: str, gateway: GatewayOf, tenant: TenantOf, idempotency_key: IdempotencyKey = None
) -> JSONResponse:
    """Gives the model's slot away. Its checkpoints stay."""
    return await accepted_operation(gateway.scheduler.submit(tenant, model_id, None, UnloadRequest(), idempotency_key))


@router.post("/models/{model_id}/optim_step", openapi_extra=json_body(Step), **WRITE)
async def optim_step(
    model_id: str, request: Request, gateway: GatewayOf, tenant: TenantOf, idempotency_key: IdempotencyKey = None
) -> JSONResponse:
    """One AdamW step over what forward_backward has accumulated, at the learning rate given or at the model's own."""
    asked = read(Step, await json_of(request)).as_request()
    return await accepted_operation(gateway.scheduler.submit(tenant, model_id, None, asked, idempotency_key))


@router.post("/models/{model_id}/checkpoints", openapi_extra=json_body(NewCheckpoint), **WRITE)
async def save(
    model_id: str, request: Request, gateway: GatewayOf, tenant: TenantOf, idempotency_key: IdempotencyKey = None
) -> JSONResponse:
    body = read(NewCheckpoint, await json_of(request))
    asked = SaveRequest(
        name=checked_name(body.name),
        kind="weights",
        overwrite=body.overwrite,
        ttl_seconds=body.ttl_seconds,
        user_metadata=body.user_metadata,
    )
    return await accepted_operation(gateway.scheduler.submit(tenant, model_id, None, asked, idempotency_key))


@router.post("/models/{model_id}/load", openapi_extra=json_body(Load), **WRITE)
async def load(
    model_id: str, request: Request, gateway: GatewayOf, tenant: TenantOf, idempotency_key: IdempotencyKey = None
) -> JSONResponse:
    """Replaces the model's state. Accumulated gradients are dropped; if it fails, the model is as it was."""
    body = read(Load, await json_of(request))
    asked = LoadRequest(path=training_path(body.path), load_optimizer=body.load_optimizer)
    return await accepted_operation(gateway.scheduler.submit(tenant, model_id, None, asked, idempotency_key))


@router.get(
    "/operations/{operation_id}", response_model=OperationStatus, responses=refusals(404, 429), name="get operation"
)
async def get_operation(
    operation_id: str,
    request: Request,
    gateway: GatewayOf,
    tenant: TenantOf,
    wait: Annotated[float, Query(ge=0, le=3600, description="Seconds to wait for the end; up to 60 are.")] = 0,
) -> Response:
    future = gateway.scheduler.futures.get(tenant, operation_id)
    await wait_for(future, min(wait, gateway.limits.max_wait_s), gateway, request)
    if not future.is_done and wait > 0 and gateway.is_stopping:
        return back_off(gateway.limits.retry_after_s)
    response = JSONResponse(status_of(future).model_dump(mode="json"))
    return Telling(response, future, gateway) if future.is_done else response
