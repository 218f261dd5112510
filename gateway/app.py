"""The HTTP application over a scheduler, and the server that takes it down gently."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gateway.http import (
    checkpoints,
    errors,
    futures,
    health,
    imports,
    models,
    rest,
    rest_reading,
    retention,
    runs,
    sessions,
    training,
)
from gateway.http.auth import Keyring, TenantGate
from gateway.http.context import Gateway
from gateway.http.describe import document
from gateway.http.limits import BodyLimit, Limits
from gateway.scheduling.errors import Refused
from gateway.scheduling.imports import Imports
from gateway.scheduling.scheduler import Scheduler
from gateway.scheduling.sweeper import Sweeper
from trainer_cell.vault.errors import VaultError

# Of the plain REST face, as its paths have it; the SDK's routes follow the SDK.
API_VERSION = "1"
_ROUTED = (health, rest, rest_reading, imports, sessions, models, training, checkpoints, retention, runs, futures)


def create_app(
    scheduler: Scheduler,
    keys: Mapping[str, str],
    limits: Limits | None = None,
    sweeper: Sweeper | None = None,
    imports: Imports | None = None,
) -> FastAPI:
    """keys: API key → tenant; imports: None when none are allowed. All of them are started and stopped with the
    application."""
    gateway = Gateway(scheduler, limits or Limits(), sweeper, imports)
    app = FastAPI(
        title="cellgate",
        version=API_VERSION,
        lifespan=_lifespan,
        # The pages that would show the document load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    for module in _ROUTED:
        app.include_router(module.router)
    app.add_exception_handler(Refused, errors.on_refused)
    app.add_exception_handler(VaultError, errors.on_storage_failed)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    app.add_exception_handler(RequestValidationError, errors.on_invalid_parameters)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_body_bytes=gateway.limits.max_body_bytes)
    app.add_middleware(TenantGate, keyring=Keyring(keys))
    app.add_middleware(errors.LastResort)
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    gateway: Gateway = app.state.gateway
    await gateway.scheduler.start()
    if gateway.sweeper is not None:
        gateway.scheduler.catalog.saves.on_replaced = gateway.sweeper.nudge
        gateway.sweeper.start()
    if gateway.imports is not None:
        gateway.imports.start()
    yield
    await stop(app)


async def stop(app: FastAPI) -> None:
    """Waiting polls end with 429, submits get 503, and what runs is finished. Again: nothing more happens."""
    gateway: Gateway = app.state.gateway
    if gateway.stopping.is_set():
        return
    gateway.stopping.set()
    if gateway.imports is not None:
        await gateway.imports.stop()
    await gateway.scheduler.stop(gateway.limits.stop_grace_s)
    if gateway.sweeper is not None:
        await gateway.sweeper.stop()


class Server(uvicorn.Server):
    """Goes on answering while the scheduler stops: uvicorn alone would close its doors first, then wait for polls.

    A poll then gets an answer on which the SDK backs off, and not a connection that is refused.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await stop(self._app)
        finally:
            await super().shutdown(sockets)
