"""The model a service starts with: made of a checkpoint before anything else is served, or nothing is."""

from __future__ import annotations

import logging

from gateway.scheduling.errors import Refused
from gateway.scheduling.futures import Future
from gateway.scheduling.requests import CreateFromCheckpointRequest
from gateway.scheduling.scheduler import Scheduler
from trainer_cell.protocol.outcomes import StateLoaded
from trainer_cell.vault.errors import VaultError

log = logging.getLogger(__name__)

# Every session that a client opens has a hexadecimal id, so this one can be nobody's by chance.
SESSION_ID = "startup"

_PATIENCE_S = 600.0


class StartUpFailed(Exception):
    """The model could not be made; the message is one line for the operator."""


async def submit_first_model(scheduler: Scheduler, tenant: str, path: str | None) -> Future | None:
    """Have the scheduler, which has not been started, make the model first of all; None without a path.

    With the optimizer where the checkpoint has one: the operator asks for all there is. Raises `StartUpFailed`.
    """
    if path is None:
        return None
    try:
        entry = await scheduler.catalog.find(tenant, path)
    except (Refused, VaultError) as error:
        raise StartUpFailed(f"{path} cannot be resumed from: {error}") from error
    request = CreateFromCheckpointRequest(path, entry.manifest.has_optimizer, {})
    return scheduler.submit_start_up(tenant, SESSION_ID, request)


async def first_model_made(scheduler: Scheduler, future: Future | None) -> None:
    """Once the model is made, or the gateway goes down. Raises `StartUpFailed`."""
    if future is None:
        return
    while not await future.wait(_PATIENCE_S):
        if scheduler.is_stopping:
            return
    assert isinstance(future.request, CreateFromCheckpointRequest)
    path = future.request.path
    if future.error is not None:
        raise StartUpFailed(f"{path} cannot be resumed from: {future.error.message}")
    loaded = future.outcome
    assert isinstance(loaded, StateLoaded)
    log.info("%s goes on from %s at iteration %d", future.model_id, path, loaded.iteration)
    if not loaded.optimizer_restored:
        why = "is not restored (--no-load-optim)" if loaded.reason == "no_load_optim" else "is not in the checkpoint"
        warning = f"{future.model_id} was resumed from {path} with a fresh optimizer: the saved one {why}"
        log.warning("%s", warning)
        scheduler.warnings[future.tenant] = warning
