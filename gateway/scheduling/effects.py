"""What an answer changes in the gateway's picture of its model: facts, gradient window, history.

Also run over what the journal holds, in order of turn, so that a gateway that starts sees what the one before it saw.
"""

from __future__ import annotations

import msgspec

from gateway.scheduling.futures import Future
from gateway.scheduling.history import Change
from gateway.scheduling.model_queue import ModelQueue
from gateway.scheduling.requests import (
    CreateFromCheckpointRequest,
    CreateRequest,
    ForwardBackwardRequest,
    LoadRequest,
    OptimStepRequest,
    adds_gradient,
)
from trainer_cell.protocol.errors import CommandFailed, ErrorKind
from trainer_cell.protocol.outcomes import OptimStepDone, StateLoaded, Success


def note_facts(queue: ModelQueue, future: Future, answer: Success | CommandFailed) -> None:
    """What clients are told of the model."""
    model = queue.model
    match answer:
        case CommandFailed() if future.operation == "create":
            model.state, model.trouble = "failed", answer
        case OptimStepDone() | StateLoaded():
            model.step, model.iteration = answer.step, answer.iteration
    if isinstance(answer, CommandFailed):
        return
    if future.operation == "unload":
        model.state, model.trouble = "unloaded", None
    elif future.operation in ("create", "load"):
        model.state, model.trouble = "ready", None


def note_change(queue: ModelQueue, future: Future, answer: Success | CommandFailed) -> None:
    """The future has its turn; what is in the last snapshot is not noted again."""
    assert future.turn is not None
    if isinstance(answer, CommandFailed):
        _note_failure(queue, future, answer)
        return
    if (change := _change_of(future, answer)) is not None:
        queue.history.note(change)
    if isinstance(answer, OptimStepDone | StateLoaded):
        queue.window.clear()


def _note_failure(queue: ModelQueue, future: Future, failure: CommandFailed) -> None:
    assert future.turn is not None
    if future.lease is not None:
        future.lease.release()
        future.lease = None
    if adds_gradient(future.request):
        queue.window.note_failure(future)
    elif failure.kind is ErrorKind.PARTIAL_GRADIENTS:
        queue.window.clear()
        queue.history.discard_gradient(future.turn)


def _change_of(future: Future, answer: Success) -> Change | None:
    turn, request_id, request = future.turn, future.request_id, future.request
    assert turn is not None
    match request:
        case CreateRequest():
            return Change(turn, "create", request_id, request)
        case CreateFromCheckpointRequest() | LoadRequest():
            assert isinstance(answer, StateLoaded)
            assert future.version is not None
            lease, future.lease = future.lease, None
            with_optimizer = answer.optimizer_restored
            return Change(turn, "load", request_id, request, 0, future.version, with_optimizer, lease)
        case ForwardBackwardRequest(forward_only=False):
            without_data = msgspec.structs.replace(request, data=())
            return Change(turn, "forward_backward", request_id, without_data, future.payload_bytes)
        case OptimStepRequest():
            assert isinstance(answer, OptimStepDone)
            return Change(turn, "optim_step", request_id, request, iteration=answer.iteration)
    return None
