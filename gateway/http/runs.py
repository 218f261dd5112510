"""Training runs and their checkpoints, listed and deleted, in the SDK's words.

A run is a model the gateway knows or one that has checkpoints on disk; after a restart the files alone tell of it.
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from gateway.http import replies
from gateway.http.checkpoints import address_of
from gateway.http.context import Gateway, GatewayOf, TenantOf
from gateway.http.describe import refusals
from gateway.http.sessions import Limit, Offset
from gateway.scheduling.catalog import Entry
from gateway.scheduling.errors import InvalidRequest, UnknownModel
from gateway.scheduling.models import Model
from trainer_cell.vault.layout import InvalidAddress, check_model_id

router = APIRouter(prefix="/api/v1", tags=["SDK: training runs"])


def checkpoint_of(entry: Entry) -> replies.Checkpoint:
    return replies.Checkpoint(
        checkpoint_id=f"{entry.address.kind}/{entry.address.name}",
        checkpoint_type="sampler" if entry.address.kind == "sampler_weights" else "training",
        time=entry.created,
        tinker_path=entry.uri,
        size_bytes=entry.size_bytes,
        user_metadata=entry.manifest.user_metadata,
        expires_at=entry.expires,
    )


@router.get("/training_runs")
async def list_training_runs(
    gateway: GatewayOf, tenant: TenantOf, limit: Limit = 20, offset: Offset = 0
) -> replies.TrainingRuns:
    """The one used last comes first. What is accessible is what is owned: `access_scope` changes nothing."""
    runs = await _runs(gateway, tenant)
    return replies.TrainingRuns(
        training_runs=runs[offset : offset + limit],
        cursor=replies.Cursor(offset=offset, limit=limit, total_count=len(runs)),
    )


@router.get("/training_runs/{run_id}", responses=refusals(404))
async def get_training_run(run_id: str, gateway: GatewayOf, tenant: TenantOf) -> replies.TrainingRun:
    for run in await _runs(gateway, tenant):
        if run.training_run_id == run_id:
            return run
    raise UnknownModel(f"no training run {run_id[:256]}")


async def _runs(gateway: Gateway, tenant: str) -> list[replies.TrainingRun]:
    stored = {run.model_id: run.checkpoints for run in await gateway.scheduler.catalog.runs(tenant)}
    known = {model.model_id: model for model in gateway.scheduler.models(tenant)}
    runs = [_run(known.get(model_id), stored.get(model_id, ()), tenant) for model_id in {**known, **stored}]
    return sorted((run for run in runs if run is not None), key=lambda run: run.last_request_time, reverse=True)


def _run(model: Model | None, entries: tuple[Entry, ...], tenant: str) -> replies.TrainingRun | None:
    """entries: newest first. None for a model that never came to be: it has no base model to tell."""
    training = next((entry for entry in entries if entry.address.kind == "weights"), None)
    sampler = next((entry for entry in entries if entry.address.kind == "sampler_weights"), None)
    if model is not None and model.base_model is not None and model.adapter is not None:
        model_id, base_model, rank = model.model_id, model.base_model, model.adapter.rank
        last_request_time, user_metadata = model.last_request_time, model.user_metadata
    elif entries:
        newest = entries[0]
        model_id, base_model, rank = newest.address.model_id, newest.manifest.base_model, newest.manifest.adapter.rank
        last_request_time, user_metadata = newest.created, {}
    else:
        return None
    return replies.TrainingRun(
        training_run_id=model_id,
        base_model=base_model,
        model_owner=tenant,
        lora_rank=rank,
        last_request_time=last_request_time,
        last_checkpoint=None if training is None else checkpoint_of(training),
        last_sampler_checkpoint=None if sampler is None else checkpoint_of(sampler),
        user_metadata=user_metadata,
    )


@router.get("/training_runs/{run_id}/checkpoints", responses=refusals(404))
async def list_run_checkpoints(run_id: str, gateway: GatewayOf, tenant: TenantOf) -> replies.Checkpoints:
    """Newest first. Empty for a model without a checkpoint, 404 for one that is not there."""
    entries = await entries_of(gateway, tenant, run_id)
    return replies.Checkpoints(checkpoints=[checkpoint_of(entry) for entry in entries])


async def entries_of(gateway: Gateway, tenant: str, model_id: str) -> list[Entry]:
    """One model's checkpoints, newest first; raises `UnknownModel`, `InvalidRequest`."""
    try:
        check_model_id(model_id)
    except InvalidAddress as error:
        raise InvalidRequest(str(error)) from error
    entries = await gateway.scheduler.catalog.list(tenant, model_id)
    if not entries:
        gateway.scheduler.model(tenant, model_id)
    return entries


@router.get("/checkpoints")
async def list_checkpoints(
    gateway: GatewayOf, tenant: TenantOf, limit: Limit = 100, offset: Offset = 0
) -> replies.Checkpoints:
    """Newest first, of all models of this key's tenant."""
    entries = await gateway.scheduler.catalog.list(tenant)
    return replies.Checkpoints(
        checkpoints=[checkpoint_of(entry) for entry in entries[offset : offset + limit]],
        cursor=replies.Cursor(offset=offset, limit=limit, total_count=len(entries)),
    )


@router.delete(
    "/training_runs/{run_id}/checkpoints/{checkpoint_id:path}",
    status_code=204,
    response_class=Response,
    responses=refusals(404),
)
async def delete_checkpoint(run_id: str, checkpoint_id: str, gateway: GatewayOf, tenant: TenantOf) -> Response:
    """checkpoint_id: with its kind and a raw slash, as in `weights/0001`. A second deletion answers 404."""
    await gateway.scheduler.catalog.delete(tenant, address_of(f"tinker://{run_id}/{checkpoint_id}"))
    return Response(status_code=204)
