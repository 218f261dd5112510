"""What the SDK asks before it trains, and the sessions it trains in."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request

from gateway.http import replies, wire
from gateway.http.bodies import json_of, read, read_object
from gateway.http.context import Gateway, GatewayOf, TenantOf
from gateway.http.describe import json_body, refusals

router = APIRouter(prefix="/api/v1", tags=["SDK: sessions"])

SDK_CHUNK_BYTES = 5_000_000
NO_LOAD_OPTIM = (
    "this service runs with --no-load-optim: a load never restores the optimizer, whatever the request says; "
    "it starts fresh"
)

Limit = Annotated[int, Query(ge=0, le=10_000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]


@router.post("/client/config")
async def client_config(gateway: GatewayOf, tenant: TenantOf) -> replies.ClientConfig:
    # The SDK only estimates a chunk's bytes: half of what is accepted leaves room for its error.
    chunk_bytes = min(SDK_CHUNK_BYTES, gateway.limits.max_body_bytes // 2)
    return replies.ClientConfig(fwdbwd_max_chunk_bytes_count=chunk_bytes)


@router.post("/client/dynamic_config")
async def dynamic_config(tenant: TenantOf) -> replies.DynamicConfig:
    return replies.DynamicConfig()


@router.post("/telemetry")
async def telemetry(request: Request, tenant: TenantOf) -> replies.TelemetryAccepted:
    """Taken and dropped. A failing call of the SDK waits up to 30 s for this route, so it must be there.

    Its `SESSION_END` event comes with any failed call and says nothing about the session.
    """
    read_object(await json_of(request))
    return replies.TelemetryAccepted()


@router.get("/healthz")
async def healthz() -> replies.Health:
    return replies.Health()


@router.get("/get_server_capabilities")
async def get_server_capabilities(gateway: GatewayOf, tenant: TenantOf) -> replies.ServerCapabilities:
    """Empty until a first trainer cell has attached."""
    hello = gateway.scheduler.hello
    if hello is None:
        return replies.ServerCapabilities(supported_models=[])
    served = replies.SupportedModel(model_name=hello.base_model.name, max_context_length=hello.base_model.max_context)
    return replies.ServerCapabilities(supported_models=[served])


@router.post("/create_session", openapi_extra=json_body(wire.CreateSession))
async def create_session(request: Request, gateway: GatewayOf, tenant: TenantOf) -> replies.SessionCreated:
    body = read(wire.CreateSession, await json_of(request))
    session = await gateway.scheduler.visits.open(
        tenant,
        tags=tuple(body.tags),
        user_metadata=body.user_metadata,
        sdk_version=body.sdk_version,
        project_id=body.project_id,
        display_name=body.display_name,
    )
    return replies.SessionCreated(session_id=session.session_id, warning_message=_warning(gateway, tenant))


def _warning(gateway: Gateway, tenant: str) -> str | None:
    """The SDK shows no field of a load's result: a session's greeting is where a client can be told."""
    hello = gateway.scheduler.hello
    warnings = [NO_LOAD_OPTIM] if hello is not None and hello.no_load_optim else []
    warnings += [gateway.scheduler.warnings[tenant]] if tenant in gateway.scheduler.warnings else []
    return ". ".join(warnings) or None


@router.post("/session_heartbeat", openapi_extra=json_body(wire.SessionBody), responses=refusals(404))
async def session_heartbeat(request: Request, gateway: GatewayOf, tenant: TenantOf) -> dict[str, str]:
    """A finished session is answered too: its client may come back to its models."""
    body = read(wire.SessionBody, await json_of(request))
    gateway.scheduler.sessions.beat(tenant, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", openapi_extra=json_body(wire.FinishSession), responses=refusals(404))
async def finish_session(session_id: str, request: Request, gateway: GatewayOf, tenant: TenantOf) -> dict[str, str]:
    """The first reason stays; finishing again is answered alike."""
    body = read(wire.FinishSession, await json_of(request))
    await gateway.scheduler.finish_session(tenant, session_id, body.reason.type, body.detail)
    return {"status": "finished"}


@router.get("/sessions")
async def list_sessions(
    gateway: GatewayOf, tenant: TenantOf, limit: Limit = 20, offset: Offset = 0
) -> replies.Sessions:
    """Newest first."""
    found = gateway.scheduler.sessions.list(tenant)[offset : offset + limit]
    return replies.Sessions(sessions=[session.session_id for session in found])


@router.get("/sessions/{session_id}", responses=refusals(404))
async def get_session(session_id: str, gateway: GatewayOf, tenant: TenantOf) -> replies.SessionInfo:
    session = gateway.scheduler.sessions.get(tenant, session_id)
    return replies.SessionInfo(
        training_run_ids=list(session.model_ids),
        user_metadata=session.user_metadata,
        display_name=session.display_name,
    )
