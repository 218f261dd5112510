"""How long checkpoints stay: TTL in the SDK's words, pins and what was done of late in those of the plain REST face."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import Enum

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field
from starlette.requests import Request

from gateway.http import wire
from gateway.http.bodies import Body, json_of, read
from gateway.http.checkpoints import address_of
from gateway.http.context import GatewayOf, TenantOf
from gateway.http.describe import json_body, refusals
from gateway.http.rest_reading import CheckpointStatus, checkpoint_status
from gateway.scheduling.sweeper import Sweep
from trainer_cell.vault.collect import Due
from trainer_cell.vault.layout import RECOVERY
from trainer_cell.vault.model_recovery import Finding, What
from trainer_cell.vault.retention import Reason, Rules

router = APIRouter()
_SDK: list[str | Enum] = ["SDK: training runs"]
_PLAIN: list[str | Enum] = ["Plain REST"]


class Ttl(Body):
    """ttl_seconds: from now; null lets the checkpoint stay until it is deleted."""

    ttl_seconds: wire.TtlSeconds | None


@router.put(
    "/api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl",
    status_code=204,
    response_class=Response,
    responses=refusals(404),
    openapi_extra=json_body(Ttl),
    tags=_SDK,
)
async def set_ttl(run_id: str, checkpoint_id: str, request: Request, gateway: GatewayOf, tenant: TenantOf) -> Response:
    """Takes the place of the TTL the checkpoint was saved with. It holds until a save overwrites the name."""
    address = address_of(f"tinker://{run_id}/{checkpoint_id}")
    body = read(Ttl, await json_of(request))
    await gateway.scheduler.catalog.set_ttl(tenant, address, body.ttl_seconds)
    return Response(status_code=204)


@router.put("/v1/models/{model_id}/checkpoints/{kind}/{name}/pin", responses=refusals(404), tags=_PLAIN)
async def pin(model_id: str, kind: str, name: str, gateway: GatewayOf, tenant: TenantOf) -> CheckpointStatus:
    """Neither TTL nor retention rules take a pinned checkpoint, and deleting or overwriting it is refused."""
    address = address_of(f"tinker://{model_id}/{kind}/{name}")
    return checkpoint_status(await gateway.scheduler.catalog.pin(tenant, address))


@router.delete("/v1/models/{model_id}/checkpoints/{kind}/{name}/pin", responses=refusals(404), tags=_PLAIN)
async def unpin(model_id: str, kind: str, name: str, gateway: GatewayOf, tenant: TenantOf) -> CheckpointStatus:
    """Also when it is not pinned. One whose TTL is over goes with the next sweep."""
    address = address_of(f"tinker://{model_id}/{kind}/{name}")
    return checkpoint_status(await gateway.scheduler.catalog.unpin(tenant, address))


class RulesInForce(BaseModel):
    """Null: not set."""

    replaced_grace_s: float = Field(description="How long a version stays after a save replaced it.")
    keep_last: int | None = Field(description="Of each model, so many training checkpoints stay, by order of saves.")
    keep_every: int | None = Field(description="Training checkpoints at multiples of this iteration stay, too.")


class Removed(BaseModel):
    path: str
    reason: Reason
    size_bytes: int


class LastSweep(BaseModel):
    ended: datetime
    removed: list[Removed] = Field(description="Versions of this key's tenant.")
    in_use: list[Removed] = Field(description="Due, but being read: they go later.")
    num_errors: int = Field(description="Models that could not be collected; the gateway's log names them.")


class Recovered(BaseModel):
    what: What
    path: str
    detail: str


class RetentionStatus(BaseModel):
    used_bytes: int = Field(description="Of all this tenant's versions, replaced ones and saves under way among them.")
    quota_bytes: int | None
    rules: RulesInForce | None
    last_sweep: LastSweep | None
    recovered: list[Recovered] = Field(description="What the last start of the service mended of this tenant's.")


@router.get("/v1/retention", tags=_PLAIN)
async def retention(gateway: GatewayOf, tenant: TenantOf) -> RetentionStatus:
    """What stays, what it takes, and what was removed or mended of late."""
    catalog, sweeper = gateway.scheduler.catalog, gateway.sweeper
    owner = catalog.tenant_digest(tenant)
    last = sweeper.last if sweeper is not None else None
    findings = sweeper.recovered.findings if sweeper is not None and sweeper.recovered is not None else ()
    return RetentionStatus(
        used_bytes=await catalog.saves.used_bytes(tenant),
        quota_bytes=catalog.saves.quota_bytes,
        rules=_rules(sweeper.collector.rules) if sweeper is not None else None,
        last_sweep=_sweep(last, owner) if last is not None else None,
        recovered=[_recovered(finding) for finding in findings if finding.tenant_digest == owner],
    )


def _rules(rules: Rules) -> RulesInForce:
    return RulesInForce(replaced_grace_s=rules.replaced_grace_s, keep_last=rules.keep_last, keep_every=rules.keep_every)


def _sweep(sweep: Sweep, owner: str) -> LastSweep:
    collected = sweep.collected
    return LastSweep(
        ended=sweep.ended,
        removed=_owned(collected.removed, owner),
        in_use=_owned(collected.kept, owner),
        num_errors=len(collected.errors) + (sweep.error is not None),
    )


def _owned(dues: Sequence[Due], owner: str) -> list[Removed]:
    return [
        Removed(path=due.address.uri, reason=due.reason, size_bytes=due.num_bytes)
        for due in dues
        if due.tenant_digest == owner and due.version.kind != RECOVERY
    ]


def _recovered(finding: Finding) -> Recovered:
    return Recovered(what=finding.what, path=finding.address.uri, detail=finding.detail)
