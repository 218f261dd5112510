"""forward_backward and optim_step."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request

from gateway.http import protobuf, replies, wire
from gateway.http.bodies import is_big, json_of, protobuf_of, read
from gateway.http.context import GatewayOf, TenantOf
from gateway.http.describe import SUBMIT_REFUSALS, json_body, protobuf_body
from gateway.http.models import accepted
from gateway.http.rejection import or_rejected
from gateway.scheduling.errors import InvalidRequest
from gateway.scheduling.requests import FORWARD_ONLY, ForwardBackwardRequest, OptimStepRequest, RejectedRequest
from trainer_cell.protocol.commands import AdamParams

router = APIRouter(prefix="/api/v1", tags=["SDK: training"])

_Decoded = tuple[str, int, ForwardBackwardRequest | RejectedRequest]


@router.post(
    "/forward_backward",
    openapi_extra=protobuf_body("ForwardBackwardRequest"),
    responses=SUBMIT_REFUSALS,
)
async def forward_backward(request: Request, gateway: GatewayOf, tenant: TenantOf) -> replies.Accepted:
    """Answered at once, also when earlier numbers are missing: the SDK sends the first chunk of a call last."""
    raw = await protobuf_of(request, gateway.limits.max_body_bytes)
    decoded = await asyncio.to_thread(_decode, raw) if is_big(raw) else _decode(raw)
    return await accepted(gateway.scheduler.submit(tenant, *decoded))


def _decode(raw: bytes) -> _Decoded:
    message = protobuf.parse(raw)
    # One that only looks ahead leaves no gap in the gradient when it fails.
    operation = FORWARD_ONLY if message.forward_only else "forward_backward"
    asked = or_rejected(operation, lambda: protobuf.forward_backward_of(message))
    return message.model_id, message.seq_id, asked


@router.post("/optim_step", openapi_extra=json_body(wire.OptimStep), responses=SUBMIT_REFUSALS)
async def optim_step(request: Request, gateway: GatewayOf, tenant: TenantOf) -> replies.Accepted:
    raw = await json_of(request)
    turn = read(wire.ModelTurn, raw)
    asked = or_rejected("optim_step", lambda: _optim_step_of(read(wire.OptimStep, raw)))
    return await accepted(gateway.scheduler.submit(tenant, turn.model_id, turn.seq_id, asked))


def _optim_step_of(body: wire.OptimStep) -> OptimStepRequest:
    if body.optimizer_params is not None:
        raise InvalidRequest("optimizer_params: only adamw is supported, by adam_params")
    if body.adam_params is None:
        raise InvalidRequest("adam_params: missing")
    return OptimStepRequest(adam=AdamParams(**body.adam_params.model_dump()))
