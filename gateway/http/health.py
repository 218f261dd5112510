"""Whether the process lives, and whether requests will be served. Open to all; tells nothing of tenants."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from gateway.http.context import Gateway, GatewayOf
from gateway.http.replies import Health

router = APIRouter(tags=["Health"])


class Readiness(BaseModel):
    is_ready: bool
    reason: str | None = Field(description="Why not.")


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness, "description": "Not now"}})
async def readyz(gateway: GatewayOf) -> JSONResponse:
    """A trainer cell is attached and the gateway takes commands."""
    reason = _reason(gateway)
    return JSONResponse(
        Readiness(is_ready=reason is None, reason=reason).model_dump(), status_code=200 if reason is None else 503
    )


def _reason(gateway: Gateway) -> str | None:
    if gateway.is_stopping:
        return "the gateway is going down"
    if not gateway.scheduler.journal.is_available:
        return "the journal cannot be written: its volume is full or failing"
    if gateway.scheduler.is_ready:
        return None
    if gateway.scheduler.is_starting_up:
        return "the model to start with is not made yet"
    return "no trainer cell is attached and settled"
