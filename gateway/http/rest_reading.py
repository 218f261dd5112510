"""Plain REST: models and checkpoints as they are now."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from gateway.http.context import GatewayOf, TenantOf
from gateway.http.describe import refusals
from gateway.http.operations import Failure
from gateway.http.runs import entries_of
from gateway.http.sessions import Limit, Offset
from gateway.scheduling.catalog import Entry
from gateway.scheduling.models import Model, ModelState
from trainer_cell.vault.layout import RECOVERY

router = APIRouter(prefix="/v1", tags=["Plain REST"])


class Adapter(BaseModel):
    rank: int
    alpha: float
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


class ModelStatus(BaseModel):
    """base_model and adapter are null while a model is being made from a checkpoint."""

    id: str
    state: ModelState
    base_model: str | None
    adapter: Adapter | None
    seed: int | None = Field(description="Of the fresh adapter; null for a model made from a checkpoint.")
    step: int = Field(description="Adam's step.")
    iteration: int = Field(description="Optimizer steps in the model's life, loads included.")
    pending: int = Field(description="Accepted operations that are not done.")
    trouble: Failure | None = Field(description="Why the model is lost or failed.")
    created: datetime
    last_request_time: datetime
    user_metadata: dict[str, str]


class Models(BaseModel):
    models: list[ModelStatus]


class CheckpointStatus(BaseModel):
    path: str = Field(examples=["tinker://5f0c:train:0/weights/0001"])
    model_id: str
    name: str
    kind: Literal["weights", "sampler_weights"]
    base_model: str
    rank: int
    step: int
    iteration: int
    has_optimizer: bool
    has_scheduler: bool
    size_bytes: int
    created: datetime
    expires: datetime | None
    is_pinned: bool = Field(description="Kept from TTL, rules, deletion and overwriting.")
    note: str | None = Field(description="What its owner should know: that a start of the service repaired the name.")
    user_metadata: dict[str, str]


class CheckpointList(BaseModel):
    checkpoints: list[CheckpointStatus]
    total: int


@router.get("/models")
async def list_models(gateway: GatewayOf, tenant: TenantOf) -> Models:
    return Models(models=[_model(model) for model in gateway.scheduler.models(tenant)])


@router.get("/models/{model_id}", responses=refusals(404))
async def get_model(model_id: str, gateway: GatewayOf, tenant: TenantOf) -> ModelStatus:
    return _model(gateway.scheduler.model(tenant, model_id))


def _model(model: Model) -> ModelStatus:
    adapter, trouble = model.adapter, model.trouble
    return ModelStatus(
        id=model.model_id,
        state=model.state,
        base_model=model.base_model,
        adapter=None
        if adapter is None
        else Adapter(**{field: getattr(adapter, field) for field in adapter.__struct_fields__}),
        seed=model.seed,
        step=model.step,
        iteration=model.iteration,
        pending=model.pending,
        trouble=None
        if trouble is None
        else Failure(kind=trouble.kind.value, category=trouble.category, message=trouble.message),
        created=model.created,
        last_request_time=model.last_request_time,
        user_metadata=model.user_metadata,
    )


@router.get("/checkpoints", responses=refusals(404))
async def list_checkpoints(
    gateway: GatewayOf,
    tenant: TenantOf,
    model_id: Annotated[str | None, Query(description="Only this model's.")] = None,
    limit: Limit = 100,
    offset: Offset = 0,
) -> CheckpointList:
    """Newest first; those of unloaded models and of earlier lives of the service too."""
    if model_id is None:
        entries = await gateway.scheduler.catalog.list(tenant)
    else:
        entries = await entries_of(gateway, tenant, model_id)
    return CheckpointList(
        checkpoints=[checkpoint_status(entry) for entry in entries[offset : offset + limit]], total=len(entries)
    )


def checkpoint_status(entry: Entry) -> CheckpointStatus:
    manifest = entry.manifest
    assert entry.address.kind != RECOVERY, "neither listed nor changed by clients"
    return CheckpointStatus(
        path=entry.uri,
        model_id=entry.address.model_id,
        name=entry.address.name,
        kind=entry.address.kind,
        base_model=manifest.base_model,
        rank=manifest.adapter.rank,
        step=manifest.step,
        iteration=manifest.iteration,
        has_optimizer=manifest.has_optimizer,
        has_scheduler=manifest.has_scheduler,
        size_bytes=entry.size_bytes,
        created=entry.created,
        expires=entry.expires,
        is_pinned=entry.record.pinned,
        note=entry.record.note,
        user_metadata=manifest.user_metadata,
    )
