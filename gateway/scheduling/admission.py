"""What can be said about a command before the cell is asked: answers that need no rank, and what a command may cost."""

from __future__ import annotations

from datetime import timedelta

from gateway.scheduling.catalog import parse_address
from gateway.scheduling.errors import InvalidRequest
from gateway.scheduling.identity import fingerprint
from gateway.scheduling.models import Model
from gateway.scheduling.requests import (
    CreateFromCheckpointRequest,
    CreateRequest,
    ForwardBackwardRequest,
    LoadRequest,
    Operation,
    RejectedRequest,
    Request,
    SaveRequest,
    UnloadRequest,
    operation_of,
)
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import Hello, ModelFreed, Success
from trainer_cell.vault.layout import CheckpointAddress, InvalidAddress

# Adapters scale their product by alpha / rank; requests have no field for it.
LORA_ALPHA = 32.0
SHORTEST_TTL_S = 3600
LONGEST_TTL_S = int(timedelta(days=3653).total_seconds())
LARGEST_SEED = 2**63 - 1

_LEAST_DEADLINE_S = 600.0
_FEWEST_TOKENS_PER_S = 20.0
# A token, its target and a weight.
_LEAST_BYTES_PER_TOKEN = 16

_FIXED_COSTS: dict[Operation, int] = {
    "create": 256,
    "forward_backward": 64,
    "optim_step": 256,
    "save": 1024,
    "load": 1024,
    "unload": 64,
    "import": 1024,
}


def fingerprinted(request: Request) -> tuple[Request, bytes]:
    """The request with its fingerprint; one that no message can carry is rejected at its place."""
    try:
        return request, fingerprint(request)
    except (OverflowError, UnicodeEncodeError):
        reason = "a number or a text of the request is out of range"
        rejected = RejectedRequest(operation_of(request), ErrorKind.BAD_COMMAND, reason)
        return rejected, fingerprint(rejected)


def estimated_cost(request: Request) -> int:
    """Tokens, or what takes about as long."""
    fixed = _FIXED_COSTS[operation_of(request)]
    if isinstance(request, ForwardBackwardRequest):
        tokens = sum(len(datum.tokens) // 4 for datum in request.data)
        return fixed + (tokens // 3 if request.forward_only else tokens)
    return fixed


def deadline_s(operation: Operation, payload_bytes: int) -> float:
    """How long the ranks may take for a command before the cell counts as wedged: generous, since ending a cell that
    is merely slow helps nobody. payload_bytes: of all its arrays."""
    return _LEAST_DEADLINE_S + payload_bytes / _LEAST_BYTES_PER_TOKEN / _FEWEST_TOKENS_PER_S


def answer_without_cell(model: Model, request: Request, is_away: bool) -> Success | CommandFailed | None:
    """The answer of a command at the head of its model's queue, where no cell is needed to know it; else None.

    is_away: no cell holds anything of the model.
    """
    if isinstance(request, RejectedRequest):
        return CommandFailed(request.kind, request.message)
    if model.state == "unloaded":
        return CommandFailed(ErrorKind.UNKNOWN_MODEL, f"model {model.model_id} was unloaded")
    if model.state == "failed":
        assert model.trouble is not None
        return CommandFailed(model.trouble.kind, f"model {model.model_id} was not made: {model.trouble.message}")
    if is_away and isinstance(request, UnloadRequest):
        return ModelFreed(command_id="", was_resident=False)
    if model.state == "lost" and not isinstance(request, LoadRequest):
        return model.trouble
    try:
        _check_form(request)
    except CommandFailed as failure:
        return failure
    return None


def _check_form(request: Request) -> None:
    match request:
        case CreateRequest():
            _check_seed_and_targets(request)
        case SaveRequest():
            _check_save(request)
        case LoadRequest() | CreateFromCheckpointRequest():
            load_address(request.path)


def _check_seed_and_targets(request: CreateRequest) -> None:
    if request.seed is not None and not 0 <= request.seed <= LARGEST_SEED:
        raise CommandFailed(ErrorKind.BAD_COMMAND, f"seed must be between 0 and {LARGEST_SEED}")
    if not (request.train_attn or request.train_mlp or request.train_unembed):
        raise CommandFailed(
            ErrorKind.BAD_COMMAND, "nothing to train: train_attn, train_mlp and train_unembed are all false"
        )


def _check_save(request: SaveRequest) -> None:
    try:
        CheckpointAddress("model", request.kind, request.name)
    except InvalidAddress as error:
        raise CommandFailed(ErrorKind.BAD_COMMAND, f"invalid checkpoint name: {error}") from error
    if request.ttl_seconds is not None and not SHORTEST_TTL_S <= request.ttl_seconds <= LONGEST_TTL_S:
        raise CommandFailed(ErrorKind.BAD_COMMAND, f"ttl_seconds must be between {SHORTEST_TTL_S} and {LONGEST_TTL_S}")


def load_address(path: str) -> CheckpointAddress:
    """The address of a checkpoint that can be trained on; raises `CommandFailed`."""
    try:
        address = parse_address(path)
    except InvalidRequest as error:
        raise CommandFailed(ErrorKind.BAD_COMMAND, error.message) from error
    if address.kind == "sampler_weights":
        raise CommandFailed(
            ErrorKind.BAD_COMMAND,
            f"{path} is a {address.kind} checkpoint, which is for sampling; training loads a weights checkpoint",
        )
    return address


def adapter_of(request: CreateRequest) -> AdapterSpec:
    return AdapterSpec(request.rank, LORA_ALPHA, request.train_attn, request.train_mlp, request.train_unembed)


def check_create(request: CreateRequest, hello: Hello) -> None:
    """What only the cell's hello can tell; raises `CommandFailed`."""
    served = (hello.base_model.name, *hello.base_model.aliases)
    if request.base_model not in served:
        raise CommandFailed(
            ErrorKind.BAD_COMMAND, f"unknown base model {request.base_model!r}; served here: {', '.join(served)}"
        )
    check_rank(request.rank, hello)


def check_rank(rank: int, hello: Hello) -> None:
    if not 1 <= rank <= hello.max_lora_rank:
        raise CommandFailed(ErrorKind.BAD_COMMAND, f"rank must be between 1 and {hello.max_lora_rank}, not {rank}")


def other_base(model: Model, hello: Hello | None) -> str | None:
    """Why the model cannot run on this cell, if its state is one over other base weights; it waits for a cell with its
    own."""
    if hello is None or model.base_digest is None or model.base_digest == hello.base_model.digest:
        return None
    return f"its base model {model.base_model} is not the one that is served now"


def poison(num_lost: int) -> CommandFailed:
    """The answer of a command that ended so many cells."""
    reason = f"the trainer cell was lost {num_lost} times while it ran this command, which is not tried again: "
    reason += "it may need more memory or time than there is; the model is as it was before"
    return CommandFailed(ErrorKind.CELL_LOST, reason)
