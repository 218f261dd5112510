"""What every route is given: the gateway it belongs to and the tenant who asks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from gateway.http.limits import Limits
from gateway.scheduling.imports import Imports
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.sweeper import Sweeper


@dataclass
class Gateway:
    """stopping: set when the gateway begins to go down, which ends every wait. sweeper: None where nobody collects;
    imports: None where none are allowed."""

    scheduler: Scheduler
    limits: Limits
    sweeper: Sweeper | None = None
    imports: Imports | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_stopping(self) -> bool:
        return self.stopping.is_set() or self.scheduler.is_stopping


async def _gateway(request: Request) -> Gateway:
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


async def _tenant(request: Request) -> str:
    tenant = request.state.tenant
    assert isinstance(tenant, str)
    return tenant


GatewayOf = Annotated[Gateway, Depends(_gateway)]
TenantOf = Annotated[str, Depends(_tenant)]
