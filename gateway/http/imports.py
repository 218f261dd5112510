"""Plain REST: an ordinary checkpoint of another's files, which lie where the operator allows."""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from gateway.http import wire
from gateway.http.bodies import Body, json_of, read
from gateway.http.checkpoints import checked_name
from gateway.http.context import Gateway, GatewayOf, TenantOf
from gateway.http.describe import json_body, refusals
from gateway.http.operations import accepted_operation
from gateway.http.rest import WRITE, IdempotencyKey
from gateway.scheduling.errors import ImportNotAllowed, UnknownModel
from gateway.scheduling.requests import ImportRequest

router = APIRouter(prefix="/v1", tags=["Plain REST"])


class NewImport(Body):
    """A directory with native per-rank adapters, a torch_dist checkpoint or a PEFT adapter; its content tells which.

    The checkpoint is `tinker://<model_id>/weights/<name>`, of a model id of its own unless one of the caller's is
    given. Without `load_optimizer` the optimizer's state stays behind; iteration and scheduler come along always.
    """

    path: wire.Text = Field(description="Absolute, in a directory that the operator allows imports from.")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", description="One path segment.")
    model_id: wire.Id | None = None
    format: Literal["native", "torch_dist", "peft"] | None = None
    load_optimizer: bool = True
    alpha: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Of the adapter, where the files do not tell it."
    )
    overwrite: bool = False


@router.post(
    "/imports",
    openapi_extra=json_body(NewImport),
    **{**WRITE, "responses": {**WRITE["responses"], **refusals(403)}},
)
async def import_checkpoint(
    request: Request, gateway: GatewayOf, tenant: TenantOf, idempotency_key: IdempotencyKey = None
) -> JSONResponse:
    """Pickles are read as plain tensors or not at all."""
    body = read(NewImport, await json_of(request))
    name = checked_name(body.name)
    if gateway.imports is None:
        raise ImportNotAllowed("this service imports from nowhere (--import-dir)")
    path, within = await asyncio.to_thread(gateway.imports.allowed, body.path)
    if body.model_id is not None:
        await _check_owned(gateway, tenant, body.model_id)
    asked = ImportRequest(
        path=str(path),
        within=str(within),
        name=name,
        format=body.format,
        load_optimizer=body.load_optimizer,
        alpha=body.alpha,
        overwrite=body.overwrite,
    )
    return await accepted_operation(gateway.imports.submit(tenant, body.model_id, asked, idempotency_key))


async def _check_owned(gateway: Gateway, tenant: str, model_id: str) -> None:
    """Raises `UnknownModel` for a model that is not there, or is another tenant's."""
    if any(model.model_id == model_id for model in gateway.scheduler.models(tenant)):
        return
    if not any(run.model_id == model_id for run in await gateway.scheduler.catalog.runs(tenant)):
        raise UnknownModel(f"no model {model_id}")
