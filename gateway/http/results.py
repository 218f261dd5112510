"""What a future answers with, once it is done: in the SDK's words, and in those of the plain REST face.

JSON has no NaN and no infinity: metrics that are not finite are left out of it, logprobs that are not finite appear as
null. In protobuf they pass as they are.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from starlette.responses import JSONResponse, Response

from gateway.http import protobuf
from gateway.http.bodies import PROTOBUF
from gateway.scheduling.futures import Future
from gateway.scheduling.requests import CreateFromCheckpointRequest, ImportRequest, LoadRequest, SaveRequest
from trainer_cell.protocol.errors import CommandFailed
from trainer_cell.protocol.outcomes import ForwardBackwardDone, OptimStepDone, StateLoaded, StateSaved, Success
from trainer_cell.vault.layout import CheckpointAddress


async def sdk_response(future: Future, accepts_protobuf: bool) -> Response:
    """The final answer of retrieve_future: always 200; a failure is told in the body, and the SDK takes it as final."""
    assert future.is_done
    if future.error is not None:
        return JSONResponse(_sdk_failure(future.error))
    assert future.outcome is not None
    if not isinstance(future.outcome, ForwardBackwardDone):
        return JSONResponse(_sdk_success(future, future.outcome))
    if accepts_protobuf:
        return Response(protobuf.encode_result(future.outcome), media_type=PROTOBUF)
    # A million floats as text would hold up everybody else.
    return await asyncio.to_thread(_in_json, future, future.outcome)


def _in_json(future: Future, outcome: Success) -> JSONResponse:
    return JSONResponse(_sdk_success(future, outcome))


def _sdk_failure(error: CommandFailed) -> dict[str, Any]:
    return {"error": error.message, "category": error.category, "kind": error.kind.value}


def _sdk_success(future: Future, outcome: Success) -> dict[str, Any]:
    match future.operation:
        case "create" if isinstance(future.request, CreateFromCheckpointRequest):
            return {"type": "load_weights", "model_id": future.model_id, **_what(future, outcome)}
        case "create":
            return {"type": "create_model", "model_id": future.model_id}
        case "forward_backward":
            return {"type": "forward_backward", **_what(future, outcome)}
        case "optim_step":
            return _what(future, outcome)
        case "save" | "import":
            return {"type": "save_weights", **_what(future, outcome)}
        case "load":
            return {"type": "load_weights", "model_id": future.model_id, **_what(future, outcome)}
        case "unload":
            return {"type": "unload_model", "model_id": future.model_id}


def rest_result(future: Future) -> dict[str, Any]:
    """`result` of an operation that succeeded."""
    assert future.outcome is not None
    if isinstance(future.outcome, ForwardBackwardDone):
        return {"model_id": future.model_id, "metrics": finite(future.outcome.metrics)}
    return {"model_id": future.model_id, **_what(future, future.outcome)}


def _what(future: Future, outcome: Success) -> dict[str, Any]:
    """What an outcome tells, in words both faces share."""
    match outcome:
        case ForwardBackwardDone():
            return _losses(outcome)
        case OptimStepDone():
            return {"metrics": finite(outcome.metrics), "step": outcome.step, "iteration": outcome.iteration}
        case StateSaved():
            return {
                "path": saved_path(future),
                "size_bytes": outcome.size_bytes,
                "step": outcome.step,
                "iteration": outcome.iteration,
                "has_optimizer": outcome.has_optimizer,
            }
        case StateLoaded():
            return {
                "path": _loaded_path(future),
                "step": outcome.step,
                "iteration": outcome.iteration,
                "weights_restored": True,
                "optimizer_restored": outcome.optimizer_restored,
                "scheduler_restored": outcome.scheduler_restored,
                "reason": outcome.reason,
            }
        case _:
            return {}


def _losses(outcome: ForwardBackwardDone) -> dict[str, Any]:
    logprobs = [[_json_number(value) for value in protobuf.floats(one)] for one in outcome.logprobs]
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": {"data": one, "dtype": "float32", "shape": [len(one)]}} for one in logprobs],
        "metrics": finite(outcome.metrics),
    }


def finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def saved_path(future: Future) -> str:
    if isinstance(future.request, ImportRequest):
        return CheckpointAddress(future.model_id, "weights", future.request.name).uri
    assert isinstance(future.request, SaveRequest)
    return CheckpointAddress(future.model_id, future.request.kind, future.request.name).uri


def _loaded_path(future: Future) -> str:
    assert isinstance(future.request, LoadRequest | CreateFromCheckpointRequest)
    return future.request.path
