"""Making, describing and unloading models, in the SDK's words."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from gateway.http import replies, wire
from gateway.http.bodies import json_of, read
from gateway.http.context import GatewayOf, TenantOf
from gateway.http.describe import SUBMIT_REFUSALS, json_body, refusals
from gateway.http.rejection import or_rejected
from gateway.scheduling.errors import InvalidRequest
from gateway.scheduling.futures import Future
from gateway.scheduling.requests import CreateRequest, UnloadRequest

router = APIRouter(prefix="/api/v1", tags=["SDK: models"])


async def accepted(future: Future) -> replies.Accepted:
    """Once it is in the journal, so that nothing that is answered can be lost."""
    await future.accepted()
    return replies.Accepted(request_id=future.request_id, model_id=future.model_id)


@router.post("/create_model", openapi_extra=json_body(wire.CreateModel), responses=SUBMIT_REFUSALS)
async def create_model(request: Request, gateway: GatewayOf, tenant: TenantOf) -> replies.Accepted:
    raw = await json_of(request)
    turn = read(wire.SessionTurn, raw)
    asked = or_rejected("create", lambda: create_request_of(read(wire.CreateModel, raw)))
    future = gateway.scheduler.submit_create(tenant, turn.session_id, turn.model_seq_id, asked)
    return await accepted(future)


def create_request_of(body: wire.CreateModel) -> CreateRequest:
    check_optimizer(body.optimizer_config)
    lora = body.lora_config
    return fresh_adapter(
        CreateRequest(
            base_model=body.base_model,
            rank=lora.rank,
            seed=lora.seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
            user_metadata=wire.as_texts(body.user_metadata),
        )
    )


def fresh_adapter(asked: CreateRequest) -> CreateRequest:
    """The same; raises `InvalidRequest` when nothing of it could be trained."""
    if not (asked.train_attn or asked.train_mlp or asked.train_unembed):
        raise InvalidRequest("one of train_attn, train_mlp and train_unembed must be true")
    return asked


def check_optimizer(config: wire.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise InvalidRequest("optimizer_config.type: only adamw is supported")


@router.post("/get_info", openapi_extra=json_body(wire.ModelBody), responses=refusals(404))
async def get_info(request: Request, gateway: GatewayOf, tenant: TenantOf) -> replies.ModelInfo:
    body = read(wire.ModelBody, await json_of(request))
    model = gateway.scheduler.model(tenant, body.model_id)
    hello = gateway.scheduler.hello
    return replies.ModelInfo(
        model_id=model.model_id,
        model_data=replies.ModelData(
            model_name=model.base_model, tokenizer_id=None if hello is None else hello.base_model.source
        ),
        model_name=model.base_model,
        lora_rank=None if model.adapter is None else model.adapter.rank,
    )


@router.post("/unload_model", openapi_extra=json_body(wire.ModelBody), responses=SUBMIT_REFUSALS)
async def unload_model(request: Request, gateway: GatewayOf, tenant: TenantOf) -> replies.Accepted:
    """Gives the model's slot away, after everything accepted so far. It has no number of its own."""
    body = read(wire.ModelBody, await json_of(request))
    return await accepted(gateway.scheduler.submit(tenant, body.model_id, None, UnloadRequest()))
