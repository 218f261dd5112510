"""What a client asks of a model, as the HTTP layer hands it to the scheduler.

Structs, so that a fingerprint of a request is a digest of its msgpack encoding.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trainer_cell.protocol.commands import AdamParams, Datum, LrSchedule, Rate
from trainer_cell.protocol.errors import ErrorKind

Operation = Literal["create", "forward_backward", "optim_step", "save", "load", "unload", "import"]


class _Request(msgspec.Struct, frozen=True, tag_field="request"):
    pass


class CreateRequest(_Request, frozen=True, tag="create"):
    """A fresh adapter. `seed` None: the scheduler draws one and records it."""

    base_model: str
    rank: int
    seed: int | None
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    user_metadata: dict[str, str]
    lr_schedule: LrSchedule | None = None


class CreateFromCheckpointRequest(_Request, frozen=True, tag="create_from_checkpoint"):
    """A model of the checkpoint's base model, rank and targets, holding its state. `path` is a tinker:// address."""

    path: str
    load_optimizer: bool
    user_metadata: dict[str, str]


class ForwardBackwardRequest(_Request, frozen=True, tag="forward_backward"):
    data: tuple[Datum, ...]
    loss: str
    loss_config: dict[str, float | str]
    forward_only: bool


class OptimStepRequest(_Request, frozen=True, tag="optim_step"):
    """scheduled: the rates to take from the model's schedule instead of `adam`."""

    adam: AdamParams
    scheduled: tuple[Rate, ...] = ()


class SaveRequest(_Request, frozen=True, tag="save"):
    name: str
    kind: Literal["weights", "sampler_weights"]
    overwrite: bool
    ttl_seconds: int | None
    user_metadata: dict[str, str]


class LoadRequest(_Request, frozen=True, tag="load"):
    """Load in place. `path` is a tinker:// address."""

    path: str
    load_optimizer: bool


class UnloadRequest(_Request, frozen=True, tag="unload"):
    pass


class ImportRequest(_Request, frozen=True, tag="import"):
    """Another's files as a checkpoint. path: links followed; within: the allowed directory all files must lie in."""

    path: str
    within: str
    name: str
    format: Literal["native", "torch_dist", "peft"] | None
    load_optimizer: bool
    alpha: float | None
    overwrite: bool


class RejectedRequest(_Request, frozen=True, tag="rejected"):
    """A request that is at fault but has spent its sequence number: it fails at its place in the order.

    operation: what it was to be, an `Operation`, or "forward" for a forward-only pass.
    """

    operation: str
    kind: ErrorKind
    message: str


Request = (
    CreateRequest
    | CreateFromCheckpointRequest
    | ForwardBackwardRequest
    | OptimStepRequest
    | SaveRequest
    | LoadRequest
    | UnloadRequest
    | ImportRequest
    | RejectedRequest
)

FORWARD_ONLY = "forward"

_OPERATIONS: dict[type[Request], Operation] = {
    CreateRequest: "create",
    CreateFromCheckpointRequest: "create",
    ForwardBackwardRequest: "forward_backward",
    OptimStepRequest: "optim_step",
    SaveRequest: "save",
    LoadRequest: "load",
    UnloadRequest: "unload",
    ImportRequest: "import",
}
_BY_NAME: dict[str, Operation] = {operation: operation for operation in _OPERATIONS.values()}


def operation_of(request: Request) -> Operation:
    """A rejected request tells itself what it was to be; an unknown word counts as a forward_backward."""
    if isinstance(request, RejectedRequest):
        return _BY_NAME.get(request.operation, "forward_backward")
    return _OPERATIONS[type(request)]


def adds_gradient(request: Request) -> bool:
    """Whether the command, if it went well, would add to the accumulated gradient."""
    if isinstance(request, RejectedRequest):
        return operation_of(request) == "forward_backward" and request.operation != FORWARD_ONLY
    return isinstance(request, ForwardBackwardRequest) and not request.forward_only


def payload_bytes(request: Request) -> int:
    """Bytes of the arrays a request holds in memory until it has run."""
    if not isinstance(request, ForwardBackwardRequest):
        return 0
    return sum(len(datum.tokens) + sum(len(array.data) for array in datum.inputs.values()) for datum in request.data)
