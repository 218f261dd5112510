"""An operation: what a write of the plain REST face answers with, and what GET /v1/operations/{id} shows of it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from gateway.http.results import rest_result
from gateway.scheduling.futures import Future, FutureState
from gateway.scheduling.requests import Operation

PATH = "/v1/operations/"


class Progress(BaseModel):
    bytes_done: int
    bytes_total: int


class Failure(BaseModel):
    kind: str = Field(description="What went wrong; stable, for programs.", examples=["checkpoint_exists"])
    category: Literal["user", "server"] = Field(description="Who can mend it: the caller or the operator.")
    message: str = Field(description="What went wrong; for people.")


class OperationStatus(BaseModel):
    """Where a command is. Once `succeeded` or `failed` it stays so; reading it changes nothing."""

    id: str
    model_id: str = Field(description="The model it is about; for one that makes a model, the model's id to be.")
    operation: Operation
    state: FutureState
    progress: Progress | None = Field(description="Of a save, while it runs.")
    waiting_for: str | None = Field(description="Why it has no turn yet, though it is the first of its model's.")
    result: dict[str, Any] | None = Field(
        description="Once succeeded. Of an optim_step: step, iteration, and metrics with the learning_rate taken. Of a "
        "save or an import: path, size_bytes, step, iteration, has_optimizer. Of a load: path, step, iteration, "
        "weights_restored, optimizer_restored, scheduler_restored, and a reason where the optimizer was not restored "
        "(not_requested, no_load_optim). Numbers that are not finite are left out or null."
    )
    error: Failure | None = Field(description="Once failed.")


def status_of(future: Future) -> OperationStatus:
    failed = future.error
    return OperationStatus(
        id=future.request_id,
        model_id=future.model_id,
        operation=future.operation,
        state=future.state,
        progress=None if future.progress is None else _progress(*future.progress),
        waiting_for=future.waiting_for,
        result=rest_result(future) if future.outcome is not None else None,
        error=None
        if failed is None
        else Failure(kind=failed.kind.value, category=failed.category, message=failed.message),
    )


def _progress(bytes_done: int, bytes_total: int) -> Progress:
    return Progress(bytes_done=bytes_done, bytes_total=bytes_total)


async def accepted_operation(future: Future) -> JSONResponse:
    """202, and where to look, once it is in the journal."""
    await future.accepted()
    body = status_of(future).model_dump(mode="json")
    return JSONResponse(body, 202, headers={"Location": f"{PATH}{future.request_id}"})
