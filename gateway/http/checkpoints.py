"""Saving and loading, in the SDK's words."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from gateway.http import replies, wire
from gateway.http.bodies import json_of, read
from gateway.http.context import Gateway, GatewayOf, TenantOf
from gateway.http.describe import SUBMIT_REFUSALS, json_body, refusals
from gateway.http.models import accepted, check_optimizer
from gateway.http.rejection import or_rejected
from gateway.scheduling.errors import InvalidRequest
from gateway.scheduling.futures import Future
from gateway.scheduling.requests import CreateFromCheckpointRequest, LoadRequest, RejectedRequest, SaveRequest
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.vault.layout import CheckpointAddress, InvalidAddress, check_name

router = APIRouter(prefix="/api/v1", tags=["SDK: checkpoints"])


@router.post("/save_weights", openapi_extra=json_body(wire.SaveWeights), responses=SUBMIT_REFUSALS)
async def save_weights(request: Request, gateway: GatewayOf, tenant: TenantOf) -> replies.Accepted:
    raw = await json_of(request)
    turn = read(wire.ModelTurn, raw)
    asked = or_rejected("save", lambda: _save_of(read(wire.SaveWeights, raw)))
    return await accepted(gateway.scheduler.submit(tenant, turn.model_id, turn.seq_id, asked))


@router.post("/save_weights_for_sampler", openapi_extra=json_body(wire.ModelTurn), responses=SUBMIT_REFUSALS)
async def save_weights_for_sampler(request: Request, gateway: GatewayOf, tenant: TenantOf) -> replies.Accepted:
    """There is no sampling: the future fails. The client has spent the number, and its later commands go on."""
    turn = read(wire.ModelTurn, await json_of(request))
    asked = RejectedRequest("save", ErrorKind.BAD_COMMAND, "this service does not sample: save_state keeps the model")
    return await accepted(gateway.scheduler.submit(tenant, turn.model_id, turn.seq_id, asked))


def _save_of(body: wire.SaveWeights) -> SaveRequest:
    return SaveRequest(
        name=checked_name(body.path),
        kind="weights",
        overwrite=body.overwrite,
        ttl_seconds=body.ttl_seconds,
        user_metadata=body.user_metadata or {},
    )


def checked_name(name: str) -> str:
    """The name itself; raises `InvalidRequest` for what can be no checkpoint's name."""
    try:
        check_name(name)
    except InvalidAddress as error:
        raise InvalidRequest(str(error)) from error
    return name


def training_path(path: str) -> str:
    """The address itself; raises `InvalidRequest` for no address, or one whose kind holds no training state."""
    address = address_of(path)
    if address.kind == "sampler_weights":
        raise InvalidRequest(f"a load needs a training checkpoint (weights/...), this is of kind {address.kind}")
    return address.uri


def address_of(path: str) -> CheckpointAddress:
    try:
        return CheckpointAddress.parse(path)
    except InvalidAddress as error:
        raise InvalidRequest(str(error)) from error


@router.post(
    "/load_weights",
    openapi_extra=json_body(wire.LoadWeightsInPlace, wire.LoadWeightsAsModel),
    responses=SUBMIT_REFUSALS,
)
async def load_weights(request: Request, gateway: GatewayOf, tenant: TenantOf) -> replies.Accepted:
    """With a session, a model is made from the checkpoint; with a model, its state is replaced. Never both."""
    raw = await json_of(request)
    addressing = read(wire.LoadAddressing, raw)
    if addressing.is_in_place == addressing.makes_model:
        raise InvalidRequest("either model_id with seq_id, or session_id with model_seq_id: one pair is needed")
    return await accepted(_load(raw, gateway, tenant) if addressing.is_in_place else _make(raw, gateway, tenant))


def _load(raw: bytes, gateway: Gateway, tenant: str) -> Future:
    turn = read(wire.ModelTurn, raw)
    asked = or_rejected("load", lambda: _load_of(read(wire.LoadWeights, raw)))
    return gateway.scheduler.submit(tenant, turn.model_id, turn.seq_id, asked)


def _load_of(body: wire.LoadWeights) -> LoadRequest:
    _check_load(body)
    return LoadRequest(path=training_path(body.path), load_optimizer=body.optimizer)


def _make(raw: bytes, gateway: Gateway, tenant: str) -> Future:
    turn = read(wire.SessionTurn, raw)
    asked = or_rejected("create", lambda: _make_of(read(wire.LoadWeights, raw), gateway))
    return gateway.scheduler.submit_create(tenant, turn.session_id, turn.model_seq_id, asked)


def _make_of(body: wire.LoadWeights, gateway: Gateway) -> CreateFromCheckpointRequest:
    _check_load(body)
    hello = gateway.scheduler.hello
    if body.base_model is not None and hello is not None:
        served = hello.base_model
        if body.base_model not in (served.name, *served.aliases):
            raise InvalidRequest(f"base_model: this service serves {served.name} only")
    return CreateFromCheckpointRequest(
        path=training_path(body.path),
        load_optimizer=body.optimizer,
        user_metadata=wire.as_texts(body.user_metadata),
    )


def _check_load(body: wire.LoadWeights) -> None:
    check_optimizer(body.optimizer_config)
    if body.weights_access_token is not None:
        raise InvalidRequest("weights_access_token: not supported, a checkpoint is read with its owner's key only")


@router.post("/weights_info", openapi_extra=json_body(wire.WeightsInfoOf), responses=refusals(404))
async def weights_info(request: Request, gateway: GatewayOf, tenant: TenantOf) -> replies.WeightsInfo:
    body = read(wire.WeightsInfoOf, await json_of(request))
    entry = await gateway.scheduler.catalog.find(tenant, address_of(body.tinker_path))
    adapter = entry.manifest.adapter
    return replies.WeightsInfo(
        base_model=entry.manifest.base_model,
        lora_rank=adapter.rank,
        train_unembed=adapter.train_unembed,
        train_mlp=adapter.train_mlp,
        train_attn=adapter.train_attn,
    )
